"""Tinker: `group_data` gives the `Datum`s of a group whose calls a sampling client answered, advantages included.

sampler = await training.save_weights_and_get_sampling_client_async()
data = await group_data(ServedRollouts(url), task, sampler, attempts=8, max_tokens=1024)
await training.forward_backward_async(data, "importance_sampling")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollyard.train.adapters.tinker import rows_data
from rollyard.train.plugins.import_trainer import import_trainer
from rollyard.train.plugins.served_rollouts import Generate, Generation, HeldCall, ServedRollouts, TaskRow, one_by_one

_types: Any = import_trainer("tinker.types")


async def group_data(
    rollouts: ServedRollouts,
    task: TaskRow,
    sampler: Any,
    *,
    attempts: int,
    max_tokens: int,
    temperature: float = 1.0,
    stop: Sequence[int] = (),
) -> list[Any]:
    """Rollouts without a verdict are left out, and the baseline is over the others."""
    generate = engine_of(sampler, max_tokens=max_tokens, temperature=temperature, stop=stop)
    group = await rollouts.group(task, attempts=attempts, generate=generate)
    return [
        _types.Datum(model_input=_types.ModelInput.from_ints(one["model_input"]), loss_fn_inputs=one["loss_fn_inputs"])
        for one in rows_data([row for rows in group.rollouts for row in rows])
    ]


def engine_of(sampler: Any, *, max_tokens: int, temperature: float, stop: Sequence[int]) -> Generate:
    async def sample(call: HeldCall) -> Generation:
        params = _types.SamplingParams(max_tokens=max_tokens, temperature=temperature, stop=list(stop) or None)
        prompt = _types.ModelInput.from_ints(list(call["prompt_ids"]))
        (made,) = (await sampler.sample_async(prompt, 1, params)).sequences
        return Generation(made.tokens, made.logprobs)

    return one_by_one(sample)
