"""Runs in an environment with SkyRL: its checks take what our generator gives, and its advantage and loss move a model."""

import asyncio
import json
import sys
import typing
from pathlib import Path

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic asks for it before Python 3.12
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import compute_grpo_outcome_advantage
from skyrl.train.generators.base import BatchMetadata, TrajectoryID
from skyrl.train.utils.trainer_utils import validate_generator_output
from tiny_engine import TASK, TinyEngine, grpo_step, model, moved, weights

from rollyard.train.plugins.skyrl import RolloutGenerator

(url,) = sys.argv[1:]
net = model()
before, tiny = weights(net), TinyEngine(net)


class Engine:
    async def generate(self, batch):
        assert batch["sampling_params"] == {"temperature": 1.0, "logprobs": 1}
        made = [tiny.sample(prompt) for prompt in batch["prompt_token_ids"]]
        return {"response_ids": [ids for ids, _ in made], "response_logprobs": [logprobs for _, logprobs in made]}


def batch(task):
    # two of the four succeed, whichever: the larger group is never of one mind
    names = [TrajectoryID(*name) for name in (("a", 0), ("a", 1), ("a", 2), ("b", 0))]
    return {
        "prompts": [[{"role": "user", "content": TASK["instruction"]}]] * 4,
        "env_classes": ["rollyard"] * 4,
        "env_extras": [{"task": json.dumps(task)}] * 4,
        "sampling_params": {"temperature": 1.0},
        "trajectory_ids": names,
        "batch_metadata": BatchMetadata(0, "train"),
    }


async def main():
    for all_rows in (False, True):
        generator = RolloutGenerator(Engine(), url=url, all_rows=all_rows)
        out = await generator.generate(batch(TASK))
        validate_generator_output(4, out, step_wise=all_rows)
        assert [name.to_string() for name in out["trajectory_ids"]] == ["a_0", "a_1", "a_2", "b_0"]
        assert sum(sum(rewards) for rewards in out["rewards"]) == 2.0
    unjudged = await generator.generate(batch({"id": "x", "instruction": "no verifier"}))
    validate_generator_output(4, unjudged)
    assert not any(any(mask) for mask in unjudged["loss_masks"])
    assert unjudged["rollout_metrics"] == {"rollyard/masked_rollouts": 4.0}
    return out


out = asyncio.run(main())
size = max(len(ids) for ids in out["response_ids"])
rewards = torch.tensor([row + [0.0] * (size - len(row)) for row in out["rewards"]])
mask = torch.tensor([row + [0] * (size - len(row)) for row in out["loss_masks"]]).float()
groups = np.array([name.instance_id for name in out["trajectory_ids"]])
advantages, _ = compute_grpo_outcome_advantage(rewards, mask, groups)
whole = zip(out["prompt_token_ids"], out["response_ids"], out["loss_masks"], out["rollout_logprobs"], strict=True)
grpo_step(
    net,
    [(p + r, [0] * len(p) + m, [0.0] * len(p) + q) for p, r, m, q in whole],
    advantages.max(-1)[0] + advantages.min(-1)[0],
)
assert moved(net, before), "nothing was trained"
print("ok")
