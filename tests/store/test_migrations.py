"""A database that went through every migration has the schema of a new one."""

import asyncio
import sqlite3
import subprocess
import sys
from contextlib import asynccontextmanager, closing

import asyncpg
import msgspec
import pytest
from sqlalchemy import inspect, text

from rollyard.core.errors import StoreError
from rollyard.store import Store, batches, migrate, postgres
from rollyard.store.migrate import upgrade
from rollyard.store.schema import HEAD, WORDS, metadata
from rollyard.store.store import open_database
from rollyard.testing.call_log import commit_all, conversation
from tests.waiting import until

pytestmark = pytest.mark.anyio


def two_tables(connection):
    """The statements that undo 0014."""
    kind = "BLOB" if connection.dialect.name == "sqlite" else "BYTEA"
    return [
        "CREATE TABLE nodes (rollout_id VARCHAR NOT NULL, id INTEGER NOT NULL, parent INTEGER, call_id VARCHAR, "
        f"role VARCHAR NOT NULL, sampled BOOLEAN NOT NULL, same_as INTEGER, message {kind}, ids {kind}, logprobs {kind}, "
        f"rest {kind}, PRIMARY KEY (rollout_id, id))",
        "ALTER TABLE calls DROP COLUMN nodes",
        "ALTER TABLE calls DROP COLUMN bodies",
    ]


def described(connection):
    """Tables, columns, keys and indexes as the database reports them."""
    found = inspect(connection)
    tables = {}
    for name in sorted(found.get_table_names()):
        columns = [(c["name"], str(c["type"]), c["nullable"]) for c in found.get_columns(name)]
        key = found.get_pk_constraint(name)["constrained_columns"]
        indexes = sorted((i["name"], i["column_names"], i["unique"]) for i in found.get_indexes(name))
        unique = sorted((u["name"] or "", u["column_names"]) for u in found.get_unique_constraints(name))
        tables[name] = (columns, key, indexes, unique, _is_clustered(connection, name))
    return tables


def _is_clustered(connection, name):
    """Whether rows lie inside the key's tree (SQLite)."""
    if connection.dialect.name != "sqlite":
        return False
    made = connection.execute(text("SELECT sql FROM sqlite_master WHERE name = :name"), {"name": name}).scalar()
    return "WITHOUT ROWID" in made


async def test_a_migrated_database_is_a_new_one(store_url):
    database = open_database(store_url, "normal")
    try:
        await database.prepare(lambda connection: upgrade(connection, None))
        migrated = await database.read(described)
        version = await database.read(lambda c: c.execute(text("SELECT version_num FROM alembic_version")).scalar())
        assert version == HEAD
        await database.prepare(
            lambda c: [c.execute(text(f"DROP TABLE {t}")) for t in [*metadata.tables, "alembic_version", *_words(c)]]
        )
    finally:
        await database.aclose()
    async with Store.open(store_url) as store:
        new = await store.database.read(described)
    assert migrated == new
    assert {name for name in new if not name.startswith(WORDS)} == {*metadata.tables, "alembic_version"}


def _words(connection):
    """SQLite's full-text index is a table beside its tables."""
    return [WORDS] if connection.dialect.name == "sqlite" else []


async def test_calls_of_an_older_database_are_kept(tmp_path):
    columns = "rollout_id, seq, id, kind, edge, model, capture, received_at, record"

    def make_old(connection):
        made = connection.execute(text("SELECT sql FROM sqlite_master WHERE name = 'calls'")).scalar()
        rows = [f"('r1', {seq}, 'c{seq}', 'agent', 'root', 'm', 'none', 1.0, x'80')" for seq in (1, 0)]
        for statement in (
            "DROP TABLE calls",
            f"{made} WITHOUT ROWID",
            f"INSERT INTO calls ({columns}) VALUES {', '.join(rows)}",
            *two_tables(connection),
            "ALTER TABLE attempts DROP COLUMN image",
            "ALTER TABLE attempts DROP COLUMN gpus",
            "DROP INDEX texts_kept",
            "UPDATE alembic_version SET version_num = '0010'",
        ):
            connection.execute(text(statement))

    async with Store.open(tmp_path / "old.db") as store:
        await store.database.write(make_old)
    async with Store.open(tmp_path / "old.db", create=False) as store:
        assert not await store.database.read(lambda connection: _is_clustered(connection, "calls"))
        kept = await store.database.read(lambda c: c.execute(text(f"SELECT {columns} FROM calls ORDER BY seq")).all())
    assert [row.id for row in kept] == ["c0", "c1"] and kept[0].record == b"\x80"


def split_rows(connection, rollouts):
    """What 0013 kept of calls: a row for each node, and all bodies by their digest."""
    packed, encode = msgspec.msgpack.decode, msgspec.msgpack.encode
    put_node = text(
        "INSERT INTO nodes VALUES (:r, :id, :parent, :call, :role, :sampled, :same, :message, :ids, :lp, :rest)"
    )
    put_body = text("INSERT INTO blobs VALUES (:digest, :size, :encoding, :data) ON CONFLICT DO NOTHING")
    rows = connection.execute(text("SELECT rollout_id, nodes, bodies FROM calls ORDER BY rollout_id, seq")).all()
    for statement in (*two_tables(connection), "UPDATE alembic_version SET version_num = '0013'"):
        connection.execute(text(statement))
    for rollout_id, nodes, bodies in rows:
        assert rollout_id in rollouts
        for id, parent, call, sampled, same, message, ids, logprobs, rest in packed(nodes):
            values = {"r": rollout_id, "id": id, "parent": parent, "call": call, "sampled": sampled, "same": same}
            values |= {"role": "x", "message": message and encode(message), "ids": ids, "lp": logprobs}
            connection.execute(put_node, values | {"rest": rest and encode(rest)})
        for digest, data in packed(bodies):
            whole = isinstance(data, bytes)
            row = {"digest": digest, "encoding": "raw" if whole else "delta", "data": data if whole else encode(data)}
            connection.execute(put_body, row | {"size": 1})


async def test_rollouts_whose_nodes_and_bodies_had_tables_of_their_own_are_read_and_go_on(store_url):
    talks = {name: conversation(name, 9, pad=5000) for name in (f"r{n}" for n in range(50))}
    async with Store.open(store_url) as store:
        await asyncio.gather(*(commit_all(store, added[:6]) for _, added in talks.values()))
        await store.database.prepare(lambda connection: split_rows(connection, talks))
    async with Store.open(store_url) as store:
        await asyncio.gather(*(commit_all(store, added[6:]) for _, added in talks.values()))
        for name, (trajectory, added) in talks.items():
            again = await store.trajectory(name)
            assert (again.nodes, again.records) == (trajectory.nodes, trajectory.records)
            assert [await store.load_blob(one.record.raw_request, name) for one, _ in added] == [
                c.raw for _, c in added
            ]


@pytest.fixture
async def old_store(store_url):
    """One of version 0013."""
    talks = {name: conversation(name, 3) for name in (f"r{n:02}" for n in range(50))}
    async with Store.open(store_url) as store:
        await asyncio.gather(*(commit_all(store, added) for _, added in talks.values()))
        await store.database.prepare(lambda connection: split_rows(connection, talks))
    return store_url


@asynccontextmanager
async def locked_calls(store_url):
    """As another process has them that is at work."""
    if store_url.startswith("postgresql"):
        connection = await asyncpg.connect(store_url)
        async with connection.transaction():
            await connection.execute("LOCK TABLE calls IN ACCESS SHARE MODE")
            yield
        await connection.close()
    else:
        with closing(sqlite3.connect(store_url, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield


@pytest.fixture
def impatient(monkeypatch):
    """A write may take 4 s, and who waits for a migration is told of it 20 times a second."""
    monkeypatch.setattr(postgres, "DEADLINE_S", 4.0)
    monkeypatch.setattr(batches, "DEADLINE_S", 4.0)
    for name in ("TELL_FIRST_S", "TELL_EVERY_S"):
        monkeypatch.setattr(migrate, name, 0.05)


async def test_several_that_open_an_old_store_wait_as_long_as_one_of_them_migrates_it(old_store, impatient, caplog):
    async def open_store():
        async with Store.open(old_store) as store:
            return len((await store.load_calls("r07"))[0])

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        async with locked_calls(old_store):
            opening = [group.create_task(open_store()) for _ in range(3)]
            await until(lambda: len(caplog.records) > 3 * 100 or any(task.done() for task in opening))
    assert [task.result() for task in opening] == [3] * 3
    assert "waiting for the process that migrates it" in caplog.text


async def test_a_migration_that_is_broken_off_leaves_the_old_version(old_store, impatient, caplog):
    async def open_store():
        async with Store.open(old_store):
            pass

    async def break_off():
        opening = asyncio.create_task(open_store())
        await until(lambda: len(caplog.records) > 3)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    async with asyncio.timeout(60), locked_calls(old_store):
        await asyncio.to_thread(asyncio.run, break_off())  # which waits for the threads of its loop
    assert await version_of(old_store) == "0013"


async def test_a_long_statement_of_a_migration_ends_with_the_task_that_waits_for_it(tmp_path):
    path = tmp_path / "runs.db"
    async with Store.open(path) as store:
        await store.create_run({}, id="run1")
    database, began, loop = open_database(str(path), "normal"), asyncio.Event(), asyncio.get_running_loop()

    def count_for_ever(connection):
        connection.execute(text("DELETE FROM runs"))
        loop.call_soon_threadsafe(began.set)
        counted = f"SELECT i + 1 FROM n WHERE i < {10**15}"
        connection.execute(text(f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL {counted}) SELECT count(*) FROM n"))

    alteration = asyncio.create_task(database.alter(count_for_ever))
    await began.wait()
    alteration.cancel()
    with pytest.raises(asyncio.CancelledError):
        await alteration
    await database.aclose()
    async with asyncio.timeout(60), Store.open(path) as store:  # the lock is free again
        await store.put_blob(b"x")
        assert [run.id for run in await store.list_runs()] == ["run1"]


@pytest.mark.parametrize("rollouts", [1, 25, 49])
async def test_a_process_that_is_killed_while_it_migrates_leaves_the_old_version(old_store, rollouts):
    dying = (
        "import asyncio, os, sys\nfrom rollyard.store import Store, migrate\n"
        "def add(self, count):\n    self.done += count\n    if self.done >= int(sys.argv[2]): os.kill(os.getpid(), 9)\n"
        "migrate.MigrationProgress.add = add\n"
        "async def main():\n    async with Store.open(sys.argv[1]): pass\nasyncio.run(main())"
    )
    words = [sys.executable, "-c", dying, old_store, str(3 * rollouts)]
    assert (await asyncio.to_thread(subprocess.run, words)).returncode == -9
    assert await version_of(old_store) == "0013"
    async with Store.open(old_store) as store:
        assert [len((await store.load_calls(f"r{n:02}"))[0]) for n in range(50)] == [3] * 50


async def version_of(store_url):
    database = open_database(store_url, "normal")
    try:
        return await database.read(migrate.current)
    finally:
        await database.aclose()


async def test_opening_twice_keeps_everything(store_url):
    async with Store.open(store_url) as store:
        await store.create_run({"a": 1}, id="run1")
    async with Store.open(store_url) as store:
        assert (await store.get_run("run1")).config == {"a": 1}


async def test_a_database_from_the_future_is_refused(store_url):
    async with Store.open(store_url) as store:
        await store.database.write(lambda c: c.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    with pytest.raises(StoreError, match="newer"):
        async with Store.open(store_url):
            pass


async def test_rollouts_of_an_older_database_are_listed_with_what_their_bodies_say(store_url):
    from rollyard.core.rollout import Failure, MergeCounts, Rollout
    from rollyard.core.task import Task
    from rollyard.store.values import row_of

    lost = Failure(
        boundary="agent", cause="AgentGone", message="", stage="wait", retry=False, grade=False, trainable=False
    )
    old = Rollout(
        id="ro1", task=Task(id="t", instruction="x"), run_id="r", labels={"policy": "small"}, failure=lost,
        usage={"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 2},
        merged=MergeCounts(calls=4, rows=2, call_tokens=90, row_tokens=60, tree_tokens=50),
    )  # fmt: skip
    undo = ["DROP INDEX IF EXISTS rollouts_lines", "UPDATE alembic_version SET version_num = '0002'"]
    undo += ["DROP INDEX sessions_of_attempt", "DROP TABLE pauses", "DROP TABLE seats"]
    undo += [f"ALTER TABLE sessions DROP COLUMN {name}" for name in ("attempt_id", "fence")]
    undo += [
        f"ALTER TABLE rollouts DROP COLUMN {name}" for name in ("policy", "cause", "prompt_tokens", "completion_tokens")
    ]
    undo += ["DROP INDEX plane_instances_of_rollout", "DROP INDEX plane_instances_changed"]  # what came after it
    undo += [f"DROP TABLE {name}" for name in ("plane_pools", "plane_blobs", "plane_owned", "plane_records")]
    undo += [f"ALTER TABLE plane_owners DROP COLUMN {name}" for name in ("rate", "next_at")]
    undo += ["ALTER TABLE plane_instances DROP COLUMN rollout_id", "ALTER TABLE plane_envs DROP COLUMN owner"]
    undo += [f"DROP TABLE {name}" for name in ("texts", "notes", "jobs")]
    undo += [f"ALTER TABLE attempts DROP COLUMN {name}" for name in ("image", "gpus")]
    later = ("cached_tokens", "merged_calls", "merged_rows", "call_tokens", "row_tokens", "tree_tokens")
    undo += [f"ALTER TABLE rollouts DROP COLUMN {name}" for name in later]
    async with Store.open(store_url) as store:
        await store.commit_rollout(old)
        gone = [*undo, f"DROP TABLE {WORDS}"] if store.database.kind == "sqlite" else undo
        await store.database.prepare(lambda c: [c.execute(text(statement)) for statement in [*gone, *two_tables(c)]])
    async with Store.open(store_url) as store:
        (line,) = await store.lines("r")
    assert (line.policy, line.cause, line.prompt_tokens, line.completion_tokens) == ("small", "AgentGone", 7, 3)
    assert line == row_of(old)
