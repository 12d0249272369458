"""ATIF v1.8 documents: what a rollout said and did, step by step, with the exact token ids of each answer.

The main document holds the agent's own calls in commit order: each call's new messages, then its answer. A tool result is
the observation of the step that asked for it. Every sub-agent, and every auxiliary call such as a title, is an embedded
trajectory of its own; the step that started a sub-agent refers to it. Messages that were sent again in a new sequence (after
a compaction or an edit) are marked as copied context.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.call import CallRecord
from rollyard.core.message import Image, Message, Opaque, Text, ToolCall, ToolSpec
from rollyard.core.node import Node
from rollyard.core.rollout import Rollout
from rollyard.store.exports.sink import JsonLines
from rollyard.store.partial_files import partial_name
from rollyard.trajectory.samples import RefusedBranch
from rollyard.trajectory.trajectory import Trajectory

VERSION = "ATIF-v1.8"
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_SOURCES = {"system": "system", "user": "user", "tool": "user", "assistant": "agent"}
Tools = Mapping[bytes, Sequence[ToolSpec]]


class AtifDocuments:
    """A file per rollout in a directory, or a line per rollout in a file. `tools` are the tool lists calls may name."""

    def __init__(self, path: Path) -> None:
        self.tools: dict[bytes, tuple[ToolSpec, ...]] = {}
        self.rows = 0
        self._path = path
        self._lines = None if path.is_dir() else JsonLines(path)

    def __enter__(self) -> Self:
        if self._lines is not None:
            self._lines.__enter__()
        return self

    def add(self, rollout: Rollout) -> Sequence[RefusedBranch]:
        document = atif(rollout, self.tools)
        if document is None:
            return ()
        self.rows += 1
        if self._lines is not None:
            self._lines.write(document)
            return ()
        target = self._path / f"{rollout.id}.json"
        partial_name(target).write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2))
        partial_name(target).replace(target)
        return ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lines is not None:
            self._lines.__exit__(kind, error, trace)


def atif(rollout: Rollout, tools: Tools) -> dict[str, Any] | None:
    """The document of a rollout; None when no call of it was recorded, since ATIF has no empty trajectory."""
    trajectory: Trajectory | None = rollout.trajectory
    if trajectory is None:
        return None
    threads = _threads(trajectory)
    main = threads.pop("", [])
    if not main and threads:
        main = threads.pop(next(iter(threads)))
    if not main:
        return None
    document = _document(rollout, trajectory, main, tools)
    steps = {step["extra"]["call_id"]: step for step in document["steps"] if "call_id" in step.get("extra", {})}
    parts: list[dict[str, Any]] = []
    for name, records in threads.items():
        part = _document(rollout, trajectory, records, tools)
        part["trajectory_id"] = name
        part["extra"] = {"kind": records[0].kind}
        parts.append(part)
        spawner = steps.get(records[0].parent_call_id or "")
        if records[0].edge == "spawned_by" and spawner is not None:
            _refer(spawner, name)
    if parts:
        document["subagent_trajectories"] = parts
    return _with_results(document, rollout)


def _threads(trajectory: Trajectory) -> dict[str, list[CallRecord]]:
    """Answered calls by the trajectory they belong to: "" is the agent's own, others are named by their first call."""
    threads: dict[str, list[CallRecord]] = {}
    home: dict[str, str] = {}
    for record in trajectory.records:
        if record.leaf is None:
            continue
        if record.kind in ("agent", "compaction"):
            name = ""
        else:
            name = home.get(record.parent_call_id or "", "") if record.edge != "spawned_by" else ""
            name = name or record.id
        home[record.id] = name
        threads.setdefault(name, []).append(record)
    return threads


def _document(rollout: Rollout, trajectory: Trajectory, records: Sequence[CallRecord], tools: Tools) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    callers: dict[str, dict[str, Any]] = {}  # tool call id -> the step that made it
    for record in records:
        for node in _new_context(trajectory, record):
            _add_context(steps, callers, node)
        step = _answer(trajectory, record)
        for tool_call in step.get("tool_calls", ()):
            callers[tool_call["tool_call_id"]] = step
        steps.append(step)
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    definitions = [_definition(tool) for tool in tools.get(records[0].tools_digest, ())]
    agent: dict[str, Any] = {
        "name": rollout.agent or "unknown",
        "version": rollout.agent_version or "unknown",
        "model_name": records[0].model_served or records[0].model_requested,
    }
    if definitions:
        agent["tool_definitions"] = definitions
    return {
        "schema_version": VERSION,
        "session_id": rollout.id,
        "trajectory_id": rollout.id,
        "agent": agent,
        "steps": steps,
        "final_metrics": _totals(records, len(steps)),
    }


def _new_context(trajectory: Trajectory, record: CallRecord) -> Iterable[Node]:
    return [node for n in record.new_nodes if not (node := trajectory.nodes[n]).sampled and node.call_id == record.id]


def _add_context(steps: list[dict[str, Any]], callers: Mapping[str, dict[str, Any]], node: Node) -> None:
    message = node.message
    for result in message.tool_results:
        seen: dict[str, Any] = {"content": _content(result.parts)}
        asking = callers.get(result.call_id)
        if asking is not None:
            seen["source_call_id"] = result.call_id
        else:
            asking = dict[str, Any](source="user", message="")
            steps.append(asking)
        asking.setdefault("observation", {"results": []})["results"].append(seen)
    if message.tool_results and not message.text:
        return
    step: dict[str, Any] = {"source": _SOURCES[message.role], "message": _content(message.parts)}
    if message.role == "assistant":
        step["llm_call_count"] = 0
        _add_tool_calls(step, message)
    if node.same_as is not None or message.role == "assistant":
        step["is_copied_context"] = True
    steps.append(step)


def _answer(trajectory: Trajectory, record: CallRecord) -> dict[str, Any]:
    node = trajectory.answer(record.id)
    assert node is not None
    step: dict[str, Any] = {"source": "agent", "message": _content(node.message.parts), "llm_call_count": 1}
    if record.finished_at:
        step["timestamp"] = datetime.fromtimestamp(record.finished_at, UTC).isoformat()
    if record.model_served:
        step["model_name"] = record.model_served
    if node.message.thinking:
        step["reasoning_content"] = node.message.thinking
    _add_tool_calls(step, node.message)
    metrics: dict[str, Any] = {
        "prompt_tokens": record.usage.prompt_tokens,
        "completion_tokens": record.usage.completion_tokens,
        "cached_tokens": record.usage.cached_tokens,
        "prompt_token_ids": _list(trajectory.prompt_ids(record.id)),
        "completion_token_ids": _list(node.ids),
        "logprobs": _list(node.logprobs),
    }
    step["metrics"] = {name: value for name, value in metrics.items() if value is not None}
    step["extra"] = {
        "call_id": record.id,
        "kind": record.kind,
        "edge": record.edge,
        "finish": record.finish,
        "capture": record.capture,
        "policy_version": [record.version_start, record.version_end],
        "trainable": record.trainable,
    }
    if record.break_reason is not None:
        step["extra"]["break_reason"] = record.break_reason
    return step


def _add_tool_calls(step: dict[str, Any], message: Message) -> None:
    if message.tool_calls:
        step["tool_calls"] = [_tool_call(call) for call in message.tool_calls]


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """Arguments that are no JSON object are kept as the text they are."""
    name = f"{call.namespace}.{call.name}" if call.namespace else call.name
    try:
        arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except BAD_JSON:
        return {
            "tool_call_id": call.id,
            "function_name": name,
            "arguments": {},
            "extra": {"raw_arguments": call.arguments},
        }
    return {"tool_call_id": call.id, "function_name": name, "arguments": arguments}


def _content(parts: Sequence[Any]) -> str | list[dict[str, Any]]:
    """Text, or a list of parts where there is an image that ATIF can name."""
    out: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Text):
            out.append({"type": "text", "text": part.text})
        elif isinstance(part, Image):
            kind = part.media_type
            path = part.url or (f"data://{kind};base64,{part.data}" if part.data else None)
            if kind in _IMAGES and path is not None:
                out.append({"type": "image", "source": {"media_type": kind, "path": path}})
            else:
                out.append({"type": "text", "text": f"[image {path or ''}]"})
        elif isinstance(part, Opaque):
            out.append({"type": "text", "text": part.json})
    if all(part["type"] == "text" for part in out):
        return "".join(part["text"] for part in out)
    return out


def _refer(step: dict[str, Any], trajectory_id: str) -> None:
    """Hang a sub-agent on the first tool call of its step that has none yet, or on the last one."""
    results = step.setdefault("observation", {"results": []})["results"]
    free = [result for result in results if "subagent_trajectory_ref" not in result]
    if not results:
        results.append({})
        free = results
    target = free[0] if free else results[-1]
    target.setdefault("subagent_trajectory_ref", []).append({"trajectory_id": trajectory_id})


def _definition(tool: ToolSpec) -> dict[str, Any]:
    try:
        schema = msgspec.json.decode(tool.schema)
    except BAD_JSON:
        schema = {}
    name = f"{tool.namespace}.{tool.name}" if tool.namespace else tool.name
    return {"type": "function", "function": {"name": name, "description": tool.description, "parameters": schema}}


def _totals(records: Sequence[CallRecord], steps: int) -> dict[str, Any]:
    """Sums over the calls that reported; absent where none did."""
    totals: dict[str, Any] = {"total_steps": steps}
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        known = [value for record in records if (value := getattr(record.usage, name)) is not None]
        if known:
            totals[f"total_{name}"] = sum(known)
    return totals


def _with_results(document: dict[str, Any], rollout: Rollout) -> dict[str, Any]:
    document["extra"] = {
        "task_id": rollout.task.id,
        "run_id": rollout.run_id,
        "attempt": rollout.attempt,
        "status": rollout.status,
        "reward": rollout.reward,
    }
    return document


def _list(values: Any) -> list[Any] | None:
    return None if values is None else list(values)
