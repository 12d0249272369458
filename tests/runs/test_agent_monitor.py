"""What a watch over an agent costs while the agent waits for its model: many wait at once."""

import anyio
import pytest

from rollyard.core.sandbox import Exit
from rollyard.runs.rollout.agent_monitor import AgentMonitor

pytestmark = pytest.mark.anyio


class WaitingJob:
    """Of an agent that ends when it is told to; counts how often its CPU time is asked for."""

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
        if self.asked == 2:
            self.over.set()
        return 1.0


class Lines:
    def feed(self, data):
        return []

    close = lambda self: []  # noqa: E731


class Calls:
    in_flight, last_activity = 1, 0.0


async def test_a_sandbox_is_not_asked_for_its_cpu_while_a_call_is_in_flight():
    job, calls, looks, third = WaitingJob(), Calls(), [], anyio.Event()

    def find_end():
        looks.append(job.asked)
        if len(looks) == 3:
            third.set()

    monitor = AgentMonitor(job, Lines(), calls, 60.0, None, find_end=find_end)
    async with anyio.create_task_group() as group:
        group.start_soon(monitor.wait)
        with anyio.fail_after(60):
            await third.wait()
            calls.in_flight = 0  # from here on it may be parked
            await job.over.wait()
    assert looks[:3] == [0, 0, 0] and job.asked == 2


async def test_a_sandbox_is_not_asked_for_its_cpu_soon_after_a_sign_of_life():
    job, looks, third = WaitingJob(), [], anyio.Event()

    def find_end():
        looks.append(job.asked)
        if len(looks) == 4:
            third.set()

    async with anyio.create_task_group() as group:
        group.start_soon(AgentMonitor(job, Lines(), None, 3600.0, None, find_end=find_end).wait)
        with anyio.fail_after(60):
            await third.wait()
        job.over.set()
    assert looks == [0, 0, 0, 0]
