"""A database that crashes or stands still while it is written to: every write happens once, none is lost."""

import asyncio
import signal
from pathlib import Path

import anyio
import pytest
from sqlalchemy import text

from rollyard.core.errors import ConfigError, StoreError
from rollyard.core.events import Event
from rollyard.store import Store
from tests.servers.postgres import PostgresServer
from tests.waiting import until

pytestmark = pytest.mark.anyio

if not list(Path("/usr/lib/postgresql").glob("*/bin")):
    pytest.skip("no PostgreSQL server is installed (Debian package postgresql)", allow_module_level=True)

WRITERS, WRITES = 8, 40


@pytest.fixture
def server():
    made = PostgresServer()
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


async def test_a_server_that_does_not_listen_is_named_without_its_password_and_given_up(server, caplog):
    url = server.url.replace("ry@", "ry:geheim@")
    server.stop()
    with pytest.raises(StoreError, match=r"no PostgreSQL server answers at postgresql://ry:\*\*\*@") as refused:
        async with asyncio.timeout(30), Store.open(url, wait_s=1):
            pass
    assert "geheim" not in str(refused.value)
    assert len(caplog.records) == 1 and "does not answer" in caplog.text and "geheim" not in caplog.text


async def test_a_server_that_comes_in_time_is_used(server, caplog):
    server.stop()

    async def come():
        await until(lambda: "does not answer" in caplog.text)
        await asyncio.to_thread(server.start)

    async with asyncio.TaskGroup() as group:
        group.create_task(come())
        async with Store.open(server.url, wait_s=60) as store:
            assert await store.list_runs() == []


async def test_a_reading_verb_makes_no_tables(server):
    with pytest.raises(StoreError, match="no store at postgresql://"):
        async with Store.open(server.url, create=False):
            pass
    async with Store.open(server.url) as store:
        await store.create_run({}, id="run_a")
    async with Store.open(server.url, create=False) as store:
        assert len(await store.list_runs()) == 1


async def test_what_the_server_refuses_is_said_with_its_address(server):
    with pytest.raises(StoreError, match='/nosuch refused: database "nosuch" does not exist'):
        async with Store.open(server.url.replace("/drill", "/nosuch")):
            pass
    for address in ("postgresql://ry@127.0.0.1:99999/x", "postgresql://ry@127.0.0.1:port/x"):
        with pytest.raises(ConfigError, match="address"):
            async with Store.open(address):
                pass


async def test_a_transaction_that_a_cancel_scope_ends_shows_no_trace_and_its_connection_is_gone(server, caplog):
    sleeping = "SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(600)' AND state = 'active'"
    async with Store.open(server.url) as store, Store.open(server.url) as other, anyio.create_task_group() as group:

        async def count():
            return await other.database.read(lambda c: c.execute(text(sleeping)).scalar())

        for ask in (store.database.write, store.database.read):
            for _ in range(4):
                group.start_soon(ask, lambda c: c.execute(text("SELECT pg_sleep(600)")) and None)
        with anyio.fail_after(60):
            while await count() < 8:
                await asyncio.sleep(0.05)
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                while await count():
                    await asyncio.sleep(0.05)
    assert caplog.text == ""
