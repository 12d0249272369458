"""How many agents of each kind this machine carries, found by running some of each up to a model call that is held.

An agent's memory there is what bounds their number. The pages of its program's files are in memory once, however many run, so
they are counted once: of codex they are 170 MB, which three of them would seem to hold in addition to 33 MB each. Asleep an agent
is what stays in memory when all else is paged out, with what zram takes to hold that; where swap is on a disk, the size of the
swap bounds them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec

from rollyard import agents as registry
from rollyard.core.agent import Agent, LayerSpec
from rollyard.core.errors import Error, Unsupported
from rollyard.core.protocols import Sleeps
from rollyard.core.sandbox import MemoryUse
from rollyard.runs.held_agents import hold_agents
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.run.admission import HEAD_ROOM
from rollyard.sandbox import backend
from rollyard.sandbox.local.backend import LocalBackend

COUNT = 3  # of each kind
MB = 2**20
_SETTLE_S = 2.0


class AgentCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """`shared_mb` is what all agents of this kind hold together; the other `*_mb` are what each has of its own. What was not
    measured is None, and `problem` says why."""

    agent: str
    version: str | None = None
    shared_mb: float | None = None
    awake_mb: float | None = None
    awake: int | None = None  # that the machine carries
    asleep_mb: float | None = None  # in memory, with what zram holds
    paged_out_mb: float | None = None
    asleep: int | None = None  # that it carries when as many sleep as there is swap for
    problem: str = ""

    @property
    def missing(self) -> str:
        what = self.agent if self.awake is None else f"{self.agent} asleep"
        return f"{what}: not measured. {self.problem}"


class MachineCapacity(msgspec.Struct, frozen=True, kw_only=True):
    total_mb: int
    available_mb: int
    head_room_mb: int  # stays free
    swap_mb: int
    no_sleep: str = ""  # why none was put to sleep
    agents: tuple[AgentCapacity, ...] = ()


async def examine_capacity(names: Sequence[str] = (), *, count: int = COUNT) -> MachineCapacity:
    """Of the agents that are named, or of all that are installed on this machine and call a model."""
    async with backend("local") as place:
        assert isinstance(place, LocalBackend)
        chosen = [registry.get(name) for name in names] or find_installed(place)
        use, no_sleep = await place.memory(), ""
        try:
            place.check_sleep()
        except Unsupported as error:
            no_sleep = f"{error.message}: {error.hint}"
        rows = [await measure_agent(place, agent, count, asleep=not no_sleep) for agent in chosen]
    return MachineCapacity(
        total_mb=use.total // MB,
        available_mb=use.available // MB,
        head_room_mb=int(HEAD_ROOM * use.total) // MB,
        swap_mb=use.swap // MB,
        no_sleep=no_sleep,
        agents=tuple(rows),
    )


def find_installed(place: LocalBackend) -> list[Agent]:
    layers = Provision.of(place).images.layers
    found = [registry.get(name) for name in registry.names()]
    return [one for one in found if one.calls_model and (one.layer == LayerSpec() or layers.find(one.layer))]


async def measure_agent(place: LocalBackend, agent: Agent, count: int, *, asleep: bool) -> AgentCapacity:
    row = AgentCapacity(agent=agent.name, version=agent.version)
    before = await place.memory()
    try:
        async with hold_agents(place, agent, count) as (_, boxes):
            await anyio.sleep(_SETTLE_S)
            row = weigh_awake(row, before, await place.memory(), count)
            if not asleep:
                return row
            zram, sleepers = read_zram(), [box for box in boxes.values() if isinstance(box, Sleeps)]
            for box in sleepers:
                await box.put_to_sleep(freeze=agent.freeze_s > 0)
            await anyio.sleep(_SETTLE_S)
            row = weigh_asleep(row, before, await place.memory(), count, read_zram() - zram)
            for box in sleepers:
                await box.wake()
    except* Error as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        row = msgspec.structs.replace(row, problem=str(first))
    return row


def weigh_awake(row: AgentCapacity, before: MemoryUse, now: MemoryUse, count: int) -> AgentCapacity:
    own, shared = split_memory(now, count)
    return msgspec.structs.replace(
        row,
        shared_mb=round(shared / MB, 1),
        awake_mb=round(own / MB, 1),
        awake=int(_usable_memory(before, shared) / own),
    )


def weigh_asleep(row: AgentCapacity, before: MemoryUse, now: MemoryUse, count: int, zram: int) -> AgentCapacity:
    """`zram` is what their pages take there, compressed."""
    own, shared = split_memory(now, count, zram)
    out, room = sum(now.swapped.values()) / count, _usable_memory(before, shared)
    carried = room / own
    if out and before.swap_free / out < carried and row.awake_mb is not None:
        asleep = before.swap_free / out
        carried = asleep + (room - asleep * own) / (row.awake_mb * MB)  # for the others there is no swap
    return msgspec.structs.replace(
        row, asleep_mb=round(own / MB, 1), paged_out_mb=round(out / MB, 1), asleep=int(carried)
    )


def split_memory(use: MemoryUse, count: int, zram: int = 0) -> tuple[float, int]:
    """What each of `count` agents of one kind has of its own, with its share of `zram`, and what they hold together."""
    shared = sum(use.files.values())
    return (sum(use.sandboxes.values()) - shared + zram) / count, shared


def _usable_memory(use: MemoryUse, shared: int) -> float:
    return max(0.0, use.available - HEAD_ROOM * use.total - shared)


def read_zram() -> int:
    """What all zram devices take of the machine's memory."""
    files = Path("/sys/block").glob("zram*/mm_stat")
    return sum(int(file.read_text().split()[2]) for file in files)
