"""SkyRL 0.3: `RolloutGenerator`, and `RolloutExperiment` whose `get_generator` gives it.

    python -m rollyard.train.plugins.skyrl OPTIONS    # those of skyrl.train.entrypoints.main_base

An environment is a column of the dataset in SkyRL, and a task here: each row has `task` beside its prompt
(`env_extras`), and `env_class` is not asked. SkyRL's own engines answer the agents' calls (the server has `--policy
queue#renderer=MODEL`). One row of each rollout trains, or with `generator.step_wise_trajectories` all of them.

SkyRL's baseline knows no missing reward. A group with a rollout that has none is masked whole: it trains nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rollyard.core.errors import ConfigError
from rollyard.train.adapters.rows import main_row
from rollyard.train.adapters.skyrl import rows_output
from rollyard.train.plugins.import_trainer import import_trainer
from rollyard.train.plugins.served_rollouts import Generate, Generation, HeldCall, ServedGroup, ServedRollouts
from rollyard.trajectory.samples import Sample

_base: Any = import_trainer("skyrl.train.generators.base")


class RolloutGenerator(_base.GeneratorInterface):  # pyright: ignore[reportUntypedBaseClass]
    def __init__(
        self,
        engine: Any,
        *,
        url: str | None = None,
        key: str | None = None,
        job: Mapping[str, Any] | None = None,
        all_rows: bool = False,
        pad_id: int = 0,
    ) -> None:
        self._rollouts = ServedRollouts(url, key, job=job)
        self._engine, self._all, self._pad = engine, all_rows, pad_id

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """The prompts of one instance are attempts of one job; the order stays."""
        extras, names = input_batch.get("env_extras"), input_batch.get("trajectory_ids")
        if extras is None or names is None:
            raise ConfigError(
                "the batch has no env_extras or no trajectory_ids", hint="each row of the dataset has a task"
            )
        places: dict[str, list[int]] = {}
        for place, name in enumerate(names):
            places.setdefault(name.instance_id, []).append(place)
        generate = self._engine_calls(input_batch.get("sampling_params") or {})
        groups = await asyncio.gather(
            *(self._rollouts.group(_task(extras[at[0]]), attempts=len(at), generate=generate) for at in places.values())
        )
        found: list[Sequence[Sample]] = [()] * len(names)
        masked: set[int] = set()
        for at, group in zip(places.values(), groups, strict=True):
            masked |= set(at) if group.left_out else set()
            for place, rows in zip(at, self._keep(group), strict=True):
                found[place] = rows
        return _mask(rows_output(list(zip(names, found, strict=True)), pad_id=self._pad), names, masked)

    def _keep(self, group: ServedGroup) -> list[Sequence[Sample]]:
        return [rows if self._all or not rows else (main_row(rows),) for rows in group.rollouts]

    def _engine_calls(self, sampling: Mapping[str, Any]) -> Generate:
        async def generate(calls: Sequence[HeldCall]) -> list[Generation]:
            made = await self._engine.generate(
                {
                    "prompts": None,
                    "prompt_token_ids": [list(call["prompt_ids"]) for call in calls],
                    "sampling_params": {**sampling, "logprobs": 1},
                    "session_ids": [call["session_id"] for call in calls],
                    "mm_features": None,
                    "cache_salt": None,
                }
            )
            return [Generation(i, p) for i, p in zip(made["response_ids"], made["response_logprobs"], strict=True)]

        return generate


def _task(extras: Mapping[str, Any]) -> Any:
    task = extras.get("task") or (extras.get("extra_info") or {}).get("task")
    if not task:
        raise ConfigError("the row has no task", hint="a column task with the task's JSON")
    return task


def _mask(out: dict[str, Any], names: Sequence[Any], masked: set[int]) -> dict[str, Any]:
    """Nothing of these groups trains, and their rewards are alike, so that they tell a baseline nothing."""
    hidden = {(names[place].instance_id, names[place].repetition_id) for place in masked}
    for row, name in enumerate(out["trajectory_ids"]):
        if (name.instance_id, name.repetition_id) in hidden:
            out["loss_masks"][row] = [0] * len(out["loss_masks"][row])
            out["rewards"][row] = [0.0] * len(out["rewards"][row])
    out["rollout_metrics"] = {"rollyard/masked_rollouts": float(len(masked))}
    return out


def main() -> None:
    """SkyRL's own entry point, with our generator."""
    start: Any = import_trainer("skyrl.train.entrypoints.main_base")
    ray: Any = import_trainer("ray")

    class RolloutExperiment(start.BasePPOExp):
        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> RolloutGenerator:
            all_rows = bool(cfg.generator.step_wise_trajectories)
            return RolloutGenerator(inference_engine_client, all_rows=all_rows, pad_id=tokenizer.pad_token_id or 0)

    def train(cfg: Any) -> None:
        RolloutExperiment(cfg).run()

    cfg = start.SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    start.validate_cfg(cfg)
    start.initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(train).remote(cfg))


if __name__ == "__main__":
    main()
