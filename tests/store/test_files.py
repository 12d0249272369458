"""The file of a SQLite store: when it is made, who may read it, and that a failure of its thread reaches every caller."""

import asyncio
import os
import resource
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from sqlalchemy import text

from rollyard.core.errors import ConfigError, StoreError
from rollyard.core.events import Event
from rollyard.store import Store
from rollyard.store.sqlite import SQLite
from rollyard.store.sqlite_writer import SQLiteWriter

pytestmark = pytest.mark.anyio


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.fixture
def wide_umask():
    before = os.umask(0)
    yield
    os.umask(before)


async def test_a_new_file_appears_with_the_first_write_and_answers_before(tmp_path):
    where = tmp_path / "runs.db"
    async with Store.open(where) as store:
        assert await store.list_runs() == [] and await store.sessions() == []
        assert not where.exists()
        await store.create_run({}, id="run_a")
        assert where.exists()
        assert [run.id for run in await store.list_runs()] == ["run_a"]
    async with Store.open(where, create=False) as store:
        assert [run.id for run in await store.list_runs()] == ["run_a"]


async def test_a_read_between_the_file_and_its_tables_answers_as_an_empty_store_does(tmp_path):
    """The reader looks before the file is there and opens it a moment later, when the writer has made it but no table."""
    made, go_on, reading_may_start = threading.Event(), threading.Event(), threading.Event()

    def set_up(connection):
        if threading.current_thread().name == "rollyard-store":  # the writer's, once its file is there
            made.set()
            go_on.wait(30)
        connection.execute(text("CREATE TABLE kept (word TEXT)"))

    def words(connection):
        return [row.word for row in connection.execute(text("SELECT word FROM kept"))]

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    database = SQLite(tmp_path / "runs.db")
    await database.prepare(set_up)
    busy = asyncio.create_task(asyncio.to_thread(reading_may_start.wait, 30))
    reading = asyncio.create_task(database.read(words))  # looks now, and waits for the one thread
    await asyncio.sleep(0)
    writing = asyncio.create_task(database.write(lambda c: c.execute(text("INSERT INTO kept VALUES ('first')"))))
    while not made.is_set():
        await asyncio.sleep(0.001)
    reading_may_start.set()
    assert await reading == []
    go_on.set()
    await asyncio.gather(busy, writing)
    assert await database.read(words) == ["first"]
    await database.aclose()


async def test_a_file_that_another_made_meanwhile_is_read(tmp_path):
    where = tmp_path / "runs.db"
    async with Store.open(where) as first, Store.open(where) as second:
        await second.create_run({}, id="run_b")
        assert [run.id for run in await first.list_runs()] == ["run_b"]
        await first.create_run({}, id="run_a")
        assert len(await second.list_runs()) == 2


async def test_many_first_writes_at_once_make_one_store(tmp_path):
    where = tmp_path / "runs.db"

    async def one(number):
        async with Store.open(where) as store:
            await store.create_run({}, id=f"run_{number}")

    await asyncio.gather(*(one(number) for number in range(8)))
    async with Store.open(where, create=False) as store:
        assert len(await store.list_runs()) == 8


async def test_a_first_write_waits_for_the_one_that_makes_the_tables(tmp_path):
    """Until the tables are there the file has no write-ahead log, and SQLite refuses to begin one beside a writer at once."""
    where = tmp_path / "runs.db"

    async def write():
        async with Store.open(where) as store:
            await store.create_run({}, id="run_a")
            return [run.id for run in await store.list_runs()]

    with closing(sqlite3.connect(where, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writing = asyncio.create_task(write())
        await asyncio.wait([writing], timeout=0.2)
        assert not writing.done()
        other.execute("COMMIT")
    assert await writing == ["run_a"]


async def test_new_files_are_their_owners_alone(tmp_path, wide_umask):
    where, copy, again = tmp_path / "runs.db", tmp_path / "copy.db", tmp_path / "again.db"
    async with Store.open(where) as store:
        await store.create_run({}, id="run_a")
        assert {path.name: mode(path) for path in tmp_path.iterdir()} == {
            "runs.db": 0o600,
            "runs.db-wal": 0o600,
            "runs.db-shm": 0o600,
        }
        await store.backup(copy)
    await Store.restore(copy, again)
    assert (mode(copy), mode(again)) == (0o600, 0o600)


async def test_a_wider_file_of_ours_is_narrowed_with_one_line(tmp_path, caplog):
    where = tmp_path / "runs.db"
    async with Store.open(where) as store:
        await store.create_run({}, id="run_a")
        for path in tmp_path.iterdir():
            path.chmod(0o644)
        async with Store.open(where):
            assert {mode(path) for path in tmp_path.iterdir()} == {0o600}
    assert [record.getMessage() for record in caplog.records] == [
        f"{where} was readable by other users (mode 644); it is now its owner's alone (600)"
    ]


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("kind", ["text", "database"])
async def test_a_file_of_another_program_keeps_its_mode(tmp_path, kind, create):
    where = tmp_path / "others.db"
    if kind == "text":
        where.write_text("a file that somebody named by mistake, and that others read")
    else:
        with closing(sqlite3.connect(where)) as connection:
            connection.execute("CREATE TABLE theirs (name TEXT)")
    where.chmod(0o644)
    with pytest.raises(StoreError):
        async with Store.open(where, create=create):
            pass
    assert mode(where) == 0o644


async def test_a_wider_file_of_another_user_is_refused_for_secrets_only(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    where = tmp_path / "runs.db"
    async with Store.open(where) as store:
        await store.create_run({}, id="run_a")
    where.chmod(0o640)
    os.chown(where, 12345, 12345)
    async with Store.open(where) as store:
        assert len(await store.list_runs()) == 1
    with pytest.raises(StoreError, match="mode 640"):
        async with Store.open(where, private=True):
            pass
    assert mode(where) == 0o640


async def test_a_failure_to_open_reaches_every_writer(tmp_path):
    where = tmp_path / "runs.db"
    where.write_text("no database " * 100)
    database = SQLite(where)
    async with asyncio.timeout(20):
        works = [database.write(lambda connection: connection.execute(text("SELECT 1"))) for _ in range(3)]
        results = await asyncio.gather(*works, return_exceptions=True)
        later = (await asyncio.gather(database.write(lambda _: None), return_exceptions=True))[0]
        read = (
            await asyncio.gather(
                database.read(lambda c: c.execute(text("SELECT * FROM sqlite_master"))), return_exceptions=True
            )
        )[0]
        for error in (*results, later, read):
            assert isinstance(error, StoreError) and "file is not a database" in str(error), error
        await database.aclose()


async def test_a_writer_goes_on_once_its_file_can_be_opened(tmp_path):
    where = tmp_path / "runs.db"
    where.write_text("no database " * 100)
    database = SQLite(where)
    with pytest.raises(StoreError):
        await database.write(lambda connection: None)
    where.write_bytes(b"")
    assert await database.write(lambda connection: connection.execute(text("SELECT 7")).scalar()) == 7
    await database.aclose()


async def test_nothing_is_written_to_a_file_that_was_removed_or_replaced(tmp_path):
    """It would be kept until the process ends and no longer."""
    where, aside = tmp_path / "runs.db", tmp_path / "aside.db"
    async with Store.open(where) as store:
        await store.event(Event(at=1.0, name="before"))
        where.rename(aside)
        with pytest.raises(StoreError, match=r"no store at .*runs\.db"):
            await store.get_rollout("r")
        for _ in range(2):
            with pytest.raises(StoreError, match=r"runs\.db was removed or replaced while it was in use"):
                await store.event(Event(at=2.0, name="nowhere"))
            where.write_bytes(b"")
        aside.rename(where)
        await store.event(Event(at=3.0, name="after"))
    async with Store.open(where) as store:
        assert [stored.event.name for stored in await store.events()] == ["before", "after"]


async def test_a_backup_holds_what_is_only_in_the_log_yet(tmp_path):
    """A store in use is restored from as it stands: its `-wal` file is read too."""
    async with Store.open(tmp_path / "runs.db") as store:
        await store.event(Event(at=1.0, name="n", run_id="r"))
        await Store.restore(tmp_path / "runs.db", tmp_path / "copy.db")
    async with Store.open(tmp_path / "copy.db", create=False) as store:
        assert [stored.event.name for stored in await store.events(run_id="r")] == ["n"]


async def test_a_restore_goes_over_nothing_that_is_there(tmp_path):
    async with Store.open(tmp_path / "runs.db") as store:
        await store.create_run({}, id="run_a")
        await store.backup(tmp_path / "copy.db")
        with pytest.raises(ConfigError, match="exists"):
            await store.backup(tmp_path / "copy.db")
    (tmp_path / "new.db-wal").write_text("of another store")
    for target in ("runs.db", "new.db"):
        with pytest.raises(ConfigError, match="exists"):
            await Store.restore(tmp_path / "copy.db", tmp_path / target)
    assert not (tmp_path / "new.db").exists()


async def test_a_damaged_backup_is_not_restored(tmp_path):
    async with Store.open(tmp_path / "runs.db") as store:
        for number in range(200):
            await store.event(Event(at=1.0, name="n" * 500, run_id="r", fields={"n": number}))
        await store.backup(tmp_path / "copy.db")
    whole = (tmp_path / "copy.db").read_bytes()
    (tmp_path / "copy.db").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError, match=r"copy\.db"):
        await Store.restore(tmp_path / "copy.db", tmp_path / "new.db")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.db", "runs.db"]


async def test_names_with_odd_characters_are_files_like_others(tmp_path):
    where = tmp_path / "a?b#c%20 d.db"
    async with Store.open(where) as store:
        await store.create_run({}, id="run_a")
    assert [path.name for path in tmp_path.iterdir()] == [where.name]


async def test_reading_makes_no_tables_in_a_database_that_has_none(tmp_path):
    with sqlite3.connect(tmp_path / "other.db") as raw:
        raw.execute("CREATE TABLE cookies (name)")
    raw.close()
    for create in (False, True):
        with pytest.raises(StoreError, match=r"other\.db"):
            async with Store.open(tmp_path / "other.db", create=create) as store:
                await store.create_run({}, id="run_a")
    with sqlite3.connect(tmp_path / "other.db") as raw:
        assert [row[0] for row in raw.execute("SELECT name FROM sqlite_master")] == ["cookies"]
    raw.close()


async def test_a_write_waits_while_another_process_has_the_lock(tmp_path):
    path = tmp_path / "runs.db"
    async with Store.open(path) as store:
        await store.create_run({}, id="first")
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        writing = asyncio.create_task(store.create_run({}, id="second"))
        await asyncio.wait([writing], timeout=0.05)
        assert not writing.done()
        other.execute("COMMIT")
        other.close()
        await writing
        assert (await store.get_run("second")).id == "second"


def test_after_a_commit_that_failed_the_next_write_is_judged_by_itself(tmp_path):
    """A full disk is met at the commit. Here the size of a file is at its limit, until there is room again."""
    writer = SQLiteWriter(
        tmp_path / "runs.db", set_up=lambda connection: connection.execute(text("CREATE TABLE t (x)"))
    )
    add = text("INSERT INTO t VALUES (randomblob(100000))")
    assert writer.run([lambda connection: connection.execute(add).rowcount]) == [1]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "runs.db-wal").stat().st_size + 4096, hard))
    try:
        refused = [writer.run([lambda connection: connection.execute(add).rowcount])[0] for _ in range(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    written = writer.run([lambda connection: connection.execute(add).rowcount])
    writer.close()
    assert [type(one.__cause__).__name__ for one in refused] == ["OperationalError"] * 2 and written == [1], refused
