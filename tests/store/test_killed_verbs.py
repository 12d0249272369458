"""A pruning or an export that is killed loses nothing and leaves nothing half done; the same again finishes it."""

import asyncio
import time

import pytest
from sqlalchemy import text

from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.store import Store
from rollyard.store.check import check_run
from rollyard.store.exports import export
from rollyard.store.prune import prune
from tests.store.builders import keep
from tests.store.killed_process import die_inside, start

pytestmark = pytest.mark.anyio

# Rollouts with calls in each run; rollouts with a file in the old one, more than one transaction takes
SMALL, LARGE = (2, 210)
# By start of the process: its transaction in which it is killed. The first of rollouts, the next of them, the one that finds
# none left, that of the run, that of bodies, and that of bodies once more.
KILLED_IN = (1, 2, 2, 2, 3, 1)
TABLES = ("calls", "verdicts", "artifacts", "texts")


async def fill(where):
    old = time.time() - 40 * 86400
    for run, clock in (("run_old", lambda: old), ("run_young", time.time)):
        async with Store.open(where, clock=clock) as store:
            await store.create_run({}, id=run)
            for n in range(SMALL):
                await keep(store, f"ro_{run}_{n}", run_id=run)
    async with Store.open(where) as store:
        task = Task(id="t", instruction="x")
        made = (
            Rollout(id=f"ro_x{n:03}", run_id="run_old", task=task, verdict=Verdict(reward=1.0), files={"f": b"%d" % n})
            for n in range(LARGE)
        )
        for group in zip(*[made] * 10, strict=True):
            await asyncio.gather(*map(store.commit_rollout, group))


async def look(store):
    """Rollouts that are there, once each of them is seen to be whole and nothing to be of any other."""
    ids = set(await store.database.read(lambda c: c.execute(text("SELECT id FROM rollouts")).scalars().all()))
    for table in TABLES:
        query = text(f"SELECT DISTINCT rollout_id FROM {table}")  # noqa: S608
        assert set(await store.database.read(lambda c, q=query: c.execute(q).scalars().all())) <= ids
    for one in sorted(ids)[::40] + [one for one in ids if "_run_" in one]:
        found = await store.get_rollout(one)
        assert found.files or found.calls == len(found.trajectory.records) > 0
    return ids


async def test_a_pruning_that_is_killed_in_any_transaction_goes_on_where_it_was(store_url):
    await fill(store_url)
    async with Store.open(store_url) as store:
        seen = [len(await look(store))]
        for number in KILLED_IN:
            assert die_inside(start("prune", store_url), number)
            assert (await check_run(store, "run_young")).ok
            seen.append(len(await look(store)))
        whole = LARGE + 2 * SMALL
        assert seen == [whole, whole, whole - 200, SMALL, SMALL, SMALL, SMALL]
        done = await prune(store, before=time.time() - 86400)
        assert (done.runs, done.left) == ((), None)
        assert await look(store) == {f"ro_run_young_{n}" for n in range(SMALL)}
        assert await store.sweep() == 0
        used = await store.database.read(lambda c: c.execute(text("SELECT count(*) FROM blobs")).scalar())
        assert used < LARGE  # the files are gone
        assert (await check_run(store, "run_young")).ok


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
async def test_an_export_that_is_killed_leaves_the_file_of_before_and_the_next_is_whole(tmp_path, suffix):
    where, out = str(tmp_path / "runs.db"), tmp_path / f"out.{suffix}"
    await fill(where)
    async with Store.open(where) as store:
        await export(store, "run_old", out)
        whole = out.read_bytes()
        out.write_bytes(b"of before")
        for number in (2, 3, 4):
            assert die_inside(start("export", where, str(out)), number)
            assert out.read_bytes() == b"of before"
            left = {part.name.split(".")[-2] for part in tmp_path.glob(".out*.part")}
            assert len(left) <= 1  # what the process before left is gone
        await export(store, "run_old", out)
    assert out.read_bytes() == whole
    assert not list(tmp_path.glob(".out*.part"))


@pytest.mark.parametrize("verb", ["backup", "restore"])
async def test_a_backup_or_restore_that_is_killed_leaves_nothing_under_the_name_and_the_next_clears_the_rest(
    tmp_path, verb
):
    where, out = tmp_path / "runs.db", tmp_path / "new.db"
    await fill(str(where))
    for _ in range(2):
        assert die_inside(start(verb, str(where), str(out)), 1)
        assert not out.exists()
        assert len({part.name.removesuffix("-journal") for part in tmp_path.glob(".new*")}) == 1
    if verb == "restore":
        await Store.restore(where, out)
    else:
        async with Store.open(where) as store:
            await store.backup(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.db", "runs.db"]
    async with Store.open(out, create=False) as store:
        assert len(await look(store)) == LARGE + 2 * SMALL
