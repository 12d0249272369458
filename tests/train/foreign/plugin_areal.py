"""Runs in an environment with AReaL: its checks take the episodes of our workflow, and its loss moves a model."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: (  # built for CUDA and another torch: transformers must not see it
    None if name.split(".")[0] in ("torchvision", "torchaudio") else find(name, *rest)
)

import torch
from areal.api.cli_args import GenerationHyperparameters
from areal.api.io_struct import ModelResponse
from areal.infra.workflow_executor import check_trajectory_format
from areal.utils.data import concat_padded_tensors
from areal.utils.functional import ppo_actor_loss_fn
from tiny_engine import TASK, TinyEngine, model, moved, weights

from rollyard.train.plugins.areal import AgentWorkflow

(url,) = sys.argv[1:]
net = model()
before, tiny = weights(net), TinyEngine(net)


class Engine:
    async def agenerate(self, request):
        ids, logprobs = tiny.sample(request.input_ids)
        return ModelResponse(
            input_tokens=request.input_ids, output_tokens=ids, output_logprobs=logprobs, output_versions=[2] * len(ids)
        )


async def main():
    workflow = AgentWorkflow(GenerationHyperparameters(), url)
    data = {"task": json.dumps(TASK)}
    made = await asyncio.gather(*(workflow.arun_episode(Engine(), data) for _ in range(4)))
    rejected = await workflow.arun_episode(Engine(), {"task": {"id": "x", "instruction": "no verifier"}})
    return made, rejected


made, rejected = asyncio.run(main())
assert rejected is None
assert all(check_trajectory_format(one) for one in made)
batch = concat_padded_tensors(made)
assert sorted(batch["rewards"].tolist()) == [0.0, 0.0, 1.0, 1.0]
mask = batch["loss_mask"].bool()
assert set(batch["versions"][mask].tolist()) == {2}
logits = net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits[:, :-1]
new = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
old = batch["logprobs"][:, 1:]
assert ((new.detach() - old).abs() * mask[:, 1:]).max() < 1e-3, "the logprobs of the rollouts are not the model's"
advantages = (batch["rewards"] - batch["rewards"].mean())[:, None].expand_as(new)
loss, _ = ppo_actor_loss_fn(new, new.detach(), old, advantages, 0.2, mask[:, 1:])
loss.backward()
torch.optim.SGD(net.parameters(), lr=0.5).step()
assert moved(net, before), "nothing was trained"
print("ok")
