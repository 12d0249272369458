"""A database that crashes or stands still while it is written to: every write happens once, none is lost."""

import asyncio
import signal
from pathlib import Path

import pytest

from rollyard.core.events import Event
from rollyard.store import Store
from rollyard.testing.postgres import Postgres

pytestmark = pytest.mark.anyio

if not list(Path("/usr/lib/postgresql").glob("*/bin")):
    pytest.skip("no PostgreSQL server is installed (Debian package postgresql)", allow_module_level=True)

WRITERS, WRITES = 8, 40


@pytest.fixture
def server():
    made = Postgres()
    yield made
    made.close()


async def test_writes_through_a_crash_and_a_pause_happen_exactly_once(server):
    async with Store.open(server.url) as store:
        written = 0

        async def write(writer):
            nonlocal written
            for number in range(WRITES):
                await store.event(Event(at=1.0, name="n", run_id="r", fields={"of": writer, "n": number}))
                written += 1
                await asyncio.sleep(0.01)

        async def breaks():
            for share in (0.2, 0.5):
                while written < share * WRITERS * WRITES:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(server.stop, "immediate")
                await asyncio.to_thread(server.start)
            while written < 0.7 * WRITERS * WRITES:
                await asyncio.sleep(0.01)
            server.signal(signal.SIGSTOP)
            await asyncio.sleep(1)
            server.signal(signal.SIGCONT)

        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            group.create_task(breaks())
            for writer in range(WRITERS):
                group.create_task(write(writer))
        kept = [(e.event.fields["of"], e.event.fields["n"]) for e in await store.events(run_id="r", limit=10_000)]
    assert sorted(kept) == [(writer, number) for writer in range(WRITERS) for number in range(WRITES)]
    for writer in range(WRITERS):
        assert [n for of, n in kept if of == writer] == list(range(WRITES))
