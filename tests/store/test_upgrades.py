"""Bringing a large store of an older version up to date takes minutes: it is told, waited for, and given up cleanly."""

import asyncio
import sqlite3
from contextlib import closing, contextmanager

import pytest
from sqlalchemy import text

from rollyard.store import Store, batches, postgres, sqlite
from rollyard.store.store import open_database
from rollyard.testing.call_log import commit_all, conversation
from tests.store.test_migrations import split_rows
from tests.waiting import until

pytestmark = pytest.mark.anyio

COUNT = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {last}) SELECT count(*) FROM n"


@contextmanager
def written_by_another(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


async def make_old(where):
    async with Store.open(where) as store:
        trajectory, added = conversation("r1", 3)
        await commit_all(store, added)
        await store.database.prepare(lambda connection: split_rows(connection, {"r1"}))
    return trajectory.nodes


async def test_it_may_take_longer_than_any_write_or_read(store_url, monkeypatch):
    async with Store.open(store_url) as store:
        await store.create_run({}, id="run1")
    database = open_database(store_url, "normal")
    for module in (batches, sqlite, postgres):
        monkeypatch.setattr(module, "DEADLINE_S", 0.01)

    def work(connection):
        assert connection.execute(text(COUNT.format(last=2_000_000))).scalar() == 2_000_000
        connection.execute(text("UPDATE runs SET id = 'run2'"))

    await database.upgrade(work)
    await database.aclose()
    monkeypatch.undo()
    async with Store.open(store_url) as store:
        assert [run.id for run in await store.list_runs()] == ["run2"]


async def test_the_user_is_told_before_it_begins_and_when_it_is_done(store_url, caplog):
    nodes = await make_old(store_url)
    async with Store.open(store_url) as store:
        assert (await store.trajectory("r1")).nodes == nodes
    first, last = (record.getMessage() for record in caplog.records)
    assert "older version" in first and "minutes" in first and "up to date after" in last
    caplog.clear()
    async with Store.open(store_url):
        assert not caplog.records


async def test_it_waits_for_another_process_that_has_the_lock(tmp_path, caplog):
    where = tmp_path / "runs.db"
    nodes = await make_old(where)

    async def open_it():
        async with Store.open(where) as store:
            return (await store.trajectory("r1")).nodes

    with written_by_another(where):
        opening = asyncio.create_task(open_it())
        await until(lambda: "waiting for it" in caplog.text)
        assert not opening.done()
    assert await opening == nodes


@pytest.mark.parametrize("locked", [False, True])
async def test_one_that_is_given_up_stops_at_once_and_leaves_the_file_as_it_was(tmp_path, locked):
    where = tmp_path / "runs.db"
    await make_old(where)
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def endless(connection):
        connection.execute(text("DROP TABLE calls"))
        loop.call_soon_threadsafe(began.set)
        connection.execute(text(COUNT.format(last=10**15)))

    database = open_database(str(where), "normal")
    with written_by_another(where) if locked else closing(open(where, "rb")):
        running = asyncio.create_task(database.upgrade(endless))
        if not locked:
            await began.wait()
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 60)
    await database.aclose()
    with closing(sqlite3.connect(where)) as raw:
        assert raw.execute("SELECT count(*) FROM calls").fetchone() == (3,)
        assert raw.execute("SELECT version_num FROM alembic_version").fetchone() == ("0013",)
