"""Density: how many agents wait for a model in one GiB, awake and asleep, and how much later an agent that slept goes on.

Some agents of one kind are held at a model call and measured. Then one is answered, and the time until its next call is taken:
awake, woken alone, and all woken at once. Asleep needs swap or zram, as root:

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

GIB = 2**30
SETTLE_S = 2.0


class Row(NamedTuple):
    agent: str
    mode: str
    per_gib: float
    next_ms: float  # from the answer to the next call


async def measure(place: LocalBackend, agent: Agent, count: int, *, sleeps: bool) -> list[Row]:
    async with hold_agents(place, agent, count) as (policy, boxes):
        names = list(boxes)
        await asyncio.sleep(SETTLE_S)
        awake = sum((await place.memory()).sandboxes.values()) / count
        for name in names:
            await policy.answer(name)  # the first command that it runs takes it longer than others
        known = median([await policy.answer(name) for name in names])
        rows = [Row(agent.name, "awake", GIB / awake, 1e3 * known)]
        if not sleeps:
            return rows

        async def put_to_sleep() -> float:
            before = read_zram()
            for box in boxes.values():
                assert isinstance(box, Sleeps)
                await box.put_to_sleep(freeze=agent.freeze_s > 0)
            await asyncio.sleep(SETTLE_S)
            return (sum((await place.memory()).sandboxes.values()) + read_zram() - before) / count

        async def wake(name: str) -> float:
            box = boxes[name]
            assert isinstance(box, Sleeps)
            began = asyncio.get_running_loop().time()
            await box.wake()
            return asyncio.get_running_loop().time() - began + await policy.answer(name)

        asleep = await put_to_sleep()
        alone = median([await wake(name) for name in names])
        rows.append(Row(agent.name, "asleep, woken alone", GIB / asleep, 1e3 * alone))
        await put_to_sleep()  # zram keeps what came back for a while, so how much they take is measured once
        together = median(await asyncio.gather(*(wake(name) for name in names)))
        rows.append(Row(agent.name, f"asleep, {count} woken at once", GIB / asleep, 1e3 * together))
        return rows


async def run(wanted: list[str], count: int) -> bool:
    whole = True
    print(f"{'agent':16}{'mode':26}{'per GiB':>9}{'next call ms':>14}{'added ms':>10}", flush=True)
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
            except* (Error, TimeoutError) as errors:
                whole, rows = False, []
                print(f"{agent.name:16}not measured: {errors.exceptions[0]}")
            for row in rows:
                added = row.next_ms - rows[0].next_ms
                print(f"{row.agent:16}{row.mode:26}{row.per_gib:9.1f}{row.next_ms:14.0f}{added:10.0f}", flush=True)
            found += rows
    print()
    for row in found:
        note(f"{row.agent} per GiB, {row.mode}", row.per_gib)
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default="", help="separated by commas; unset: all that are installed here")
    parser.add_argument("--count", type=int, default=4)
    asked = parser.parse_args()
    return 0 if asyncio.run(run([name for name in asked.agents.split(",") if name], asked.count)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
