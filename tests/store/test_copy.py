"""A copy of a store into one of the other kind has the same rows and is as complete as a new one, also when it was killed."""

import pytest
from sqlalchemy import select, text

from rollyard.core.errors import ConfigError, StoreError
from rollyard.core.events import Event
from rollyard.store import Store
from rollyard.store.check import check_run
from rollyard.store.copy import copy_store
from rollyard.store.schema import metadata
from rollyard.store.search import index_missing
from rollyard.store.store import open_database
from tests.store.builders import keep
from tests.store.killed_process import die_inside, start

pytestmark = pytest.mark.anyio

ROLLOUTS = 7
KILLED_IN = (2, 6, 10, 10)  # by start of the process: its transaction in which it is killed; each has rows
PARTS = {  # what a store has besides its tables
    "sqlite": "SELECT name, sql FROM sqlite_master WHERE type IN ('index', 'trigger', 'table') ORDER BY name",
    "postgresql": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1",
}


@pytest.fixture(params=["sqlite to postgresql", "postgresql to sqlite"])
def two(request, tmp_path, postgres_url):
    places = (str(tmp_path / "runs.db"), postgres_url)
    return places if request.param.startswith("sqlite") else places[::-1]


async def fill(where):
    async with Store.open(where) as store:
        await store.create_run({"name": "Ünlike"}, id="run_a")
        for name in ["ro_Z", "ro_a", "ro_B", "ro_é", *(f"ro_{n}" for n in range(ROLLOUTS - 4))]:
            # Sorted otherwise elsewhere
            await keep(store, name, run_id="run_a")
            await store.event(Event(at=1.0, name="x", run_id="run_a", rollout_id=name, fields={"of": name}))
        await index_missing(store, limit=100)
        await store.add_note("ro_Z", "score", author="ann", name="taste", score=0.5)


async def every_row(where):
    async with Store.open(where, create=False) as store:
        found = {}
        for table in metadata.sorted_tables:
            if table.name != "seats":
                rows = await store.database.read(lambda c, t=table: c.execute(select(t)).all())
                found[table.name] = sorted(map(tuple, rows), key=repr)
        return found


async def count_rows(where):
    """Also of a copy that is not finished."""
    database = open_database(where, "normal")
    names = [table.name for table in metadata.sorted_tables if table.name != "seats"]
    query = text(f"SELECT {' + '.join(f'(SELECT count(*) FROM {name})' for name in names)}")  # noqa: S608
    found = await database.read(lambda connection: connection.execute(query).scalar_one())
    await database.aclose()
    return found


async def parts(where):
    async with Store.open(where, create=False) as store:
        return [tuple(row) for row in await store.database.read(lambda c: c.execute(text(PARTS[c.dialect.name])).all())]


async def test_a_copy_has_the_same_rows_and_all_that_a_new_store_has(two):
    source, target = two
    await fill(source)
    counts = await copy_store(source, target)
    rows = await every_row(source)
    assert await every_row(target) == rows
    assert counts == {name: len(of_table) for name, of_table in rows.items()}
    assert counts["calls"] > ROLLOUTS and counts["blobs"] and counts["texts"] and counts["notes"] == 1
    async with Store.open(target) as store:
        assert (await check_run(store, "run_a")).ok
        assert {one.rollout_id for one in await store.find_texts("looking")} == {row[0] for row in rows["rollouts"]}
        await keep(store, "ro_new", run_id="run_a")  # numbers go on, and what is new is found too
        await index_missing(store, limit=100)
        assert "ro_new" in {one.rollout_id for one in await store.find_texts("looking")}


async def test_a_copy_has_the_indexes_of_a_new_store(two):
    source, target = two
    async with Store.open(target) as store:
        await store.create_run({}, id="run_x")
        await store.delete_run("run_x")
    new = await parts(target)
    await fill(source)
    await copy_store(source, target)
    assert await parts(target) == new and len(new) > 10


async def test_a_copy_that_is_killed_in_any_transaction_goes_on_where_it_was(two):
    source, target = two
    await fill(source)
    assert die_inside(start("copy", source, target), 1)  # before it has changed anything
    seen = [0]
    for number in KILLED_IN:
        assert die_inside(start("copy", source, target), number)
        seen.append(await count_rows(target))
        with pytest.raises(StoreError, match="unfinished copy"):
            async with Store.open(target):
                pass
    assert seen == sorted(seen) and seen[-1] - seen[-2] > 20, seen
    finished = await copy_store(source, target)
    assert await every_row(target) == await every_row(source)
    assert sum(finished.values()) > seen[-1] > 0


async def test_an_unfinished_copy_of_another_store_is_refused(two):
    source, target = two
    await fill(source)
    assert die_inside(start("copy", source, target), 8)
    async with Store.open(source) as store:
        await store.create_run({}, id="run_later")
    with pytest.raises(ConfigError, match="before it was changed"):
        await copy_store(source, target)


async def test_a_store_with_something_in_it_is_no_target(two):
    source, target = two
    await fill(source)
    async with Store.open(target) as store:
        await store.create_run({}, id="run_theirs")
    with pytest.raises(ConfigError, match="not empty: runs"):
        await copy_store(source, target)
    async with Store.open(target) as store:
        assert await store.has_run("run_theirs")
