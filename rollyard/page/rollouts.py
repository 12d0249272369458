"""One rollout: what happened, step by step and token by token, whether it is over or still under way.

A trajectory of thousands of calls is never drawn whole: steps and tokens come in windows, pictures are thinned out.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from markupsafe import Markup

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.call import CallRecord
from rollyard.core.errors import ConfigError
from rollyard.core.events import STARTED, Event
from rollyard.core.message import Message
from rollyard.core.rollout import Rollout
from rollyard.page import markup
from rollyard.page import steps as step_texts
from rollyard.page.attempts import find_neighbours
from rollyard.page.drawing import branch_graph, timeline
from rollyard.page.steps import CallCosts
from rollyard.policy.prefix import find_at
from rollyard.runs.report.report import run_prices
from rollyard.runs.report.spending import Prices, cost, find_price
from rollyard.store import Store
from rollyard.store.exports.export import tools_named
from rollyard.store.listing import find_branches
from rollyard.store.values import StoredEvent, row_of
from rollyard.trajectory.branch import Branch
from rollyard.trajectory.trajectory import Trajectory

STEPS = 60
EVENTS = 300
CHIPS = 40  # branches that are named one by one


class UncommittedRollout(msgspec.Struct, frozen=True):
    """A rollout that is not committed yet: its calls and events are there already."""

    id: str
    trajectory: Trajectory


async def under_way(store: Store, rollout_id: str) -> dict[str, Any] | None:
    """What is known of a rollout that still runs; None when nothing is."""
    events = await store.events(rollout_id=rollout_id, limit=1000)
    if not events:
        return None
    stages = [s.event.fields.get("stage") for s in events if s.event.name == "stage.started"]
    found = UncommittedRollout(rollout_id, await store.trajectory(rollout_id))
    branches = found.trajectory.branches
    newest = max(0, len(branches[0].nodes) - STEPS) if branches else 0
    return {
        "rollout": found,
        "branches": branches,
        "branch": 0,
        "graph": branch_graph(branches),
        "events": [_line(stored) for stored in events[-EVENTS:]],
        "stage": stages[-1] if stages else None,
        "begun": next((s.event.fields for s in events if s.event.name == STARTED), {}),
        "run_id": events[0].event.run_id,
        "command": _find_command(events),
        **_window(branches, 0, newest, CallCosts(records=_records(found.trajectory))),
    }


async def rollout(store: Store, rollout_id: str, *, branch: int) -> dict[str, Any]:
    found = await find_rollout(store, rollout_id)
    branches: tuple[Branch, ...] = found.captured.branches
    chosen = min(branch, max(0, len(branches) - 1))
    events = await store.events(rollout_id=found.id, limit=EVENTS)
    prices, config = await find_terms(store, found)
    first_call = branches[chosen].call_ids[:1] if branches else ()
    digest = found.captured.record(first_call[0]).tools_digest if first_call else b""
    return {
        "rollout": found,
        "cost": cost(prices, row_of(found)),
        "currency": config.get("currency", ""),
        "instruction": markup.markdown(step_texts.shorten(found.task.instruction)),
        "tools": [
            {"name": tool.name, "text": tool.description, "schema": step_texts.json_code(tool.schema)}
            for tool in await tools_named(store, digest)
        ],
        "neighbours": await find_neighbours(store, row_of(found)),
        "lineage": await find_branches(store, found),
        "branches": branches[:CHIPS],
        "all_branches": len(branches),
        "branch": chosen,
        "flaws": branches[chosen].flaws[:CHIPS] if branches else (),
        "graph": branch_graph(branches),
        "timeline": timeline(found, found.captured.records),
        "spent": time_spent(found),
        "events": [_line(stored) for stored in events],
        "artifacts": await store.artifacts(found.id),
        "notes": (await store.notes([found.id])).get(found.id, []),
        "verdicts": await store.verdicts(found.id),
        "command": _find_command(events) or _command(found, config),
        "diff": step_texts.diff_lines(found.diff or ""),
        "cut": step_texts.shorten,
        "terminal": _terminal,
        **_window(branches, chosen, 0, call_costs(found, prices)),
    }


def _terminal(text: str) -> Markup:
    return markup.terminal(step_texts.shorten(text))


async def find_terms(store: Store, found: Rollout) -> tuple[Prices, Mapping[str, Any]]:
    """Prices and config of the rollout's run."""
    if found.run_id is None:
        return {}, {}
    info = await store.get_run(found.run_id)
    return run_prices(info), info.config


def _records(trajectory: Trajectory) -> dict[str, CallRecord]:
    return {record.id: record for record in trajectory.records}


def call_costs(found: Rollout, prices: Prices) -> CallCosts:
    return CallCosts(records=_records(found.captured), price=find_price(prices, found.labels.get("policy")))


async def answer_at(store: Store, rollout_id: str, at: str) -> dict[str, Any]:
    """The answer of one call in the form an operator edits: text, or text and tool calls as JSON."""
    found = await store.get_rollout(rollout_id)
    call = find_at(found.captured, at)
    answer = found.captured.answer(call.id)
    said = Message("assistant") if answer is None else answer.message
    text = said.text
    if said.tool_calls:
        tools = [{"name": tool.name, "arguments": msgspec.Raw(tool.arguments.encode())} for tool in said.tool_calls]
        text = msgspec.json.format(msgspec.json.encode({"text": said.text, "tool_calls": tools}), indent=2).decode()
    return {"rollout": found, "call": call, "answer": text}


async def steps(store: Store, rollout_id: str, *, branch: int, start: int) -> dict[str, Any]:
    found = await find_rollout(store, rollout_id)
    prices, config = await find_terms(store, found)
    shown = _window(found.captured.branches, branch, start, call_costs(found, prices))
    return {"rollout": found, "branch": branch, "currency": config.get("currency", ""), **shown}


def _window(branches: Sequence[Branch], branch: int, start: int, costs: CallCosts) -> dict[str, Any]:
    if not branches:
        return {"steps": [], "start": 0, "total": 0, "window": STEPS}
    nodes = branches[min(branch, len(branches) - 1)].nodes
    return {
        "steps": step_texts.show(nodes[start : start + STEPS], start, costs),
        "start": start,
        "total": len(nodes),
        "window": STEPS,
    }


def time_spent(found: Rollout) -> dict[str, float]:
    """Seconds of the model, of the agent beside it, and of everything around the agent. Calls may overlap; their union counts."""
    spans = sorted((r.received_at, r.finished_at) for r in found.captured.records if r.finished_at is not None)
    model, end = 0.0, float("-inf")
    for begin, finish in spans:
        model += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    agent = sum(stage.duration_s for stage in found.stages if stage.name in ("launch", "wait"))
    around = sum(stage.duration_s for stage in found.stages) - agent
    return {"model": model, "agent": max(0.0, agent - model), "sandbox and verifier": around}


async def raw(store: Store, rollout_id: str, call_id: str) -> bytes:
    found = await store.trajectory(rollout_id)
    try:
        record = found.record(call_id)
    except KeyError as error:
        raise ConfigError(f"rollout {rollout_id} has no call {call_id!r}") from error
    parts = [b"record\n", msgspec.json.format(msgspec.json.encode(record), indent=2)]
    for name, digest in (("request", record.raw_request), ("response", record.raw_response)):
        if digest:
            body = await store.load_blob(digest, rollout_id)
            try:
                body = msgspec.json.format(body, indent=2)
            except BAD_JSON:
                pass
            parts += [f"\n\n{name}\n".encode(), body]
    return b"".join(parts)


async def file(store: Store, rollout_id: str, name: str) -> bytes:
    for info in await store.artifacts(rollout_id):
        if info.name == name:
            return await store.get_blob(info.digest)
    raise ConfigError(f"rollout {rollout_id} kept no file {name!r}")


async def diff(store: Store, rollout_id: str) -> bytes:
    return ((await find_rollout(store, rollout_id)).diff or "").encode()


async def log(store: Store, rollout_id: str) -> bytes:
    return (await find_rollout(store, rollout_id)).log


async def live(store: Store, run_id: str | None, rollout_id: str | None, after: int) -> dict[str, Any]:
    """The newest event number and whether there is more to come; the page redraws itself when the number moves."""
    found = await store.events(run_id=run_id, rollout_id=rollout_id, after=after, limit=500)
    seq = found[-1].seq if found else after
    finished = (await store.get_run(run_id)).finished if run_id is not None else None
    return {"seq": seq, "finished": finished, "events": [_line(s) for s in found[-100:]], "at": time.time()}


def _line(stored: StoredEvent) -> dict[str, Any]:
    event = stored.event
    return {
        "seq": stored.seq,
        "name": event.name,
        "at": event.at,
        "rollout": event.rollout_id,
        "text": _event_text(event),
    }


def _event_text(event: Event) -> str:
    fields = {name: value for name, value in event.fields.items() if name not in {"stdout", "stderr"}}
    return msgspec.json.encode(fields).decode()[:300] if fields else ""


async def find_rollout(store: Store, rollout_id: str) -> Rollout:
    kind, found = await store.resolve(rollout_id)
    if kind != "rollout":
        raise ConfigError(f"{rollout_id!r} is a run")
    return await store.get_rollout(found)


def _find_command(events: Sequence[StoredEvent]) -> str | None:
    """The command of a rollout that was started on a page, kept with its first event."""
    return next((s.event.fields.get("command") for s in events if s.event.name == "rollout.asked"), None)


def _command(found: Rollout, config: Mapping[str, Any]) -> str:
    """How to run the same again from a terminal; the policy as the run's config has it."""
    policies: Mapping[str, str] = config.get("policies", {})
    policy = policies.get(found.labels.get("policy", ""), next(iter(policies.values()), None))
    words = ["rollyard", "run"]
    words += [found.task.source] if found.task.source is not None else ["--instruction", found.task.instruction[:400]]
    words += ["--agent", found.agent, "--sandbox", found.sandbox]
    if policy is not None:
        words += ["--policy", policy]
    elif config.get("base_url"):
        words += ["--base-url", str(config["base_url"])]
    elif found.captured.records:  # an agent such as oracle calls no model, and needs no policy
        words += ["--policy", "..."]
    if config.get("model"):
        words += ["--model", str(config["model"])]
    return shlex.join(words)
