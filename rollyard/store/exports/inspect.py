"""Inspect logs (`.eval`): a zip of JSON that `inspect view`, `read_eval_log` and `samples_df` of `inspect_ai` open.

A rollout is a sample: its id is the task's (with agent and policy where the run has several), its epoch counts the attempts.
`messages` are those of the agent's last call; every call is a model event, and every tool call with a result a tool event.
Messages are kept once for each sample, and events refer to them by their place.
"""

from __future__ import annotations

import math
import zipfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from rollyard.core.call import CallRecord
from rollyard.core.html import encodable
from rollyard.core.rollout import Rollout
from rollyard.store.exports.inspect_messages import MessagePool, content_of, tool_call
from rollyard.store.partial_files import partial_name
from rollyard.store.values import RunInfo
from rollyard.trajectory.samples import RefusedBranch
from rollyard.trajectory.trajectory import Trajectory

VERSION = 2
SCORE = "reward"
_SHOWN = 1000  # characters of a text in the summary of a sample
_STOPS = {"stop": "stop", "tool_calls": "tool_calls", "length": "max_tokens", "refusal": "content_filter"}
_USAGE = {
    "input_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "input_tokens_cache_read": "cached_tokens",
    "reasoning_tokens": "reasoning_tokens",
}
Usages = dict[str, Counter[str]]  # by model


class InspectLog:
    """`info` is the run that the rollouts are of; it is set before the first of them."""

    def __init__(self, path: Path) -> None:
        self.info: RunInfo | None = None
        self.rows = 0
        self._path = path
        self._summaries: list[dict[str, Any]] = []
        self._epochs: Counter[str] = Counter()
        self._usage: Usages = defaultdict(Counter)
        self._rewards: list[float] = []
        self._agents: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._zip = zipfile.ZipFile(partial_name(self._path), "w", zipfile.ZIP_DEFLATED)
        return self

    def add(self, rollout: Rollout) -> Sequence[RefusedBranch]:
        assert self.info is not None
        name = sample_id(rollout, self.info.config)
        self._epochs[name] += 1
        sample = sample_of(rollout, name, self._epochs[name])
        for model, counts in sample["model_usage"].items():
            self._usage[model].update(counts)
        if rollout.reward is not None:
            self._rewards.append(rollout.reward)
        self._agents[rollout.agent] += 1
        self._put(f"samples/{name}_epoch_{sample['epoch']}.json", sample)
        self._summaries.append(summary_of(sample))
        self.rows += 1
        return ()

    def _put(self, name: str, value: Any) -> None:
        self._zip.writestr(name, msgspec.json.encode(value))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.info is not None:
                header = self._header(self.info)
                self._put("_journal/start.json", {name: header[name] for name in ("version", "eval", "plan")})
                self._put("summaries.json", self._summaries)
                self._put("header.json", header)
        finally:
            self._zip.close()
        if kind is None:
            partial_name(self._path).replace(self._path)
        else:
            partial_name(self._path).unlink(missing_ok=True)

    def _header(self, info: RunInfo) -> dict[str, Any]:
        tasks = str(info.config.get("tasks") or "")
        models = [model for model, _ in sorted(self._usage.items(), key=lambda one: -one[1]["total_tokens"])]
        ids = list(self._epochs)
        mean = {"mean": {"name": "mean", "value": sum(self._rewards) / len(self._rewards)}} if self._rewards else {}
        score = {
            "name": SCORE, "scorer": SCORE, "scored_samples": len(self._rewards),
            "unscored_samples": self.rows - len(self._rewards), "metrics": mean,
        }  # fmt: skip
        return {
            "version": VERSION,
            "status": "success" if info.finished else "cancelled",
            "eval": {
                "eval_id": info.id, "run_id": info.id, "task_id": info.id, "created": _time(info.created_at),
                "task": str(info.config.get("name") or Path(tasks).name or "rollyard"), "solver": ", ".join(self._agents) or None,
                "dataset": {"name": Path(tasks).name or None, "location": tasks or None, "samples": len(ids), "sample_ids": ids},
                "model": models[0] if models else str(info.config.get("model") or "none"),
                "config": {"epochs": max(self._epochs.values(), default=1)},
                "scorers": [{"name": SCORE, "metrics": [{"name": "mean"}]}], "metadata": {"rollyard_run": info.id},
            },
            "plan": {"name": "agent", "steps": [{"solver": agent} for agent in self._agents]},
            "results": {"total_samples": self.rows, "completed_samples": self._completed, "scores": [score]},
            "stats": {"started_at": _time(info.created_at), "completed_at": self._ended, "model_usage": self._usage},
        }  # fmt: skip

    @property
    def _completed(self) -> int:
        return sum(summary["completed"] for summary in self._summaries)

    @property
    def _ended(self) -> str:
        return max((summary["completed_at"] for summary in self._summaries), default="")


def sample_id(rollout: Rollout, config: Mapping[str, Any]) -> str:
    several = len(config.get("agents", ())) > 1, len(config.get("policies", ())) > 1
    more = [rollout.agent] if several[0] else []
    more += [policy] if several[1] and (policy := rollout.labels.get("policy")) else []
    return encodable(f"{rollout.task.id} [{' / '.join(more)}]" if more else rollout.task.id)


def sample_of(rollout: Rollout, name: str, epoch: int) -> dict[str, Any]:
    trajectory = rollout.trajectory or Trajectory(rollout.id)
    pool = MessagePool(trajectory)
    answered = [record for record in trajectory.records if record.leaf is not None]
    own = [record for record in answered if record.kind == "agent"] or answered
    usage: Usages = defaultdict(Counter)
    for record in answered:
        usage[_model(record)].update(_usage(record))
    sample: dict[str, Any] = {
        "id": name,
        "epoch": epoch,
        "input": encodable(rollout.task.instruction),
        "target": "",
        "messages": pool.of_leaf(own[-1].leaf) if own else [],
        "output": _output(trajectory, pool, own[-1]) if own else {"model": "", "choices": []},
        "scores": _scores(rollout),
        "metadata": _metadata(rollout),
        "events": [event for record in trajectory.records for event in _events(trajectory, pool, record, rollout)],
        "events_data": {"messages": pool.messages, "calls": []},
        "model_usage": usage,
        "started_at": _time(rollout.started_at),
        "completed_at": _time(rollout.started_at + rollout.wall_s),
        "total_time": rollout.wall_s,
        "uuid": rollout.id,
        "turn_count": len(own),
    }
    if (failure := rollout.failure) is not None:
        said = encodable(f"{failure.boundary}: {failure.message}")
        sample["error"] = {"message": said, "traceback": said, "traceback_ansi": said}
    return sample


def summary_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    kept = (
        "id",
        "epoch",
        "target",
        "metadata",
        "scores",
        "model_usage",
        "started_at",
        "completed_at",
        "total_time",
        "uuid",
        "turn_count",
    )
    summary = {name: sample[name] for name in kept}
    error = sample.get("error")
    return {
        **summary,
        "input": sample["input"][:_SHOWN],
        "error": None if error is None else error["message"][:_SHOWN],
        "completed": True,
        "message_count": len(sample["messages"]),
    }


def _scores(rollout: Rollout) -> dict[str, Any]:
    """None for a rollout that was never judged: it is not a zero."""
    verdict = rollout.verdict
    if verdict is None or verdict.reward is None:
        return {}
    known = {"status": verdict.status, "grade": verdict.grade, "parts": verdict.parts, "checks": verdict.checks}
    explanation = encodable(verdict.log) or None
    return {SCORE: {"value": verdict.reward, "explanation": explanation, "metadata": msgspec.to_builtins(known)}}


def _metadata(rollout: Rollout) -> dict[str, Any]:
    return {
        "rollout_id": rollout.id,
        "task_id": encodable(rollout.task.id),
        "attempt": rollout.attempt,
        "agent": rollout.agent,
        "agent_version": rollout.agent_version,
        "policy": rollout.labels.get("policy"),
        "status": rollout.status,
        "stop_reason": rollout.stop_reason,
        "sandbox": rollout.sandbox,
        "labels": dict(rollout.labels),
    }


def _events(trajectory: Trajectory, pool: MessagePool, record: CallRecord, rollout: Rollout) -> list[dict[str, Any]]:
    began = record.started_at or record.received_at
    same = {"timestamp": _time(began), "working_start": max(0.0, began - rollout.started_at)}
    call: dict[str, Any] = {
        **same, "event": "model", "uuid": record.id, "model": _model(record), "requested_model": record.model_requested or None,
        "input": [], "input_refs": pool.ranges(record.prompt_leaf), "tools": [], "tool_choice": "auto",
        "config": _config(record), "output": _output(trajectory, pool, record), "error": record.error,
        "completed": _time(record.finished_at or began),
        "metadata": {"call_id": record.id, "kind": record.kind, "edge": record.edge},
    }  # fmt: skip
    answer = trajectory.answer(record.id)
    tools = answer.message.tool_calls if answer is not None else ()
    after = record.finished_at or began
    return [
        call,
        *(
            {
                "event": "tool", "uuid": f"{record.id}-{number}", "timestamp": _time(after),
                "working_start": max(0.0, after - rollout.started_at), "result": content_of(result.parts),
                **{name: value for name, value in tool_call(tool).items() if name in ("id", "function", "arguments")},
            }
            for number, tool in enumerate(tools)
            if (result := pool.results.get(tool.id)) is not None
        ),
    ]  # fmt: skip


def _config(record: CallRecord) -> dict[str, Any]:
    sampling = record.effective or record.requested
    names = ("temperature", "top_p", "max_tokens", "seed", "frequency_penalty", "presence_penalty")
    return {name: value for name in names if (value := getattr(sampling, name)) is not None}


def _output(trajectory: Trajectory, pool: MessagePool, record: CallRecord) -> dict[str, Any]:
    node = trajectory.answer(record.id)
    if node is None:
        return {"model": _model(record), "choices": [], "error": record.error}
    choice: dict[str, Any] = {"message": pool.answer(node), "stop_reason": _STOPS.get(record.finish or "", "unknown")}
    logprobs = node.logprobs or ()
    if node.texts and len(node.texts) == len(logprobs) and all(map(math.isfinite, logprobs)):
        tokens = zip(node.texts, logprobs, strict=True)
        choice["logprobs"] = {"content": [{"token": encodable(text), "logprob": logprob} for text, logprob in tokens]}
    known = None if node.ids is None else {"completion_ids": list(node.ids)}
    took = record.finished_at - record.started_at if record.finished_at and record.started_at else None
    return {
        "model": _model(record),
        "choices": [choice],
        "completion": encodable(node.message.text),
        "usage": _usage(record),
        "time": took,
        "metadata": known,
    }


def _usage(record: CallRecord) -> dict[str, int]:
    found = {name: value for name, field in _USAGE.items() if (value := getattr(record.usage, field)) is not None}
    return {**found, "total_tokens": found.get("input_tokens", 0) + found.get("output_tokens", 0)}


def _model(record: CallRecord) -> str:
    return record.model_served or record.model_requested or "unknown"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
