"""The store as a call log: the shipped suite on both databases, and what only this one promises."""

import asyncio
import hashlib

import msgspec
import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, Engine, event, select

from rollyard.core.call import Reply, ids
from rollyard.core.delta import Delta
from rollyard.core.errors import ConfigError, SessionClosed
from rollyard.core.message import Message, Text
from rollyard.core.protocols import SessionRecord
from rollyard.core.rollout import Rollout
from rollyard.core.task import Task
from rollyard.store import Store, batches
from rollyard.store.batches import Batch, Batches
from rollyard.store.calls import CommitCall
from rollyard.store.check import check_run
from rollyard.store.schema import calls
from rollyard.testing.call_log import cases, commit_all, conversation
from rollyard.testing.pytest_adapter import conformance, hold
from rollyard.testing.suite import run_case

pytestmark = pytest.mark.anyio


@conformance(cases())
async def test_the_store_is_a_call_log(case, store):
    hold(await run_case(case, store))


async def test_a_message_that_comes_again_in_another_sequence_is_kept_once(store):
    t, added = conversation("r1", 4)
    again = msgspec.structs.replace(added[-1][1], id="again", tools=(), tools_digest=b"other", raw=b"")
    forked = t.add(
        again, Reply(message=Message("assistant", (Text("x"),)), prompt_ids=ids([9]), completion_ids=ids([9]))
    )
    assert len(forked.nodes) == 9
    await commit_all(store, [*added, (forked, again)])
    packed = await store.database.read(lambda connection: connection.execute(select(calls.c.nodes)).scalars().all())
    kept = [node for nodes in packed for node in msgspec.msgpack.decode(nodes)]
    assert len(kept) == 9 + 9 and sum(node[5] is not None for node in kept) == 9 + 1  # messages
    assert (await store.trajectory("r1")).nodes == t.nodes


async def test_calls_that_are_kept_together_are_refused_one_by_one(store):
    told = {name: conversation(name, 1)[1][0][0] for name in ("open", "closed", "other")}
    for name in told:
        await store.save_session(SessionRecord(rollout_id=name, key_hash=name.encode(), created_at=1.0))
    await store.close_session("closed", 2.0)
    works = [store.commit(added.record, added.nodes, added.blobs) for added in told.values()]
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), SessionClosed, type(None)]
    assert "rollout closed is closed" in str(outcomes[1])
    assert [len((await store.load_calls(name))[0]) for name in told] == [1, 0, 1]


async def test_a_body_that_two_calls_bring_is_read_as_the_first_brought_it(tmp_path):
    """The second may be a difference from what builds on the first: read instead, neither could be."""
    a, b = (hashlib.sha256(body).digest() for body in (b"a" * 100, b"b" * 100))
    record = conversation("r", 1)[1][0][0].record
    records = [replace(record, id=f"call{n}", seq=n, raw_request=digest) for n, digest in enumerate((a, b, a))]
    brought = [{a: b"a" * 100}, {b: Delta(a, (b"b" * 100,))}, {a: Delta(b, (b"a" * 100,))}]
    async with Store.open(tmp_path / "runs.db") as store:
        await asyncio.gather(*(store.commit(record, (), blobs) for record, blobs in zip(records, brought, strict=True)))
        async with asyncio.timeout(30):
            for own in (None, await store.load_own_bodies("r")):
                assert [await store.load_blob(digest, "r", own) for digest in (a, b)] == [b"a" * 100, b"b" * 100]


async def test_a_check_of_a_run_reads_the_bodies_of_a_long_rollout_once(tmp_path):
    """Sought one by one, each costs a look at every call before it: a minute for a rollout of 1,500 calls."""
    read = list[str]()
    async with Store.open(tmp_path / "runs.db") as store:
        _, added = conversation("r1", 40, pad=5000)
        await store.create_run({}, id="run1")
        await commit_all(store, added)
        await store.commit_rollout(Rollout(id="r1", run_id="run1", task=Task(id="t", instruction="x"), calls=40))
    async with Store.open(tmp_path / "runs.db") as store:
        event.listen(Engine, "before_cursor_execute", count := lambda *args: read.append(args[2]))
        try:
            found = await check_run(store, "run1")
        finally:
            event.remove(Engine, "before_cursor_execute", count)
    assert found.ok and sum("calls.bodies" in statement for statement in read) == 1


class _Patient:
    """A write that may wait for an hour."""

    gather_s = 3600.0

    def __init__(self) -> None:
        self.done = False

    def __call__(self, connection: Connection) -> None:
        self.done = True


async def test_a_write_that_may_wait_is_taken_along_by_one_that_may_not(tmp_path):
    works = [_Patient() for _ in range(20)]
    async with Store.open(tmp_path / "runs.db") as store, asyncio.timeout(60):
        for number, work in enumerate(works):  # each right after another write: that is load, so it waits
            await store.put_blob(b"before")
            await asyncio.gather(store.database.write(work), store.put_blob(b"%d" % number))
    assert all(work.done for work in works)


class _Taken:
    """What gathers, and the batches that it handed in; each is answered when the test says so."""

    def __init__(self) -> None:
        self.batches = Batches(self._take)
        self.sizes: list[int] = []
        self.waiting: list[Batch] = []

    def _take(self, batch: Batch) -> None:
        self.sizes.append(len(batch.works))
        self.waiting.append(batch)

    async def answer(self) -> None:
        while not self.waiting:
            await asyncio.sleep(0.001)
        batch = self.waiting.pop()
        batch.resolve([None] * len(batch.works))

    async def write(self, count: int) -> None:
        """Together, and answered."""
        writes = asyncio.gather(*(self.batches.write(_Patient.__call__) for _ in range(count)))
        await self.answer()
        await writes


async def test_one_caller_after_the_other_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(batches, "QUIET_S", 3600.0)
    monkeypatch.setattr(batches, "GATHER_S", 3600.0)
    monkeypatch.setattr(batches, "BUSY_S", 3600.0)
    taken = _Taken()
    async with asyncio.timeout(60):
        for _ in range(50):
            await taken.write(1)
    assert taken.sizes == [1] * 50


@pytest.mark.parametrize("endless", ["GATHER_S", "QUIET_S"])
async def test_callers_that_write_at_once_are_gathered_until_none_comes_or_for_some_milliseconds(monkeypatch, endless):
    monkeypatch.setattr(batches, endless, 3600.0)
    monkeypatch.setattr(batches, "BUSY_S", 3600.0)
    taken = _Taken()
    async with asyncio.timeout(60):
        await taken.write(2)
        for _ in range(20):
            await taken.write(8)
    assert taken.sizes == [2] + [8] * 20


async def test_what_comes_before_another_is_answered_waits_for_more(monkeypatch):
    """It would go alone for ever, each time before the next."""
    monkeypatch.setattr(batches, "QUIET_S", 0.5)
    monkeypatch.setattr(batches, "GATHER_S", 0.5)
    monkeypatch.setattr(batches, "BUSY_S", 3600.0)
    taken = _Taken()
    async with asyncio.timeout(60):
        await taken.write(1)
        first = asyncio.ensure_future(taken.batches.write(_Patient.__call__))
        while not taken.waiting:
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(taken.batches.write(_Patient.__call__))
        await asyncio.sleep(0)
        third = asyncio.ensure_future(taken.batches.write(_Patient.__call__))
        await taken.answer()
        await taken.answer()
        await asyncio.gather(first, second, third)
    assert taken.sizes == [1, 1, 2]


def test_a_call_waits_for_others_a_small_part_of_the_time_that_it_took():
    record = replace(conversation("r1", 1)[1][0][0].record, received_at=1000.0)
    took = {0.1: 0.005, 0.5: 0.025, 60.0: 0.03}
    found = {s: CommitCall(replace(record, finished_at=1000.0 + s), (), {}).gather_s for s in took}
    assert found == pytest.approx(took, rel=1e-6)
    assert CommitCall(replace(record, finished_at=None), (), {}).gather_s <= 0.0


async def test_places_that_cannot_hold_a_store_are_refused(tmp_path):
    for where in (":memory:", "redis://x", tmp_path / "no" / "runs.db"):
        with pytest.raises(ConfigError):
            async with Store.open(where):
                pass


async def test_a_model_name_with_a_nul_is_kept_as_it_was(store):
    """An agent may ask for any name, and PostgreSQL's texts have no NUL."""
    trajectory, added = conversation("r1", 1)
    (one, _) = added[0]
    record = msgspec.structs.replace(one.record, model_requested="m\0x", model_served=None)
    await store.commit(record, one.nodes, one.blobs)
    assert (await store.load_calls("r1"))[0] == [record]
