"""Density: how many agents wait for a model in one GiB, awake and asleep, and how much later an agent that slept goes on.

Some agents of one kind are held at a model call and measured. Then one is answered, and the time until its next call is taken:
awake, woken for the first time (nothing is known of what it uses, and it fetches its pages itself), woken alone later, and all
woken at once. Times are those of a busy machine where it is one; CPU is what the sandbox used until that call, which other work
changes little; the pages that are fetched for it are not in that. Asleep needs swap or zram, as root:

    echo 3G > /sys/block/zram0/disksize && mkswap /dev/zram0 && swapon /dev/zram0
    python -m bench.density [--agents pi,claude-code] [--count 4]
    swapoff /dev/zram0 && echo 1 > /sys/block/zram0/reset
"""

from __future__ import annotations

import argparse
import asyncio
from statistics import median
from typing import NamedTuple

from bench.figures import note
from rollyard import agents as registry
from rollyard.core.agent import Agent
from rollyard.core.errors import Error, Unsupported
from rollyard.core.protocols import Sleeps
from rollyard.runs.doctor_capacity import find_installed, read_zram
from rollyard.runs.held_agents import hold_agents
from rollyard.sandbox.local.backend import LocalBackend

MB = 2**20
SETTLE_S = 2.0


class Row(NamedTuple):
    agent: str
    mode: str
    mb: float  # of one agent, with what zram holds of it
    next_ms: float  # from the answer to the next call
    cpu_ms: float  # of the sandbox, meanwhile

    @property
    def per_gib(self) -> float:
        return 1024 / self.mb


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

        async def put_to_sleep() -> float:
            before = read_zram()
            for box in boxes.values():
                assert isinstance(box, Sleeps)
                await box.put_to_sleep(freeze=agent.freeze_s > 0)
            await asyncio.sleep(SETTLE_S)
            return (sum((await place.memory()).sandboxes.values()) + read_zram() - before) / count / MB

        def row(mode: str, mb: float, answers: list[Answered]) -> Row:
            return Row(agent.name, mode, mb, *(1e3 * median(times) for times in zip(*answers, strict=True)))

        await asyncio.sleep(SETTLE_S)
        awake = sum((await place.memory()).sandboxes.values()) / count / MB
        for name in names:
            await policy.answer(name)  # the first command that it runs takes it longer than others
        rows = [row("awake", awake, [await answer(name) for name in names])]
        if not sleeps:
            return rows
        asleep = await put_to_sleep()
        rows.append(row("asleep, woken first", asleep, [await answer(name, asleep=True) for name in names]))
        await put_to_sleep()  # zram keeps what came back for a while, so how much they take is measured once
        rows.append(row("asleep, woken alone", asleep, [await answer(name, asleep=True) for name in names]))
        await put_to_sleep()
        together = list(await asyncio.gather(*(answer(name, asleep=True) for name in names)))
        rows.append(row(f"asleep, {count} woken at once", asleep, together))
        return rows


async def run(wanted: list[str], count: int) -> bool:
    """Whether all that were asked for are measured; of those that happen to be installed, some need the tools of a task."""
    missing = False
    print(f"{'agent':15}{'mode':25}{'MB':>6}{'per GiB':>8}{'next ms':>8}{'added':>7}{'CPU ms':>7}", flush=True)
    async with LocalBackend() as place:
        sleeps = True
        try:
            place.check_sleep()
        except Unsupported as error:
            sleeps = False
            print(f"asleep: not measured. {error}")
        found: list[Row] = []
        for agent in [registry.get(name) for name in wanted] or find_installed(place):
            try:
                rows = await measure(place, agent, count, sleeps=sleeps)
            except* Error as errors:
                missing, rows = True, []
                print(f"{agent.name:15}not measured: {errors.exceptions[0]}")
            for row in rows:
                added = f"{row.next_ms - rows[0].next_ms:.0f}" if row is not rows[0] else ""
                memory = f"{row.mb:6.1f}{row.per_gib:8.1f}"
                print(f"{row.agent:15}{row.mode:25}{memory}{row.next_ms:8.0f}{added:>7}{row.cpu_ms:7.0f}", flush=True)
            found += rows[:2]  # however they are woken, they take as much
    print()
    for row in found:
        note(f"{row.agent} per GiB, {row.mode.partition(',')[0]}", row.per_gib, sense="more")
    return bool(found) and not (missing and wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default="", help="separated by commas; unset: all that are installed here")
    parser.add_argument("--count", type=int, default=4)
    args = parser.parse_args()
    return 0 if asyncio.run(run([name for name in args.agents.split(",") if name], args.count)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
