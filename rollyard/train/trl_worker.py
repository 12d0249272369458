"""A rollout worker for TRL's `AsyncGRPOTrainer(rollout_worker=...)`: it implements `RolloutWorkerProtocol`.

`group(number, version)` makes the rollouts of one group, any number of rows each. Advantages are over the group's rollouts.
A rollout that has a reward and cannot be trained on stops the worker, and `check_health` says so in the trainer: a worker that
went on without it would bias every batch in silence.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from rollyard.core.errors import ConfigError, Error
from rollyard.core.rollout import Rollout
from rollyard.train.adapters.trl import rollout_samples
from rollyard.train.background import BackgroundWork

Group = Callable[[int, int], Awaitable[Sequence[Rollout]]]
STOPPING_S = 60.0
FULL_S = 0.05  # between two looks at a full buffer


class MadeGroup(NamedTuple):
    """Fields of the group's `RolloutSample`s, and how many of its rollouts have none for want of a reward."""

    samples: Sequence[Mapping[str, Any]]
    unscored: int


class SampleWorker(ABC):
    """`parallel` groups are made at a time; `buffer` bounds how many samples wait for the trainer."""

    def __init__(self, *, parallel: int = 2, buffer: int = 256) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=buffer)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.model_version = 0
        self._parallel = parallel
        self._numbers = itertools.count()
        self._moved_at = time.monotonic()
        self._work: BackgroundWork[None] | None = None

    def start(self) -> None:
        if self._work is None:
            self._moved_at = time.monotonic()
            self._work = BackgroundWork(self._produce())

    def stop(self) -> None:
        """Ends the rollouts under way and waits until their sandboxes are gone."""
        if self._work is not None and not self._work.over:
            self._work.end(STOPPING_S)

    def update_model_version(self, model_version: int) -> None:
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        if self._work is None:
            raise ConfigError("the rollout worker was not started", hint="call start() first")
        if self._work.over:
            self._work.result()
            raise Error("the rollout worker has stopped")
        idle = time.monotonic() - self._moved_at
        if idle > stale_after_s:
            raise Error(f"no rollout group ended for {idle:.0f} s")

    @abstractmethod
    async def make_group(self, number: int, version: int) -> MadeGroup: ...

    async def _produce(self) -> None:
        sample = _sample_type()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._parallel):
                tasks.create_task(self._groups(sample))

    async def _groups(self, sample: Callable[..., Any]) -> None:
        while True:
            number, version = next(self._numbers), self.model_version
            made = await self.make_group(number, version)
            counts = {"rollyard/rows": float(len(made.samples)), "rollyard/unscored": float(made.unscored)}
            self.metrics_queue.put_nowait(counts)
            for fields in made.samples:
                await self._push(sample(**fields))
            self._moved_at = time.monotonic()

    async def _push(self, sample: Any) -> None:
        sample.enqueued_at = time.time()
        while True:
            try:
                return self.rollout_buffer.put_nowait(sample)
            except queue.Full:
                self._moved_at = time.monotonic()  # waiting for the trainer is no standstill
                await asyncio.sleep(FULL_S)


class RolloutWorker(SampleWorker):
    """The groups are rollouts of this process."""

    def __init__(self, group: Group, *, parallel: int = 2, buffer: int = 256) -> None:
        super().__init__(parallel=parallel, buffer=buffer)
        self._group = group

    async def make_group(self, number: int, version: int) -> MadeGroup:
        rollouts = await self._group(number, version)
        made = rollout_samples(rollouts, version=version, first_group=number)
        return MadeGroup(made, sum(rollout.reward is None for rollout in rollouts))


def _sample_type() -> Callable[..., Any]:
    """`RolloutSample` with its arrays; the trainer's own package is imported here and nowhere else."""
    try:
        import numpy

        RolloutSample: Any = import_module("trl.experimental.async_grpo.async_rollout_worker").RolloutSample
    except ImportError as error:
        raise ConfigError("the rollout worker needs TRL", hint="pip install 'rollyard[trl]'") from error

    def make(*, input_ids: list[int], completion_mask: list[int], old_log_probs: list[float], **fields: Any) -> Any:
        return RolloutSample(
            input_ids=numpy.asarray(input_ids, dtype=numpy.int64),
            completion_mask=numpy.asarray(completion_mask, dtype=numpy.int64),
            old_log_probs=numpy.asarray(old_log_probs, dtype=numpy.float32),
            **fields,
        )

    return make
