"""On an overloaded machine rollouts are slower and nothing else: an agent that ended waits before anything is done for it, a
silent sandbox is no fault of its agent, and a call that came too late is not taken for its stage's limit."""

from __future__ import annotations

import asyncio

import anyio
import pytest

import rollyard as ry
from rollyard import agents
from rollyard.core.errors import SandboxInterrupted, StoreError
from rollyard.core.ids import new_id
from rollyard.core.sandbox import Exit
from rollyard.core.scratch import count_scratch
from rollyard.core.task import Task, VerifierSpec
from rollyard.gate import Gate
from rollyard.runs.rollout.agent_monitor import AgentMonitor
from rollyard.runs.rollout.lifecycle import rollout
from rollyard.runs.rollout.modes import choose
from rollyard.runs.rollout.options import RolloutOptions
from rollyard.runs.rollout.plan import RolloutPlan, SessionOptions
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.rollout.stages import StageFailed, Stages, drop_event
from rollyard.runs.run.loop_load import LoopLoad
from tests.gate.conftest import MemoryLog
from tests.runs.conftest import CHECK, HELLO

pytestmark = pytest.mark.anyio


class Told:
    """A sink that can be waited on; `order` has the stages as they begin. Its rollout has an id of its own, since tests run
    side by side on one machine."""

    def __init__(self):
        self.rollout_id = new_id("ro")
        self.order, self.stopping, self.waited = [], anyio.Event(), anyio.Event()

    async def __call__(self, event):
        if event.name == "stage.started":
            self.order.append(event.fields["stage"])
            if event.fields["stage"] == "stop":
                self.stopping.set()
        if event.name == "stage.finished" and event.fields["stage"] == "wait":
            self.waited.set()


async def start(backend, gate, told, ending, limits=None):
    agent, policy = agents.get("shell-agent"), gate.policy
    options = RolloutOptions(limits=limits)
    answering = choose(options, policy=policy, agent=agent)
    plan = RolloutPlan(
        rollout_id=told.rollout_id, agent=agent, options=options, mode=answering.mode, switches=answering.switches
    )
    task = Task(id="t", instruction="x", verifier=VerifierSpec(kind="commands", options={"commands": [CHECK]}))
    return await rollout(
        task,
        plan,
        session=SessionOptions(policy=policy, settings=answering.settings),
        backend=backend,
        gate=gate,
        provision=Provision.of(backend),
        ending=ending,
        sink=told,
    )


async def test_an_agent_that_ended_waits_for_its_place_before_it_is_stopped(backend):
    place, told, done = anyio.CapacityLimiter(1), Told(), []
    async with Gate(ry.policy.scripted(HELLO)) as gate, anyio.create_task_group() as group:

        async def one():
            done.append(await start(backend, gate, told, place))

        await place.acquire_on_behalf_of("another")
        group.start_soon(one)
        with anyio.fail_after(120):
            await told.waited.wait()
            while not place.statistics().tasks_waiting:
                await anyio.sleep(0.05)
        assert "stop" not in told.order
        assert gate.sessions[told.rollout_id].key is None  # what the agent left running asks the model for nothing
        place.release_on_behalf_of("another")
    assert (done[0].reward, told.order[-3:]) == (1.0, ["stop", "collect", "verify"])


async def test_an_agent_whose_time_is_up_is_stopped_before_it_waits(backend):
    place, told = anyio.CapacityLimiter(1), Told()
    script = {"steps": [{"shell": "sleep 300"}, {"text": "done"}]}
    async with Gate(ry.policy.scripted(script)) as gate, anyio.create_task_group() as group:
        await place.acquire_on_behalf_of("another")
        group.start_soon(start, backend, gate, told, place, ry.Limits(boot=60, agent=3))
        with anyio.fail_after(120):
            await told.stopping.wait()
            while not place.statistics().tasks_waiting:
                await anyio.sleep(0.05)
        assert "collect" not in told.order
        group.cancel_scope.cancel()


async def test_a_sandbox_does_not_end_while_its_rollout_waits_for_its_place(backend):
    place, told, limits = anyio.CapacityLimiter(1), Told(), ry.Limits(boot=60, setup=60, agent=60, verify=60, total=125)
    async with Gate(ry.policy.scripted(HELLO)) as gate, anyio.create_task_group() as group:
        await place.acquire_on_behalf_of("another")
        group.start_soon(start, backend, gate, told, place, limits)
        with anyio.fail_after(120):
            await told.waited.wait()
            label = {"rollyard.rollout": told.rollout_id}
            (before,) = await backend.list(label)
            while (await backend.list(label))[0].expires_at <= before.expires_at + 100:
                await anyio.sleep(0.2)
        place.release_on_behalf_of("another")


class SilentJob:
    """In a sandbox that does not answer for the first two looks."""

    def __init__(self):
        self.over, self.asked = anyio.Event(), 0

    async def stream(self, stderr=False):
        await self.over.wait()
        for nothing in ():
            yield nothing

    async def wait(self):
        await self.over.wait()
        return Exit(exit_code=0, stdout=b"", stderr=b"")

    async def cpu_s(self):
        self.asked += 1
        if self.asked == 3:
            self.over.set()
            return 1.0
        raise SandboxInterrupted("no answer to 'cpu'")


class NoLines:
    def feed(self, data):
        return []

    close = lambda self: []  # noqa: E731


async def test_a_sandbox_that_does_not_say_its_cpu_time_ends_no_watch():
    job = SilentJob()
    with anyio.fail_after(60):
        ending = await AgentMonitor(job, NoLines(), None, 0.1, Stages("ro", ry.Limits(), drop_event)).wait()
    assert (ending.how, job.asked) == ("exited", 3)


async def test_what_comes_too_late_inside_a_stage_is_not_its_limit():
    stages = Stages("ro", ry.Limits(), drop_event)
    with pytest.raises(StageFailed) as failed:
        async with stages.stage("stop"):
            async with asyncio.timeout(0):
                await anyio.sleep_forever()
    assert type(failed.value.error) is TimeoutError and "limits." not in stages.records[-1].error


async def test_a_session_whose_end_the_log_could_not_take_tells_it_again():
    class BusyLog(MemoryLog):
        busy = True

        async def close_session(self, rollout_id, at):
            if self.busy:
                raise TimeoutError
            await super().close_session(rollout_id, at)

    log = BusyLog()
    async with Gate(ry.policy.scripted(HELLO), log=log) as gate:
        session = await gate.open_session("ro_1")
        with pytest.raises(StoreError):
            await session.close()
        log.busy = False
        await session.close()
    assert log.kept["ro_1"].closed_at is not None


async def test_a_session_that_cannot_be_closed_does_not_end_its_worker(backend):
    class StuckLog(MemoryLog):
        async def close_session(self, rollout_id, at):
            raise TimeoutError

    async with Gate(ry.policy.scripted(HELLO), log=StuckLog()) as gate:
        done = await start(backend, gate, Told(), anyio.CapacityLimiter(1))
    assert (done.reward, done.failure.cause, done.failure.retry) == (None, "StoreError", True)


async def test_no_more_end_at_once_while_processors_are_wanted_and_no_more_begin_while_many_wait():
    wanted = 100
    load = LoopLoad(cores=2, count_running=lambda: wanted, count_workers=lambda: 1)
    async with anyio.create_task_group() as group:

        async def end():
            async with load.ending:
                await anyio.sleep_forever()

        for _ in range(50):
            group.start_soon(end)
        await anyio.wait_all_tasks_blocked()
        load.note(0.0)
        assert load.ending.total_tokens == 4
        with anyio.move_on_after(0.5) as waited:
            await load.wait_until_calm(lambda: True)
        assert waited.cancelled_caught
        wanted = 1
        for _ in range(6):
            load.note(0.0)
            await anyio.wait_all_tasks_blocked()
        assert load.ending.total_tokens == 28
        with anyio.fail_after(5):
            await load.wait_until_calm(lambda: True)
        group.cancel_scope.cancel()


def test_places_are_by_the_workers_of_the_machine_and_grow_only_while_it_is_not_crowded():
    workers, wanted = 1, 1
    load = LoopLoad(cores=16, count_running=lambda: wanted, count_workers=lambda: workers)
    assert load.ending.total_tokens == 32
    workers = 16
    load.count_sharers()
    assert load.ending.total_tokens == 2
    load.ending.total_tokens, wanted = 16, 65
    load.note(0.2)  # the loop is neither calm nor late
    assert load.ending.total_tokens == 12
    for _ in range(20):
        load.note(0.0)
    assert load.ending.total_tokens == 2


async def test_a_worker_is_counted_while_it_watches_its_loop():
    before = count_scratch("worker")
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(LoopLoad().watch)
        await anyio.wait_all_tasks_blocked()
        assert count_scratch("worker") >= before + 2
        group.cancel_scope.cancel()
