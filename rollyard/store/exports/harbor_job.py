"""A run as a job folder of Harbor: `result.json` and `config.json` of the job, and a folder for each trial with its own, the
trajectory as ATIF, the rewards and the verifier's log. Harbor's viewer opens it, and `rollyard import` reads it back.

The folder appears under its name only when it is complete.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import NAMESPACE_URL, uuid5

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.ids import short_id
from rollyard.core.message import ToolSpec
from rollyard.core.rollout import Rollout
from rollyard.store.exports.atif import atif
from rollyard.store.partial_files import partial_name
from rollyard.store.values import RunInfo
from rollyard.trajectory.samples import RefusedBranch

_STAGES = {"environment_setup": "provision", "agent_setup": "install", "agent_execution": "wait", "verifier": "verify"}


class HarborJob:
    """`info` is the run's, `tools` are the tool lists that calls may name; both are set before rollouts come."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise ConfigError(f"{path} exists already", hint="a job is a new folder")
        self.info: RunInfo | None = None
        self.tools: dict[bytes, tuple[ToolSpec, ...]] = {}
        self.rows = 0
        self._path, self._folder = path, partial_name(path)
        self._errors, self._ended, self._sums = 0, 0.0, Counter[str]()

    def __enter__(self) -> Self:
        self._folder.mkdir()
        return self

    def add(self, rollout: Rollout) -> Sequence[RefusedBranch]:
        name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', rollout.task.id)[:60]}__{short_id(rollout.id)}"
        folder = self._folder / name
        (folder / "agent").mkdir(parents=True)
        (folder / "verifier").mkdir()
        result = _result(rollout, name, self._path)
        _write(folder / "result.json", result)
        _write(folder / "config.json", result["config"])
        if (document := atif(rollout, self.tools)) is not None:
            _write(folder / "agent" / "trajectory.json", document)
        if (verdict := rollout.verdict) is not None:
            (folder / "verifier" / "test-stdout.txt").write_text(verdict.log)
            if result["verifier_result"] is not None:
                _write(folder / "verifier" / "reward.json", result["verifier_result"]["rewards"])
        self.rows += 1
        self._errors += rollout.failure is not None
        self._ended = max(self._ended, rollout.started_at + rollout.wall_s)
        self._sums.update({field: count or 0 for field, count in _tokens(rollout).items()})
        return ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            shutil.rmtree(self._folder)
            return
        assert self.info is not None  # set before the first rollout
        stats = {"n_completed_trials": self.rows, "n_errored_trials": self._errors, **self._sums}
        job = {"id": _uuid(self.info.id), "started_at": _time(self.info.created_at), "n_total_trials": self.rows}
        ended = _time(self._ended) if self.info.finished and self.rows else None
        _write(self._folder / "result.json", {**job, "finished_at": ended, "stats": stats})
        _write(self._folder / "config.json", {"job_name": self._path.name, "jobs_dir": str(self._path.parent)})
        self._folder.rename(self._path)


def _result(rollout: Rollout, name: str, job: Path) -> dict[str, Any]:
    task = {"path": rollout.task.source or rollout.task.id}
    model = _model(rollout)
    verdict, failure = rollout.verdict, rollout.failure
    rewards = None
    if verdict is not None and verdict.reward is not None:
        rewards = {"rewards": {**verdict.parts, "reward": verdict.reward}}
    ended = rollout.started_at + rollout.wall_s
    return {
        "id": _uuid(rollout.id),
        "task_name": rollout.task.id,
        "trial_name": name,
        "trial_uri": (job / name).absolute().as_uri(),
        "task_id": task,
        "task_checksum": rollout.task.digest,
        "config": {
            "task": task,
            "trial_name": name,
            "trials_dir": str(job),
            "agent": {"name": rollout.agent, "model_name": model},
        },
        "agent_info": {
            "name": rollout.agent,
            "version": rollout.agent_version or "unknown",
            "model_info": None if model is None else {"name": model},
        },
        "agent_result": {**_tokens(rollout), "metadata": _metadata(rollout)},
        "verifier_result": rewards,
        "exception_info": None
        if failure is None
        else {
            "exception_type": failure.cause,
            "exception_message": failure.message,
            "exception_traceback": "",
            "occurred_at": _time(ended),
        },
        "started_at": _time(rollout.started_at),
        "finished_at": _time(ended),
        **_timings(rollout),
    }


def _metadata(rollout: Rollout) -> dict[str, Any]:
    """What Harbor has no field for, and `rollyard import` reads again."""
    return {"rollout_id": rollout.id, "attempt": rollout.attempt, "policy": rollout.labels.get("policy")}


def _timings(rollout: Rollout) -> dict[str, Any]:
    stages = {stage.name: stage for stage in rollout.stages}
    return {
        field: {"started_at": _time(one.started_at), "finished_at": _time(one.started_at + one.duration_s)}
        for field, name in _STAGES.items()
        if (one := stages.get(name)) is not None
    }


def _model(rollout: Rollout) -> str | None:
    """The model of its calls, or the policy's name where no call was recorded."""
    if rollout.trajectory is not None:
        for record in rollout.trajectory.records:
            return record.model_served or record.model_requested or None
    return rollout.labels.get("policy")


def _tokens(rollout: Rollout) -> dict[str, int | None]:
    usage = rollout.usage
    return {
        "n_input_tokens": usage.get("prompt_tokens"),
        "n_cache_tokens": usage.get("cached_tokens"),
        "n_output_tokens": usage.get("completion_tokens"),
    }


def _uuid(id: str) -> str:
    """Harbor's ids are UUIDs; the same rollout gets the same one each time."""
    return str(uuid5(NAMESPACE_URL, f"rollyard:{id}"))


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def _write(path: Path, value: Any) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2))
