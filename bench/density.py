"""Density: how many agents wait for a model in one GiB, awake and asleep, and how much later an agent that slept goes on.

What agents of one kind hold together, the pages of their program's files, is in a column of its own: it is there once, and each
GiB beyond it holds as many agents as the next column says.

Some agents of one kind are held at a model call and measured. Then they are answered, and the time until the next call is taken:
woken for the first time (nothing is known of what they use), then in some rounds by turns awake, woken alone, and all woken
at once. Times are those of a busy machine where it is one; CPU is what the sandbox used until that call, which other work changes
little; pages that are fetched for it are not in that. docs/capacity.md has its figures. About a minute for each agent
on a quiet machine. Asleep needs swap or zram, as root:

    echo 8G > /sys/block/zram0/disksize && mkswap /dev/zram0 && swapon /dev/zram0
    python -m bench.density [--agents pi,claude-code | --agents all] [--count 4]
    swapoff /dev/zram0 && echo 1 > /sys/block/zram0/reset
"""

from __future__ import annotations

import argparse
import asyncio
from statistics import median
from typing import NamedTuple

from bench.figures import note, read_machine
from rollyard import agents as registry
from rollyard.core.agent import Agent
from rollyard.core.errors import Error, Unsupported
from rollyard.core.protocols import Sleeps
from rollyard.runs.doctor_capacity import MB, find_installed, read_zram, split_memory
from rollyard.runs.held_agents import hold_agents
from rollyard.sandbox.local.backend import LocalBackend

ALL = "all"
ROUNDS = 3
SETTLE_S = 2.0
HEADER = """\
| agent | mode | shared, MB | per GiB | ratio | next call, ms | added, ms | CPU of the agent, ms |
|---|---|---|---|---|---|---|---|"""


class Row(NamedTuple):
    """`ratio` and `added_ms` are to the row of those that are awake."""

    agent: str
    mode: str
    next_ms: float  # from the answer to the next call
    cpu_ms: float  # of the sandbox, meanwhile
    shared_mb: float | None = None
    per_gib: float | None = None
    ratio: float | None = None
    added_ms: float | None = None

    def __str__(self) -> str:
        cells = (f"{self.next_ms:.0f}", _cell(self.added_ms, ".0f"), f"{self.cpu_ms:.0f}")
        memory = (_cell(self.shared_mb, ".0f"), _cell(self.per_gib, ".1f"), _cell(self.ratio, ".1f"))
        return f"| {' | '.join((self.agent, self.mode, *memory, *cells))} |"


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


class Answered(NamedTuple):
    wall_s: float
    cpu_s: float


async def measure(place: LocalBackend, agent: Agent, count: int, *, sleeps: bool) -> list[Row]:
    async with hold_agents(place, agent, count) as (policy, boxes):
        names = list(boxes)

        async def answer(name: str, *, asleep: bool = False) -> Answered:
            box, clock = boxes[name], asyncio.get_running_loop().time
            before, began = (await box.usage()).cpu_s, clock()
            if asleep:
                assert isinstance(box, Sleeps)
                await box.wake()
            await policy.answer(name)
            took = clock() - began
            return Answered(took, (await box.usage()).cpu_s - before)

        async def answer_each(*, asleep: bool = False) -> list[Answered]:
            return [await answer(name, asleep=asleep) for name in names]

        async def put_to_sleep() -> None:
            for box in boxes.values():
                assert isinstance(box, Sleeps)
                await box.put_to_sleep(freeze=agent.freeze_s > 0)
            await asyncio.sleep(SETTLE_S)

        async def weigh(zram: int = 0) -> tuple[float, float]:
            """The MB that they share, and how many are in one GiB."""
            own, shared = split_memory(await place.memory(), count, zram)
            return shared / MB, 2**30 / own

        def row(mode: str, answers: list[Answered], memory: tuple[float, float] | tuple[()] = ()) -> Row:
            return Row(agent.name, mode, *(1e3 * median(times) for times in zip(*answers, strict=True)), *memory)

        await asyncio.sleep(SETTLE_S)
        memory_awake = await weigh()
        await answer_each()  # the first command that it runs takes it longer than others
        if not sleeps:
            return [row("awake", [one for _ in range(ROUNDS) for one in await answer_each()], memory_awake)]
        before = read_zram()
        await put_to_sleep()
        memory_asleep = await weigh(read_zram() - before)  # once: zram keeps what came back for a while
        first = await answer_each(asleep=True)
        awake: list[Answered] = []
        alone: list[Answered] = []
        together: list[Answered] = []
        for _ in range(ROUNDS):
            await answer_each()  # what it slept through is back after this one
            awake += await answer_each()
            await put_to_sleep()
            alone += await answer_each(asleep=True)
            await put_to_sleep()
            together += await asyncio.gather(*(answer(name, asleep=True) for name in names))
        found = [
            row("awake", awake, memory_awake),
            row("asleep, woken for the first time", first, memory_asleep),
            row("asleep, woken alone", alone),
            row(f"asleep, {count} woken at once", together),
        ]
        return [found[0], *(compare(one, found[0]) for one in found[1:])]


def compare(row: Row, awake: Row) -> Row:
    ratio = row.per_gib / awake.per_gib if row.per_gib is not None and awake.per_gib is not None else None
    return row._replace(ratio=ratio, added_ms=row.next_ms - awake.next_ms)


def note_all(rows: list[Row]) -> None:
    for row in rows:
        mode = row.mode.partition(",")[0]
        if row.per_gib is not None:
            note(f"{row.agent} per GiB, {mode}", row.per_gib, sense="more")
        if row.mode == "asleep, woken alone" and row.added_ms is not None:
            note(f"ms that sleep adds to {row.agent}", row.added_ms)


async def run(wanted: list[str], count: int) -> bool:
    """Whether all that were asked for are measured; of those that happen to be installed, some need the tools of a task."""
    missing, found = False, list[Row]()
    async with LocalBackend() as place:
        sleeps = True
        try:
            place.check_sleep()
        except Unsupported as error:
            sleeps = False
            print(f"asleep: not measured. {error}")
        print(f"{count} of each; {read_machine()}\n\n{HEADER}", flush=True)
        for agent in choose(wanted, place):
            try:
                rows = await measure(place, agent, count, sleeps=sleeps)
            except* Error as errors:
                missing, rows = True, []
                print(f"{agent.name}: not measured. {find_first(errors)}")
            for row in rows:
                print(row, flush=True)
            found += rows
    print()
    note_all(found)
    return bool(found) and not (missing and wanted and wanted != [ALL])


def choose(wanted: list[str], place: LocalBackend) -> list[Agent]:
    if wanted == [ALL]:
        return [agent for agent in map(registry.get, registry.names()) if agent.calls_model]
    return [registry.get(name) for name in wanted] or find_installed(place)


def find_first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default="", help="separated by commas; all: also those that are not yet installed")
    parser.add_argument("--count", type=int, default=4)
    args = parser.parse_args()
    return 0 if asyncio.run(run([name for name in args.agents.split(",") if name], args.count)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
