"""`--log-to`: the numbers of a run for Weights & Biases, MLflow or TensorBoard while it goes on, one step for each rollout.

A logger runs beside a display and gets the same events. One that fails while the run goes on is left out from then on, with one
line on stderr: a dashboard that is away costs no rollout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, Self

from rollyard.core.errors import ConfigError, MissingExtra, UnknownName
from rollyard.core.events import Event
from rollyard.core.rollout import Rollout
from rollyard.runs.display.progress import Display

PROJECT = "rollyard"


class RunLogger(Protocol):
    """One dashboard's run, opened when it is made."""

    def log(self, numbers: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class _Wandb:
    def __init__(self, where: str, run_id: str) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(project=where or PROJECT, name=run_id, config={"rollyard_run": run_id})

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """`where` is the tracking server or folder; without it MLflow's own settings decide."""

    def __init__(self, where: str, run_id: str) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._metric, self._client = Metric, MlflowClient(tracking_uri=where or None)
        found = self._client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(PROJECT)
        self._id: str = self._client.create_run(experiment, run_name=run_id).info.run_id

    def log(self, numbers: dict[str, float], step: int) -> None:
        import time

        at = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[self._metric(name, value, at, step) for name, value in numbers.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self._id)


class _TensorBoard:
    """`where` is the folder of event files; `runs` without it."""

    def __init__(self, where: str, run_id: str) -> None:
        from tensorboard.summary import DirectoryOutput, Writer  # pyright: ignore[reportMissingImports]

        self._writer = Writer(DirectoryOutput(f"{where or 'runs'}/{run_id}"))

    def log(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


LOGGERS: dict[str, Callable[[str, str], RunLogger]] = {
    "wandb": _Wandb,
    "mlflow": _Mlflow,
    "tensorboard": _TensorBoard,
}


class LoggedDisplay:
    """A display, and loggers beside it; `texts` are `KIND` or `KIND:WHERE`."""

    def __init__(self, shown: Display, texts: Sequence[str]) -> None:
        self._shown = shown
        self.run_id = ""
        self._wanted = [_parse(text) for text in texts]
        self._open: dict[str, RunLogger] = {}
        self._stack = ExitStack()
        self._count, self._rewards = 0, list[float]()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._shown)
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._open):
            self._try(name, lambda logger: logger.close())
        self._stack.close()

    def begin(self, run_id: str, owed: int, done: int) -> None:
        """A logger that cannot be opened ends the run before it has begun: nothing asked for is left out in silence."""
        self._shown.begin(run_id, owed, done)
        self.run_id, self._count = run_id, done
        for kind, where in self._wanted:
            try:
                self._open[kind] = LOGGERS[kind](where, run_id)
            except ImportError as error:
                raise MissingExtra(kind, kind, why=f"--log-to {kind}") from error
            except Exception as error:  # each package has errors of its own
                raise ConfigError(f"--log-to {kind} does not work: {type(error).__name__}: {error}") from error

    async def event(self, event: Event) -> None:
        await self._shown.event(event)

    def rollout(self, rollout: Rollout) -> None:
        self._shown.rollout(rollout)
        self._count += 1
        numbers = self._numbers(rollout)
        for name in list(self._open):
            self._try(name, lambda logger: logger.log(numbers, self._count))

    def stop(self) -> None:
        self._shown.stop()

    def _numbers(self, rollout: Rollout) -> dict[str, float]:
        """A rollout without a reward has none here: it is not a zero."""
        if rollout.reward is not None:
            self._rewards.append(rollout.reward)
        numbers: dict[str, float] = {
            "rollout/calls": rollout.calls,
            "rollout/seconds": rollout.wall_s,
            "rollout/failed": float(rollout.failure is not None),
            **{f"rollout/{name}": value for name, value in rollout.usage.items()},
        }
        if rollout.reward is not None:
            numbers["rollout/reward"] = rollout.reward
        if self._rewards:
            numbers["run/mean_reward"] = sum(self._rewards) / len(self._rewards)
        return {**numbers, "run/rollouts": self._count, "run/scored": len(self._rewards)}

    def _try(self, name: str, work: Callable[[RunLogger], Any]) -> None:
        try:
            work(self._open[name])
        except Exception as error:  # noqa: BLE001 -- a dashboard that fails is reported once and left out
            del self._open[name]
            print(f"rollyard: --log-to {name} stopped: {type(error).__name__}: {error}", file=sys.stderr)


def with_loggers(shown: Display, texts: Sequence[str]) -> Display:
    return LoggedDisplay(shown, texts) if texts else shown


def _parse(text: str) -> tuple[str, str]:
    kind, _, where = text.partition(":")
    if kind not in LOGGERS:
        raise UnknownName("logger", kind, list(LOGGERS))
    return kind, where
