"""What each page shows, as plain values for its template. Reads only; every list is paged or windowed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast, get_args

import msgspec

from rollyard.core.branch import Branch
from rollyard.core.errors import ConfigError
from rollyard.core.message import Message
from rollyard.core.rollout import Rollout
from rollyard.plane.page.drawing import branch_graph, timeline
from rollyard.runs.compare import compare as compare_runs
from rollyard.runs.plots import page as report_page
from rollyard.runs.report import report as full_report
from rollyard.store import Store
from rollyard.store.values import SortKey

PAGE = 50
STEPS = 60
TOKENS = 2000
Query = Mapping[str, str]


async def runs(store: Store, *, offset: int, search: str) -> dict[str, Any]:
    found = await store.list_runs(limit=PAGE + 1, offset=offset)
    kept = [run for run in found[:PAGE] if search in run.id or search in str(run.config.get("tasks", ""))]
    return {"runs": kept, "offset": offset, "more": len(found) > PAGE, "size": PAGE, "search": search}


async def run(store: Store, run_id: str, query: Query) -> dict[str, Any]:
    _, run_id = await store.resolve(run_id)
    info = await store.get_run(run_id)
    sort = query.get("sort", "started_at")
    chosen = cast(SortKey, sort if sort in get_args(SortKey) else "started_at")
    offset = int(query.get("offset", "0")) if query.get("offset", "0").isdigit() else 0
    page = await store.list_rollouts(
        run_id,
        task_id=query.get("task") or None,
        agent=query.get("agent") or None,
        status=query.get("status") or None,
        boundary=query.get("boundary") or None,
        search=query.get("q") or None,
        sort=chosen,
        descending=query.get("down") == "1",
        limit=PAGE,
        offset=offset,
    )
    report = await full_report(store, run_id) if info.rollouts <= 2000 else None
    return {
        "run": info,
        "report": report,
        "page": page,
        "offset": offset,
        "size": PAGE,
        "sort": chosen,
        "down": query.get("down") == "1",
        "task": query.get("task"),
        "policies": {row.id: (row.group_id or "").rpartition("/")[2] for row in page.rows},
        "columns": ("task_id", "attempt", "agent", "status", "reward", "calls", "wall_s", "started_at"),
    }


class UnderWay(msgspec.Struct, frozen=True):
    """A rollout that is not committed yet: its calls and events are there already."""

    id: str
    trajectory: Any


async def under_way(store: Store, rollout_id: str) -> dict[str, Any] | None:
    """What is known of a rollout that still runs; None when nothing is."""
    events = await store.events(rollout_id=rollout_id, limit=1000)
    if not events:
        return None
    stages = [s.event.fields.get("stage") for s in events if s.event.name == "stage.started"]
    found = UnderWay(rollout_id, await store.trajectory(rollout_id))
    branches: tuple[Branch, ...] = found.trajectory.branches
    return {
        "rollout": found,
        "branches": branches,
        "branch": 0,
        "graph": branch_graph(branches),
        "events": events[-200:],
        "stage": stages[-1] if stages else None,
        **_window(found, 0, 0),
    }


async def rollout(store: Store, rollout_id: str, *, branch: int) -> dict[str, Any]:
    found = await _rollout(store, rollout_id)
    branches: tuple[Branch, ...] = found.trajectory.branches
    events = await store.events(rollout_id=found.id, limit=1000)
    return {
        "rollout": found,
        "branches": branches,
        "branch": min(branch, max(0, len(branches) - 1)),
        "graph": branch_graph(branches),
        "timeline": timeline(found, found.trajectory.records),
        "events": events,
        "artifacts": await store.artifacts(found.id),
        "verdicts": await store.verdicts(found.id),
        "command": _command(found),
        "diff": _diff_lines(found.diff or ""),
        **_window(found, branch, 0),
    }


async def steps(store: Store, rollout_id: str, *, branch: int, start: int) -> dict[str, Any]:
    found = await _rollout(store, rollout_id)
    return {"rollout": found, "branch": branch, **_window(found, branch, start)}


def _window(found: Rollout | UnderWay, branch: int, start: int) -> dict[str, Any]:
    """Some steps of one branch: a trajectory of thousands of messages is never drawn whole."""
    branches: tuple[Branch, ...] = found.trajectory.branches
    if not branches:
        return {"steps": [], "start": 0, "total": 0, "window": STEPS}
    nodes = branches[min(branch, len(branches) - 1)].nodes
    return {
        "steps": [_step(number, node) for number, node in enumerate(nodes[start : start + STEPS], start)],
        "start": start,
        "total": len(nodes),
        "window": STEPS,
    }


def _step(number: int, node: Any) -> dict[str, Any]:
    message: Message = node.message
    return {
        "number": number,
        "role": message.role,
        "text": message.text,
        "thinking": message.thinking,
        "calls": [{"name": c.name, **_arguments(c.arguments)} for c in message.tool_calls],
        "results": [
            {"id": r.call_id, "text": "".join(getattr(p, "text", "") for p in r.parts), "error": r.is_error}
            for r in message.tool_results
        ],
        "sampled": node.sampled,
        "call_id": node.call_id,
        "tokens": len(node.ids) if node.ids else None,
        "folded": message.role == "system" or len(message.text) > 3000,
    }


def _arguments(text: str) -> dict[str, Any]:
    """A command is shown as a terminal would, a change as a patch, anything else as JSON."""
    try:
        fields = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {"kind": "json", "text": text}
    if isinstance(fields, dict):
        values = cast("dict[str, Any]", fields)
        for name in ("command", "cmd", "script"):
            if name in values:
                value = values[name]
                return {"kind": "terminal", "text": value if isinstance(value, str) else " ".join(map(str, value))}
        if "old_string" in values and "new_string" in values:
            lines = [f"-{line}" for line in str(values["old_string"]).splitlines()]
            lines += [f"+{line}" for line in str(values["new_string"]).splitlines()]
            return {"kind": "diff", "text": str(values.get("file_path", "")), "lines": _diff_lines("\n".join(lines))}
    return {"kind": "json", "text": msgspec.json.format(msgspec.json.encode(fields), indent=2).decode()}


def _diff_lines(text: str) -> list[tuple[str, str]]:
    kinds = {"+": "add", "-": "del", "@": "hunk"}
    return [(kinds.get(line[:1], "same"), line) for line in text.splitlines()[:4000]]


async def tokens(store: Store, rollout_id: str, *, branch: int, start: int | None) -> dict[str, Any]:
    """One branch token by token: id, logprob, whether it trains, the policy's version, what was inserted."""
    found = await _rollout(store, rollout_id)
    branches: tuple[Branch, ...] = found.trajectory.branches
    if not branches:
        raise ConfigError(f"rollout {rollout_id} has no recorded calls")
    chosen = branches[min(branch, len(branches) - 1)]
    if start is None:  # where it gets interesting: a little before the first sampled token
        start = max(0, chosen.prompt_len - 100)
    return {
        "rollout": found,
        "branch": chosen,
        "branches": branches,
        "spans": list(_spans(chosen, start, start + TOKENS)),
        "start": start,
        "total": len(chosen.ids) if chosen.ids is not None else 0,
        "window": TOKENS,
    }


def _spans(branch: Branch, start: int, stop: int) -> list[dict[str, Any]]:
    nodes = {node.id: node for node in branch.nodes}
    shown: list[dict[str, Any]] = []
    for span in branch.spans:
        low, high = max(span.start, start), min(span.end, stop)
        if low >= high or branch.ids is None:
            continue
        node = nodes[span.node]
        inserted = {n for a, b in node.inserted for n in range(a + span.start, b + span.start)}
        cells = [
            {
                "id": branch.ids[n],
                "text": node.texts[n - span.start] if n - span.start < len(node.texts) else "",
                "logprob": branch.logprobs[n] if branch.mask[n] else None,
                "heat": _heat(branch.logprobs[n]) if branch.mask[n] else "ctx",
                "version": branch.versions[n] if branch.versions[n] >= 0 else None,
                "inserted": n in inserted,
            }
            for n in range(low, high)
        ]
        shown.append({"role": span.role, "sampled": span.sampled, "start": low, "end": high, "cells": cells})
    return shown


def _heat(logprob: float) -> str:
    """Ten steps from certain to surprising, as a class of the style sheet."""
    return f"h{min(9, int(-logprob * 1.5))}" if logprob <= 0 else "h0"


async def raw(store: Store, rollout_id: str, call_id: str) -> bytes:
    found = await _rollout(store, rollout_id)
    record = found.trajectory.record(call_id)
    parts = [b"record\n", msgspec.json.format(msgspec.json.encode(record), indent=2)]
    for name, digest in (("request", record.raw_request), ("response", record.raw_response)):
        if digest:
            body = await store.load_blob(digest)
            try:
                body = msgspec.json.format(body, indent=2)
            except msgspec.DecodeError:
                pass
            parts += [f"\n\n{name}\n".encode(), body]
    return b"".join(parts)


async def file(store: Store, rollout_id: str, name: str) -> bytes:
    for info in await store.artifacts(rollout_id):
        if info.name == name:
            return await store.get_blob(info.digest)
    raise ConfigError(f"rollout {rollout_id} kept no file {name!r}")


async def compare(store: Store, first: str, second: str) -> dict[str, Any]:
    known = await store.list_runs(limit=100)
    found = await compare_runs(store, first, second) if first and second else None
    return {"a": first, "b": second, "found": found, "runs": known}


async def live(store: Store, run_id: str | None, rollout_id: str | None, after: int) -> dict[str, Any]:
    """The newest event number and whether there is more to come; the page reloads its tables when the number moves."""
    found = await store.events(run_id=run_id, rollout_id=rollout_id, after=after, limit=500)
    seq = found[-1].seq if found else after
    finished = (await store.get_run(run_id)).finished if run_id is not None else None
    lines = [
        {
            "seq": s.seq,
            "name": s.event.name,
            "at": s.event.at,
            "rollout": s.event.rollout_id,
            "text": _event_text(s.event),
        }
        for s in found[-100:]
    ]
    return {"seq": seq, "finished": finished, "events": lines, "at": time.time()}


def _event_text(event: Any) -> str:
    fields = {k: v for k, v in event.fields.items() if k not in {"stdout", "stderr"}}
    return msgspec.json.encode(fields).decode()[:300]


async def report_html(store: Store, run_id: str) -> str:
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from rollyard.runs.plots import write_report

    _, run_id = await store.resolve(run_id)
    report = await full_report(store, run_id)
    try:
        with TemporaryDirectory() as scratch:
            await write_report(store, report, Path(scratch))
            return (Path(scratch) / "report.html").read_text()
    except ConfigError:  # without matplotlib the file has the tables alone
        return report_page(report, [])


async def _rollout(store: Store, rollout_id: str) -> Rollout:
    kind, found = await store.resolve(rollout_id)
    if kind != "rollout":
        raise ConfigError(f"{rollout_id!r} is a run")
    return await store.get_rollout(found)


def _command(found: Rollout) -> str:
    """How to run the same again from a terminal."""
    if found.task.source is not None:
        return f"rollyard run {found.task.source} --agent {found.agent} --sandbox {found.sandbox} --policy ..."
    return f"rollyard run --instruction @FILE --agent {found.agent} --sandbox {found.sandbox} --policy ..."
