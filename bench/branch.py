"""Branches of real agents: where the policy sees what it saw in the parent, and what a child costs beside its parent.

Each agent is branched in five places, by its own session (`resume`) and by running its commands again (`replay`). A child is
`equal` or `pinned` only where its prompt at the branch point is the parent's token by token, its files are the parent's and its
new answer is done; anything else says why it was refused.

    python -m bench.branch [AGENT ...] [--place PLACE ...]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import rollyard as ry
from rollyard.core.branch_point import RESUME_MARK, How
from rollyard.core.call import Call, CallRecord
from rollyard.core.errors import ConfigError
from rollyard.core.protocols import Backend, Policy
from rollyard.core.rollout import Rollout
from rollyard.core.task import Task, VerifierSpec
from rollyard.runs.rollout.kept_snapshots import remove_snapshots
from rollyard.testing.agent.model import FullContext

_OTHERS_TOOLS = ("tool-agent",)  # has the tools of MCP servers alone, and no shell to be told what to do in
AGENTS = [
    name
    for name in ry.agents.names()
    if (found := ry.agents.get(name)).calls_model and found.acts_by == "tools" and name not in _OTHERS_TOOLS
]
PLACES = ("call 2", "parallel calls", "call 8", "compaction", "sub-agent")
NUMBERS = {"call 2": 1, "parallel calls": 2, "call 8": 7}  # of the agent's calls, from 0; elsewhere it is found
HOWS: tuple[How, ...] = ("resume", "replay")
TASK = Task(
    id="t",
    instruction="Do as the tools say.",
    verifier=VerifierSpec(kind="commands", options={"commands": ['test "$(cat c.txt)" = right']}),
)
PART = "the other part of the work"
_TWICE = {"shell": "date +%s.%N >> a.txt"}  # prints nothing, and leaves another line when it runs again


class NoSuchPlace(Exception):
    """The agent never comes there: it has no sub-agents, or does not compact its history."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """`found` is `equal`, `pinned`, `refused` or `none`. Times are milliseconds; `parent` is what the parent took to that call,
    and `parent_open` what its sandbox took to open."""

    agent: str
    place: str
    how: str
    found: str
    why: str = ""
    snapshot: float | None = None
    open: float | None = None
    first_call: float | None = None
    parent: float | None = None
    parent_open: float | None = None


async def measure(agent: str, place: str, store: ry.Store, backend: Backend) -> list[Cell]:
    """A parent, and a child of it in each way."""
    options = {"store": store, "sandbox": backend, "collect": ("*.txt",)}
    async with (
        ry.Gate(_parents_policy(agent, place), log=store) as gate,
        ry.Run([TASK], agent=agent, gate=gate, snapshot_every=NUMBERS.get(place, 1), **options) as run,
    ):
        (parent,) = [done async for done in run]
    if (parent.status, parent.reward) != ("completed", 0.0):
        raise RuntimeError(f"{agent} did not come through {place}: {parent.error}\n{parent.log_tail[-3000:]}")
    try:
        at = _find_place(parent, place)
    except NoSuchPlace as none:
        return [Cell(agent=agent, place=place, how=how, found="none", why=str(none)) for how in HOWS]
    cells: list[Cell] = []
    for how in HOWS:
        (child,) = await ry.branch(parent, at=at.id, how=how, policy=_childs_policy(place), **options)
        cells.append(_examine(parent, child, at, place, how))
        await remove_snapshots((child,), backend)
    await remove_snapshots((parent,), backend)
    return cells


def _parents_policy(agent: str, place: str) -> Policy:
    """Comes to the branch point, and does the wrong thing there."""
    steps: list[Mapping[str, Any]] = [_TWICE]
    helper = ry.agents.get(agent).subagent
    match place:
        case "parallel calls":
            steps += [{"parallel": [{"shell": "echo 1 > p.txt"}, {"shell": "echo 2 > q.txt"}]}]
        case "call 8":
            steps += [{"shell": f"echo {number} >> b.txt; cat b.txt"} for number in range(6)]
        case "compaction":
            steps += [{"shell": "echo one > b.txt"}, {"shell": "cat b.txt"}]
        case "sub-agent" if helper is not None:
            args = {name: PART if value == "{instruction}" else value for name, value in helper.args.items()}
            steps += [{"tool": helper.tool, "args": args}, {"shell": "sleep 3; cat b.txt"}]
        case _:
            pass
    steps += [{"shell": "echo wrong > c.txt"}, {"text": "done"}]
    part = [{"shell": "echo part > b.txt"}, {"text": "The part is done."}]
    script = {"steps": steps, "subagent": part, "cases": [{"match": PART, "steps": part}]}
    policy = ry.policy.scripted(script)
    return FullContext(policy) if place == "compaction" else policy


def _childs_policy(place: str) -> Policy:
    """The right thing at the branch point, then the end."""
    right: dict[str, Any] = {"shell": "echo right > c.txt"}
    own = {"parallel": [right, {"shell": "echo 3 > r.txt"}]} if place == "parallel calls" else right
    left = [own]

    def answer(call: Call) -> Mapping[str, Any]:
        return left.pop() if call.kind == "agent" and left else {"text": "done"}

    return ry.policy.scripted(answer)


def _find_place(parent: Rollout, place: str) -> CallRecord:
    records = [record for record in parent.captured.records if record.leaf is not None]
    own = [record for record in records if record.kind == "agent"]
    if place in NUMBERS:
        return own[NUMBERS[place]]
    kind = "subagent" if place == "sub-agent" else "compaction"
    last = max((record.seq for record in records if record.kind == kind), default=None)
    if last is None:
        missing = {
            "subagent": "it started no sub-agent",
            "compaction": "it does not compact when told that its context is full",
        }
        raise NoSuchPlace(missing[kind])
    return next(record for record in own if record.seq > last)


def _examine(parent: Rollout, child: Rollout, at: CallRecord, place: str, how: How) -> Cell:
    cell = Cell(agent=parent.agent, place=place, how=how, found="refused")
    if child.failure is not None:
        return msgspec.structs.replace(cell, why=f"{child.failure.cause}: {child.failure.message}")
    own = next((record for record in child.captured.records if record.trainable), None)
    if own is None or child.reward != 1.0 or child.resumed != (how == "resume"):
        raise RuntimeError(f"{cell}: reward {child.reward}, resumed {child.resumed}: {child.log_tail[-3000:]}")
    if child.captured.prompt_ids(own.id) != parent.captured.prompt_ids(at.id):
        raise RuntimeError(f"{cell}: the prompt at the branch point is not the parent's")
    if child.files["/workspace/a.txt"] != parent.files["/workspace/a.txt"]:
        raise RuntimeError(f"{cell}: the files are not the parent's")
    if any(RESUME_MARK in message.text for path in child.captured.branches for message in path.messages):
        raise RuntimeError(f"{cell}: the mark of a resumed session was seen by the policy")
    return msgspec.structs.replace(
        cell,
        found="pinned" if child.pinned else "equal",
        snapshot=1000 * parent.snapshots[at.id].took_s,
        open=1000 * _stage(child, "provision").duration_s,
        first_call=1000 * (own.received_at - _stage(child, "launch").started_at),
        parent=1000 * (at.received_at - _stage(parent, "launch").started_at),
        parent_open=1000 * _stage(parent, "provision").duration_s,
    )


def _stage(rollout: Rollout, name: str) -> Any:
    return next(stage for stage in rollout.stages if stage.name == name)


def proof_table(cells: Iterable[Cell]) -> str:
    """A row for each agent and way, a column for each place; refusals are listed below."""
    found = {(cell.agent, cell.how, cell.place): cell for cell in cells}
    places = [place for place in PLACES if any(key[2] == place for key in found)]
    lines = [f"| agent | how | {' | '.join(places)} |", "|---" * (len(places) + 2) + "|"]
    for agent, how in dict.fromkeys(key[:2] for key in found):
        words = [found[agent, how, place].found if (agent, how, place) in found else "" for place in places]
        lines.append(f"| {agent} | {how} | {' | '.join(words)} |")
    whys = dict.fromkeys(f"{cell.agent} {cell.how}, {cell.place}: {cell.why}" for cell in found.values() if cell.why)
    return "\n".join([*lines, "", *whys])


def cost_table(cells: Iterable[Cell]) -> str:
    """Milliseconds, and how they stand to the parent's own."""
    lines = [
        "| agent | how | place | snapshot | open | to the parent's open | first call | to the parent's way there |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        if cell.open is None or cell.first_call is None or not cell.parent or not cell.parent_open:
            continue
        numbers = f"{cell.snapshot:.0f} | {cell.open:.0f} | {cell.open / cell.parent_open:.1f}x"
        first = f"{cell.first_call:.0f} | {cell.first_call / cell.parent:.2f}x"
        lines.append(f"| {cell.agent} | {cell.how} | {cell.place} | {numbers} | {first} |")
    return "\n".join(lines)


async def measure_all(agents: Sequence[str], places: Sequence[str]) -> list[Cell]:
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        async with ry.sandbox.backend("local") as backend, ry.Store.open(Path(folder) / "runs.db") as store:
            for agent in agents:
                for place in places:
                    try:
                        cells += await measure(agent, place, store, backend)
                    except (RuntimeError, ConfigError) as error:
                        cells += [
                            Cell(agent=agent, place=place, how=how, found="FAILED", why=str(error)) for how in HOWS
                        ]
                    print(
                        *(f"{c.agent}, {c.place}, {c.how}: {c.found} {c.why}" for c in cells[-2:]), sep="\n", flush=True
                    )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", nargs="*", metavar="AGENT", help=f"of {', '.join(AGENTS)}; all by default")
    parser.add_argument("--place", action="append", choices=PLACES, help="only there; may be given again")
    args = parser.parse_args()
    cells = asyncio.run(measure_all(args.agents or AGENTS, args.place or PLACES))
    print(f"\n{proof_table(cells)}\n\n{cost_table(cells)}")


if __name__ == "__main__":
    main()
