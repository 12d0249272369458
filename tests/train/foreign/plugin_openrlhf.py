"""Runs in an environment with OpenRLHF's data types: the executor that its engines would load is one of its own kind,
and gives the fields that its samples are made of."""

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))

import torch
from openrlhf.utils.agent import AgentExecutorBase
from tiny_engine import TASK, TinyEngine, grpo_step, model, moved, weights

(url,) = sys.argv[1:]
os.environ["ROLLYARD_ROLLOUTS_URL"] = url
net = model()
before, tiny = weights(net), TinyEngine(net)


class Engine:
    async def generate(self, ids, params):
        assert params.logprobs == 1 and params.max_tokens == 4096 - len(ids)
        made, logprobs = tiny.sample(ids)
        by_id = [{one: SimpleNamespace(logprob=p)} for one, p in zip(made, logprobs, strict=True)]
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=made, logprobs=by_id)])


import rollyard.train.plugins

path = Path(rollyard.train.plugins.__file__).with_name("openrlhf.py")
spec = importlib.util.spec_from_file_location("agent_module", path)  # as its vllm_engine.py loads it
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert issubclass(module.AgentExecutor, AgentExecutorBase)
executor = module.AgentExecutor()


async def main():
    params = SimpleNamespace(logprobs=None, max_tokens=None, temperature=1.0)
    label = json.dumps(TASK)
    return await asyncio.gather(
        *(executor.execute(TASK["instruction"], label, params, 4096, None, Engine()) for _ in range(4))
    )


made = asyncio.run(main())
assert sorted(one["reward"] for one in made) == [0.0, 0.0, 1.0, 1.0]
rows = []
for one in made:  # as its samples_generator.py reads them
    mask = torch.zeros(len(one["observation_tokens"]), dtype=torch.long)
    for start, end in one["action_ranges"]:
        mask[start:end] = 1
    assert mask.sum() > 30 and len(one["rollout_log_probs"]) == len(one["observation_tokens"])
    rows.append((one["observation_tokens"], mask.tolist(), one["rollout_log_probs"]))
rewards = torch.tensor([one["reward"] for one in made])
grpo_step(net, rows, rewards - rewards.mean())
assert moved(net, before), "nothing was trained"
print("ok")
