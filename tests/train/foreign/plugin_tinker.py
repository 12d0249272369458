"""Runs in an environment with Tinker: a sampling client of its types answers the agents' calls, and its `Datum` takes the rows."""

import asyncio
import json
import sys
from types import SimpleNamespace

import tinker

from rollyard.train.plugins.served_rollouts import ServedRollouts
from rollyard.train.plugins.tinker import group_data

(url,) = sys.argv[1:]
TASK = {"id": "hello", "instruction": "write hello to out.txt", "verify": ["test -f out.txt"]}


class Sampler:
    begun = 0

    async def sample_async(self, prompt, count, params):
        assert isinstance(params, tinker.SamplingParams) and (count, params.stop) == (1, [261])
        said = bytes(one for one in prompt.to_ints() if one < 256).decode(errors="replace")
        text = "done"
        if not any(f'"command": "{one}"' in said for one in ("echo hello > out.txt", "true")):
            command = "echo hello > out.txt" if self.begun % 2 == 0 else "true"
            self.begun += 1
            text = f"<tool_call>\n{json.dumps({'name': 'shell', 'arguments': {'command': command}})}\n</tool_call>"
        ids = [*text.encode(), 261]
        return SimpleNamespace(sequences=[SimpleNamespace(tokens=ids, logprobs=[-0.5] * len(ids))])


data = asyncio.run(group_data(ServedRollouts(url), TASK, Sampler(), attempts=4, max_tokens=64, stop=[261]))
assert len(data) == 4 and all(isinstance(one, tinker.Datum) for one in data)
signs = sorted(max(one.loss_fn_inputs["advantages"].data, key=abs) for one in data)
assert signs == [-1.0, -1.0, 1.0, 1.0], signs
for one in data:
    marked = zip(one.loss_fn_inputs["advantages"].data, one.loss_fn_inputs["logprobs"].data, strict=True)
    assert all((advantage != 0) == (logprob == -0.5) for advantage, logprob in marked)
print("ok")
