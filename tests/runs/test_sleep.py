"""`sleep_after`: an agent that waits for its model long enough sleeps, and is awake before its answer is written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import anyio
import pytest

import rollyard as ry
from rollyard.core.errors import Unsupported
from rollyard.core.limits import Limits
from rollyard.runs.rollout.sleep import WAKE_S, SleepingPolicy
from rollyard.runs.rollout.stages import Stages, drop_event
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.sandbox.local.cgroups import Group
from rollyard.sandbox.local.memory import MachineMemory
from rollyard.sandbox.local.page_in import Regions
from tests.runs.conftest import HELLO
from tests.runs.test_run import finish, tasks

pytestmark = pytest.mark.anyio

SWAP = len(Path("/proc/swaps").read_text().splitlines()) > 1
needs_swap = pytest.mark.skipif(not SWAP, reason="this machine has no swap switched on")


class Bed:
    """A sandbox that notes when it sleeps and wakes."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.slept, self.woken = anyio.Event(), anyio.Event()

    async def put_to_sleep(self, *, freeze: bool = False) -> None:
        self.log.append("frozen" if freeze else "asleep")
        self.slept.set()

    async def wake(self) -> None:
        self.log.append("awake")
        self.woken.set()


class Answers:
    """A policy that waits for an event before each answer."""

    def __init__(self, *events: anyio.Event) -> None:
        self._events = list(events)

    async def __call__(self, call):
        await self._events[call].wait()
        return call

    async def closed(self, rollout_id: str) -> None: ...
    async def aclose(self) -> None: ...


def sleeping(policy, bed: Bed, after_s: float, freeze_s: float = 0.0) -> SleepingPolicy:
    return SleepingPolicy(policy, bed, Stages("ro_1", Limits(), drop_event), after_s, freeze_s)


async def test_an_agent_whose_call_is_held_sleeps_and_is_awake_when_the_answer_comes():
    bed = Bed()
    assert await sleeping(Answers(bed.slept), bed, 0.0)(0) == 0
    assert bed.log == ["asleep", "awake"]


async def test_an_agent_that_is_not_frozen_sleeps_until_its_answer_comes():
    bed, answer = Bed(), anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(sleeping(Answers(answer), bed, 0.0), 0)
        await bed.slept.wait()
        await anyio.wait_all_tasks_blocked()
        assert bed.log == ["asleep"]
        answer.set()
    assert bed.log == ["asleep", "awake"]


async def test_a_quick_answer_finds_the_agent_awake():
    bed, now = Bed(), anyio.Event()
    now.set()
    await sleeping(Answers(now), bed, 1000.0)(0)
    assert bed.log == []


async def test_an_agent_that_has_to_be_frozen_is_frozen_for_a_while_and_no_longer():
    bed = Bed()
    await sleeping(Answers(bed.woken), bed, 0.0, freeze_s=0.01)(0)
    assert bed.log == ["frozen", "awake"]


async def test_an_agent_with_two_calls_sleeps_again_after_the_first_answer():
    bed, asked = Bed(), anyio.Event()
    again = anyio.Event()
    policy = sleeping(Answers(asked, again), bed, 0.0)
    with anyio.fail_after(30):
        await _answer_one_after_the_other(policy, bed, asked, again)
    assert bed.log[-1] == "awake"


async def _answer_one_after_the_other(policy, bed: Bed, asked: anyio.Event, again: anyio.Event) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(policy, 0)
        group.start_soon(policy, 1)
        await bed.slept.wait()
        bed.slept = anyio.Event()
        bed.log.clear()
        asked.set()
        await bed.slept.wait()
        assert bed.log == ["awake", "asleep"]
        again.set()


async def test_a_call_that_is_given_up_leaves_no_agent_asleep():
    bed = Bed()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(sleeping(Answers(anyio.Event()), bed, 0.0), 0)
            await bed.slept.wait()
            scope.cancel()
    assert bed.log == ["asleep", "awake"]


def test_a_sandbox_may_swap_while_it_sleeps_and_as_much_as_it_may_hold(tmp_path):
    (tmp_path / "memory.max").write_text("1000")
    (tmp_path / "memory.swap.max").write_text("0")
    group = Group((str(tmp_path),))
    group.allow_swap(True)
    assert (tmp_path / "memory.swap.max").read_text() == "1000"
    group.allow_swap(False)
    assert (tmp_path / "memory.swap.max").read_text() == "0"


async def test_a_machine_without_swap_is_refused_by_name_with_what_to_do(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "swaps").write_text("Filename\tType\tSize\tUsed\tPriority\n")
    async with (
        ry.Store.open(tmp_path / "runs.db") as store,
        ry.Gate(ry.policy.scripted(HELLO), log=store) as gate,
        LocalBackend(root=tmp_path / "home", proc=tmp_path / "proc") as backend,
    ):
        with pytest.raises(Unsupported, match="no swap switched on") as refused:
            async with ry.Run(tasks(1), agent="shell-agent", sleep_after=2.0, sandbox=backend, gate=gate, store=store):
                pass
    assert "docs/capacity.md" in str(refused.value.hint)


async def test_agents_that_sleep_are_not_cancelled_for_old_answers_and_that_is_told_by_the_option(tmp_path):
    async with (
        ry.Store.open(tmp_path / "runs.db") as store,
        ry.Gate(ry.policy.scripted(HELLO), log=store) as gate,
        LocalBackend(root=tmp_path / "home") as backend,
    ):
        options = {"sleep_after": 2.0, "max_staleness": 1, "sandbox": backend, "gate": gate, "store": store}
        with pytest.raises(Unsupported, match="not cancelled there when its answers grow old") as refused:
            async with ry.Run(tasks(1), agent="shell-agent", **options):
                pass
    assert "--max-staleness" in str(refused.value.hint)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.parametrize("right", ["+sys_nice", "-sys_nice"])
def test_who_may_page_nothing_out_is_refused_before_anything_opens(tmp_path, right):
    """An ordinary user, and root in most containers. The machine here has swap, so that only the right is missing."""
    (tmp_path / "swaps").write_text("Filename\tType\tSize\tUsed\tPriority\n/swap\tfile\t1\t0\t-1\n")
    code = "import sys; from rollyard.core.errors import Unsupported\n"
    code += "from rollyard.sandbox.local.backend import LocalBackend\n"
    code += "made = LocalBackend(root=sys.argv[1] + '/home', proc=sys.argv[1])\n"
    code += "try: made.check_sleep(); print('may')\nexcept Unsupported as error: print(error.hint)"
    command = ["setpriv", "--bounding-set", right, sys.executable, "-c", code, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    refused = "run as root, in a container with CAP_SYS_NICE, or let agents stay awake\n"
    assert done.stdout == ("may\n" if right[0] == "+" else refused), done.stderr


@pytest.mark.slow
@needs_swap
async def test_the_memory_of_a_sandbox_goes_to_swap_and_its_programs_go_on(backend):
    async with backend.open(ry.SandboxSpec()) as box:
        hold = "x = bytearray(80_000_000)\nprint('ready', flush=True)\nwhile input(): print(sum(x[::4096]), flush=True)"
        job = await box.start(["python3", "-c", hold], stdin=True)
        lines = job.stream()
        while b"ready" not in (await anext(lines))[1]:
            pass
        awake = await backend.memory()
        await box.put_to_sleep(freeze=True)
        asleep = await backend.memory()
        assert asleep.swapped[box.id] > 60e6
        assert awake.sandboxes[box.id] - asleep.sandboxes[box.id] > 60e6
        await box.wake()
        await job.write(b"go\n")
        while b"0" not in (await anext(lines))[1]:
            pass


class SlowDisk(LocalBackend):
    """Where memory goes and never comes back ahead of its use."""

    def check_sleep(self) -> None: ...

    async def page_out(self, pid: int) -> Regions:
        return {pid: [(0, 4096)]}

    async def page_in(self, used: Regions, waking: int) -> None:
        await anyio.sleep_forever()


async def test_a_frozen_agent_goes_on_however_slowly_its_memory_comes_back(tmp_path):
    async with SlowDisk(root=tmp_path / "home") as backend, backend.open(ry.SandboxSpec()) as box:
        if not backend.capabilities.pause:
            pytest.skip("nothing can be frozen here")
        job = await box.start(["cat"], stdin=True)
        for _ in range(2):  # the first time nothing is known of what it uses
            await box.put_to_sleep(freeze=True)
            with anyio.move_on_after(WAKE_S):  # as who wakes it does
                await box.wake()
        await job.write(b"awake")
        with anyio.fail_after(60):
            assert (await anext(job.stream()))[1] == b"awake"


HOLD = "import mmap, os\nx = mmap.mmap(-1, 60 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
HOLD += "for at in range(0, 60 << 20, 4096): x[at:at + 1024] = os.urandom(1024)\n"
HOLD += "print('ready', flush=True)\n"
HOLD += "while input(): print('used', sum(x[at] for at in range(0, 20 << 20, 4096)), flush=True)"
PAGES = (60 << 20) // 4096


@pytest.mark.slow
@needs_swap
async def test_what_a_program_used_since_it_woke_is_there_before_it_goes_on_and_little_else(tmp_path):
    """It holds 60 MB and uses 20 of them each time: those come back with `wake`, the other 40 stay where they are."""
    idle = LocalBackend(root=tmp_path / "home", cores=10_000)  # some are always idle
    async with idle as backend, backend.open(ry.SandboxSpec()) as box:
        job = await box.start(["python3", "-c", HOLD], stdin=True)
        lines = job.stream()

        async def use(word: bytes = b"used") -> None:
            await job.write(b"go\n")
            while word not in (await anext(lines))[1]:
                pass

        async def sleep_and_wake() -> float:
            """MB that came back by waking."""
            await box.put_to_sleep(freeze=True)
            before = (await backend.memory()).swapped[box.id]
            assert before > 50 << 20
            await box.wake()
            return (before - (await backend.memory()).swapped[box.id]) / 2**20

        await use(b"ready")
        assert await sleep_and_wake() < 10  # all that was ever allocated is no guide
        await use()
        assert 16 < await sleep_and_wake() < 35
        await use()


@pytest.fixture
def holder():
    """A program that holds 60 MB and does nothing."""
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


def count_pages(resident: Regions) -> int:
    return sum((end - start) // 4096 for regions in resident.values() for start, end in regions)


@pytest.mark.slow
@needs_swap
def test_what_is_used_no_more_is_fetched_ahead_for_eight_wakings_at_most(holder):
    memory = MachineMemory(cores=10_000)
    resident = memory.page_out(holder)
    fetched = [count_pages(resident)]
    assert fetched[0] > PAGES
    for waking in range(8):
        memory.page_in(resident, waking)
        resident = memory.page_out(holder)
        fetched.append(count_pages(resident))
    assert all(later < earlier for earlier, later in pairwise(fetched[:8]))
    assert fetched[8] < PAGES // 20


@pytest.mark.slow
@needs_swap
@pytest.mark.parametrize(("running", "fetches"), [(1, True), (2, True), (3, False), (40, False)])
def test_pages_are_fetched_ahead_only_where_cores_are_idle(holder, tmp_path, running, fetches):
    (tmp_path / "loadavg").write_text(f"0.10 0.20 0.30 {running}/900 4711\n")
    resident = MachineMemory().page_out(holder)
    MachineMemory(tmp_path, cores=4).page_in(resident, 1)
    assert (count_pages(MachineMemory().page_out(holder)) > PAGES // 2) == fetches


@pytest.mark.slow
@needs_swap
@pytest.mark.parametrize("agent", ["shell-agent", "pi", "claude-code"])
async def test_an_agent_that_slept_does_its_task(tmp_path, backend, agent):
    policy = ry.policy.scripted(
        {"steps": [{"sleep": 6, "shell": "echo hello > out.txt"}, {"sleep": 6, "text": "done"}]}
    )
    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(policy, log=store) as gate:
        async with ry.Run(tasks(2), agent=agent, sleep_after=0.5, sandbox=backend, gate=gate, store=store) as run:
            done = await finish(run)
        for rollout in done:
            names = [event.event.name for event in await store.events(rollout_id=rollout.id)]
            assert rollout.reward == 1.0
            assert names.count("agent.asleep") >= 2
            assert "agent.not_asleep" not in names
