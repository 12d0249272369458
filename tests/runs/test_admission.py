"""`parallel = "auto"`: agents start while memory carries them, by what those that run hold."""

from __future__ import annotations

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.sandbox import MemoryUse
from rollyard.runs import RunConfig
from rollyard.runs.rollout.plan import Hooks
from rollyard.runs.run import admission
from rollyard.runs.run.admission import MemoryAdmission
from rollyard.sandbox.local.backend import LocalBackend
from tests.runs.conftest import HELLO
from tests.runs.test_run import finish, tasks

pytestmark = pytest.mark.anyio

MB = 2**20


class Machine:
    """Agents that grow to `size` within a few seconds of a clock that only the test moves."""

    def __init__(self, total: int, size: int) -> None:
        self.total, self.size, self.now = total * MB, size * MB, 0.0
        self.started: dict[str, float] = {}

    def clock(self) -> float:
        return self.now

    def start(self) -> None:
        self.started[f"sbx_{len(self.started)}"] = self.now

    async def memory(self) -> MemoryUse:
        held = {name: int(self.size * min(1.0, (self.now - at) / 4)) for name, at in self.started.items()}
        return MemoryUse(total=self.total, available=self.total - sum(held.values()), sandboxes=held)


async def fill(machine: Machine, *, sharers: int = 1, seconds: int = 120) -> int:
    """How many agents run in the end when one is started whenever that is allowed."""
    deciding = MemoryAdmission(machine, sharers=sharers, cores=8, clock=machine.clock)
    for _ in range(seconds):
        while await deciding.has_room(len(machine.started)):
            machine.start()
        machine.now += 1
    return len(machine.started)


@pytest.mark.parametrize("size", [20, 130, 420])
async def test_as_many_start_as_memory_carries_with_room_to_spare(size):
    carried = 0.9 * 8000 / size
    assert carried * 0.95 - 1 <= await fill(Machine(8000, size)) <= carried


async def test_agents_that_have_just_started_count_with_what_they_will_take():
    machine = Machine(8000, 420)
    deciding = MemoryAdmission(machine, cores=1000, clock=machine.clock)
    while await deciding.has_room(len(machine.started)):
        machine.start()  # all at the same moment, and none holds anything yet
    assert len(machine.started) == 0.9 * 8000 * MB // admission.ASSUMED


async def test_few_start_at_once_however_much_memory_there_is():
    machine = Machine(10**6, 20)
    deciding = MemoryAdmission(machine, cores=2, clock=machine.clock)
    while await deciding.has_room(len(machine.started)):
        machine.start()
    assert len(machine.started) == 4


async def test_workers_of_one_machine_leave_room_for_each_other():
    assert await fill(Machine(8000, 420), sharers=4) <= 0.9 * 8000 / 420 - 3


async def test_one_agent_always_starts():
    machine = Machine(100, 420)
    assert await MemoryAdmission(machine, clock=machine.clock).has_room(0)
    machine.start()
    assert not await MemoryAdmission(machine, clock=machine.clock).has_room(1)


async def test_one_that_held_far_more_than_the_others_does_not_stop_them():
    machine = Machine(8000, 100)
    deciding = MemoryAdmission(machine, cores=8, clock=machine.clock)
    use = MemoryUse(total=8000 * MB, available=8000 * MB, sandboxes={f"s{n}": 100 * MB for n in range(20)})
    for sandboxes in (use.sandboxes, use.sandboxes, {**use.sandboxes, "s0": 4000 * MB}):
        machine.memory = lambda sandboxes=sandboxes: _give(MemoryUse(total=0, available=0, sandboxes=sandboxes))
        await deciding.has_room(20)
        machine.now += 10
    assert deciding.expected == 100 * MB


async def _give(use: MemoryUse) -> MemoryUse:
    return use


async def test_agents_of_which_nothing_can_be_read_count_as_the_largest_known():
    machine = Machine(8000, 0)
    deciding = MemoryAdmission(machine, cores=1000, clock=machine.clock)
    for _ in range(30):
        while len(machine.started) < 100 and await deciding.has_room(len(machine.started)):
            machine.start()
        machine.now += 1
    assert len(machine.started) == 0.9 * 8000 * MB // admission.ASSUMED


async def test_a_run_goes_by_the_memory_that_its_backend_measures(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1228800 kB\nMemAvailable: 1228800 kB\n")  # for two of 512 MB
    running, most = 0, 0

    async def begin(sandbox, rollout):
        nonlocal running, most
        running += 1
        most = max(most, running)

    async def end(sandbox, rollout):
        nonlocal running
        running -= 1

    hooks = Hooks(after_setup=(begin,), teardown=(end,))
    async with (
        ry.Store.open(tmp_path / "runs.db") as store,
        ry.Gate(ry.policy.scripted({"steps": [{"sleep": 0.3}, *HELLO["steps"]]}), log=store) as gate,
        LocalBackend(root=tmp_path / "home", proc=tmp_path / "proc") as backend,
        ry.Run(
            tasks(6), agent="shell-agent", parallel="auto", sandbox=backend, gate=gate, store=store, hooks=hooks
        ) as run,
    ):
        done = await finish(run)
    assert len(done) == 6
    assert most == 2


async def test_a_backend_that_measures_nothing_is_refused(tmp_path):
    class Elsewhere:
        name = "elsewhere"

    with pytest.raises(Unsupported, match=r"parallel = 'auto'.*'elsewhere'"):
        MemoryAdmission.of(Elsewhere())  # type: ignore[arg-type]


def test_another_word_than_auto_is_refused():
    with pytest.raises(ConfigError, match="parallel is 'many'"):
        RunConfig(parallel="many")


async def test_a_sandbox_holds_what_its_programs_hold(backend):
    async with backend.open(ry.SandboxSpec()) as box:
        empty = (await backend.memory()).sandboxes[box.id]
        job = await box.start(
            ["python3", "-c", "x = b'x' * 80_000_000; print('ready', flush=True); input()"], stdin=True
        )
        async for _, data in job.stream():
            if b"ready" in data:
                break
        use = await backend.memory()
        assert 80e6 < use.sandboxes[box.id] - empty < 120e6
        assert use.total > use.available > 0
    assert box.id not in (await backend.memory()).sandboxes
