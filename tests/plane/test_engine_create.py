"""A creation that is broken off leaves nothing: its sandbox has no name that anybody was told."""

import asyncio
import time

import msgspec
import pytest

from rollyard.core.ids import new_id
from rollyard.core.plane import Instance, InstancePlan
from rollyard.core.sandbox import Capabilities
from rollyard.plane.engines.backend import BackendEngine
from rollyard.plane.engines.protocol import INSTANCE_LABEL
from rollyard.sandbox import backend

pytestmark = pytest.mark.anyio


class NeverStarts:
    """A backend whose sandboxes open and then start nothing."""

    def __init__(self, real, reached):
        self.real, self.reached = real, reached

    def __getattr__(self, name):
        return getattr(self.real, name)

    async def open(self, spec):
        return NeverStarts(await self.real.open(spec), self.reached)

    async def start(self, *_, **__):
        self.reached.set()
        await asyncio.Event().wait()


async def test_a_creation_that_is_cancelled_while_its_program_starts_deletes_its_sandbox():
    now, reached = time.time(), asyncio.Event()
    instance = Instance(
        id=new_id("inst"), owner="o", engine="local", state="creating", live=True, created_at=now, updated_at=now,
        expires_at=now + 60, last_seen_at=now, settle_by=now + 60,
        plan=InstancePlan(image="host", ttl_s=60, start=("sleep", "60")),
    )  # fmt: skip
    async with backend("local") as real:
        creating = asyncio.create_task(BackendEngine(NeverStarts(real, reached)).create(instance, "plane"))
        async with asyncio.timeout(60):
            await reached.wait()
        assert len(await real.list({INSTANCE_LABEL: instance.id})) == 1
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        assert await real.list({INSTANCE_LABEL: instance.id}) == []


async def test_an_engine_says_of_itself_what_its_backend_can():
    """One value: nothing is copied field by field, so nothing that a backend can is refused by its engine."""
    real = backend("local")
    can = BackendEngine(real).capabilities
    assert {name: getattr(can, name) for name in Capabilities.__struct_fields__} == msgspec.structs.asdict(
        real.capabilities
    )
    assert can.exec and can.files and can.arguments
