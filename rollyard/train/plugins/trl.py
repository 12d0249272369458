"""TRL 1.16: `RolloutFunction` for `GRPOTrainer(rollout_func=...)`, `ServedWorker` for `AsyncGRPOTrainer(rollout_worker=...)`.

    rollouts = RolloutFunction(tasks, "http://runner:8800")
    GRPOTrainer(..., train_dataset=Dataset.from_list(rollouts.dataset()), rollout_func=rollouts, reward_funcs=env_reward)

The model that is trained answers the agents' calls: the server has `--policy queue#renderer=MODEL`. `rollout_func`
keeps one row of each rollout; the worker keeps all, and its server asks the vLLM that the trainer sends its weights
to (`--base-url`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rollyard import sync
from rollyard.core.errors import ConfigError
from rollyard.train.adapters.trl import env_reward, main_rows
from rollyard.train.plugins.served_rollouts import Generate, Generation, HeldCall, ServedRollouts
from rollyard.train.trl_worker import MadeGroup, SampleWorker
from rollyard.trajectory.samples import Sample

__all__ = ["RolloutFunction", "ServedWorker", "env_reward"]


class RolloutFunction:
    """`tasks` are rows, found again by their instructions, which are the prompts. `generate` answers calls in place of the
    trainer's own generation."""

    def __init__(
        self,
        tasks: Sequence[Mapping[str, Any]],
        url: str | None = None,
        key: str | None = None,
        *,
        job: Mapping[str, Any] | None = None,
        generate: Generate | None = None,
    ) -> None:
        self._rollouts = ServedRollouts(url, key, job=job)
        self._tasks = {str(task["instruction"]): task for task in tasks}
        self._generate = generate
        if len(self._tasks) < len(tasks):
            raise ConfigError("two tasks have the same instruction: a prompt must name one")

    def dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": instruction}]} for instruction in self._tasks]

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        pad = trainer.processing_class.pad_token_id or 0
        return main_rows(asyncio.run(self._run(prompts, self._generate or engine_of(trainer))), pad_id=pad)

    async def _run(self, prompts: Sequence[Any], generate: Generate) -> list[Sequence[Sample]]:
        """The prompts of one group are attempts of one job."""
        places: dict[str, list[int]] = {}
        for place, prompt in enumerate(prompts):
            places.setdefault(_text(prompt), []).append(place)
        found: list[Sequence[Sample]] = [()] * len(prompts)

        async def run(text: str, at: list[int]) -> None:
            if text not in self._tasks:
                raise ConfigError(f"no task has the instruction {text[:80]!r}", hint="train on dataset()")
            group = await self._rollouts.group(self._tasks[text], attempts=len(at), generate=generate)
            for place, rows in zip(at, group.rollouts, strict=True):
                found[place] = rows

        await asyncio.gather(*(run(text, at) for text, at in places.items()))
        return found


def engine_of(trainer: Any) -> Generate:
    """The trainer's own generation: its vLLM, or its model."""
    if trainer.accelerator.num_processes > 1 and not (trainer.use_vllm and trainer.vllm_mode == "colocate"):
        raise ConfigError(
            "calls come to each process in its own time, and this generation is one of all processes together",
            hint='use_vllm=True with vllm_mode="colocate", or the asynchronous trainer',
        )
    version = int(trainer.state.global_step)

    async def generate(calls: Sequence[HeldCall]) -> list[Generation]:
        prompts = [list(call["prompt_ids"]) for call in calls]
        ids, logprobs = trainer._generate_single_turn(prompts, None, {}, 1)  # noqa: SLF001  TRL has no public name for it
        if logprobs is None:
            logprobs = [_logprobs(trainer, prompt, sampled) for prompt, sampled in zip(prompts, ids, strict=True)]
        return [Generation(list(one), list(p), version) for one, p in zip(ids, logprobs, strict=True)]

    return generate


def _logprobs(trainer: Any, prompt: list[int], sampled: Sequence[int]) -> list[float]:
    """Of tokens that the model itself sampled without saying how likely they were."""
    import torch

    whole = torch.tensor([[*prompt, *sampled]], device=trainer.accelerator.device)
    with torch.no_grad():
        logits = trainer.model(input_ids=whole).logits[0, len(prompt) - 1 : -1] / trainer.temperature
    return logits.float().log_softmax(-1).gather(-1, whole[0, len(prompt) :, None])[:, 0].tolist()


def _text(prompt: Any) -> str:
    """The instruction in a prompt: text, or messages whose last one is the user's."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


class ServedWorker(SampleWorker):
    """Groups of `attempts` rollouts over `tasks`, again and again. The server's model is the vLLM of the trainer."""

    def __init__(
        self,
        tasks: Sequence[Mapping[str, Any]],
        url: str | None = None,
        key: str | None = None,
        *,
        attempts: int = 8,
        job: Mapping[str, Any] | None = None,
        generate: Generate | None = None,
        parallel: int = 2,
        buffer: int = 256,
    ) -> None:
        super().__init__(parallel=parallel, buffer=buffer)
        self._rollouts, self._attempts, self._generate = ServedRollouts(url, key, job=job), attempts, generate
        self._tasks = itertools.cycle(tasks)

    def update_model_version(self, model_version: int) -> None:
        super().update_model_version(model_version)
        sync.wait(self._rollouts.publish(model_version))

    async def make_group(self, number: int, version: int) -> MadeGroup:
        task, attempts = next(self._tasks), self._attempts
        rows, left_out = await self._rollouts.rows(task, "trl", attempts=attempts, generate=self._generate)
        return MadeGroup([{**row, "group_id": number} for row in rows], len(left_out))
