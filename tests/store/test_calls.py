"""The store as a call log: the shipped suite on both databases, and what only this one promises."""

import asyncio
import hashlib

import msgspec
import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, select

from rollyard.core.call import Reply, ids
from rollyard.core.delta import Delta
from rollyard.core.errors import ConfigError, SessionClosed
from rollyard.core.message import Message, Text
from rollyard.core.protocols import SessionRecord
from rollyard.store import Store, batches
from rollyard.store.batches import Batch, Batches
from rollyard.store.call_rows import SHARED_FROM
from rollyard.store.calls import CommitCall
from rollyard.store.schema import calls
from rollyard.testing.call_log import cases, commit_all, conversation
from rollyard.testing.pytest_adapter import conformance, expect_passed
from rollyard.testing.suite import run_case
from tests.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.anyio


@conformance(cases())
async def test_the_store_is_a_call_log(case, store):
    expect_passed(await run_case(case, store))


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


@pytest.mark.parametrize("size", [100, SHARED_FROM])
async def test_a_body_that_two_calls_bring_is_read_as_the_first_brought_it(tmp_path, size):
    """The second may be a difference from what builds on the first: read instead, neither could be."""
    bodies = [b"a" * size, b"b" * size]
    a, b = (hashlib.sha256(body).digest() for body in bodies)
    record = conversation("r", 1)[1][0][0].record
    records = [replace(record, id=f"call{n}", seq=n, raw_request=digest) for n, digest in enumerate((a, b, a))]
    brought = [{a: bodies[0]}, {b: Delta(a, (bodies[1],))}, {a: Delta(b, (bodies[0],))}]
    async with Store.open(tmp_path / "runs.db") as store:
        await asyncio.gather(*(store.commit(record, (), blobs) for record, blobs in zip(records, brought, strict=True)))
        async with asyncio.timeout(30):
            for own in (None, await store.load_own_bodies("r")):
                assert [await store.load_blob(digest, "r", own) for digest in (a, b)] == bodies


class _Patient:
    """A write that may wait for an hour."""

    took_s = 1e9

    def __init__(self) -> None:
        self.done = False

    def __call__(self, connection: Connection) -> None:
        self.done = True


async def test_a_write_that_may_wait_is_taken_along_by_one_that_may_not(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "NEAR", batches.GatherWait(1.0, 3600.0))
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
        writes = asyncio.gather(*(self.batches.write(_plain) for _ in range(count)))
        await self.answer()
        await writes


def _plain(_: Connection) -> None: ...


async def test_one_caller_after_the_other_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(batches, "GATHER_S", 3600.0)
    taken = _Taken()
    async with asyncio.timeout(60):
        for _ in range(50):
            await taken.write(1)
    assert taken.sizes == [1] * 50


async def test_what_comes_in_turns_of_the_loop_that_follow_each_other_is_one_batch(monkeypatch):
    monkeypatch.setattr(batches, "GATHER_S", 3600.0)
    taken = _Taken()

    async def write_later(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await taken.batches.write(_plain)

    async with asyncio.timeout(60):
        for _ in range(20):
            writes = asyncio.gather(*(write_later(turns) for turns in range(30)))
            await taken.answer()
            await writes
    assert taken.sizes == [30] * 20


async def test_writes_that_keep_coming_hold_up_no_batch_for_long(monkeypatch):
    monkeypatch.setattr(batches, "GATHER_S", 0.01)
    taken = _Taken()
    writes: list[asyncio.Future[None]] = []
    async with asyncio.timeout(60):
        while not taken.sizes:
            writes.append(asyncio.ensure_future(taken.batches.write(_plain)))
            await asyncio.sleep(0)
    for write in writes:
        write.cancel()


@pytest.mark.parametrize(("busy_s", "sizes"), [(3600.0, [1, 2]), (0.0, [1, 1, 1])])
async def test_a_slow_call_waits_for_others_only_soon_after_another_write(monkeypatch, busy_s, sizes):
    monkeypatch.setattr(batches, "BUSY_S", busy_s)
    monkeypatch.setattr(batches, "NEAR", batches.GatherWait(1.0, 3600.0))
    taken = _Taken()
    async with asyncio.timeout(60):
        await taken.write(1)
        slow = asyncio.ensure_future(taken.batches.write(_Patient()))
        for _ in range(100):
            await asyncio.sleep(0)
        other = asyncio.ensure_future(taken.batches.write(_plain))
        while not slow.done() or not other.done():
            await taken.answer()
            await asyncio.sleep(0)
    assert taken.sizes == sizes


@pytest.mark.parametrize(
    ("arrivals", "handed_in"), [((0, 4), {10: 2}), ((0, 4, 6), {6: 3}), ((0, 6, 6, 7), {6: 3, 17: 1})]
)
def test_a_slow_call_that_waited_half_of_its_time_goes_with_the_next_write(monkeypatch, arrivals, handed_in):
    monkeypatch.setattr(batches, "BUSY_S", 3600.0)
    monkeypatch.setattr(batches, "NEAR", batches.GatherWait(1.0, 10.0))

    async def gather() -> dict[float, int]:
        loop, taken = asyncio.get_running_loop(), dict[float, int]()

        def take(batch: Batch) -> None:
            if batch.works[0].work is not _plain:
                taken[loop.time()] = len(batch.works)
            batch.resolve([None] * len(batch.works))

        gathering = Batches(take)

        async def write_at(at: float) -> None:
            await asyncio.sleep(at - loop.time())
            await gathering.write(_Patient())

        await gathering.write(_plain)  # so that what follows is load
        await asyncio.gather(*map(write_at, arrivals))
        return taken

    assert run_in_virtual_time(gather()) == handed_in


def test_a_batch_that_was_handed_in_leaves_no_timer_that_wakes_the_loop(monkeypatch):
    monkeypatch.setattr(batches, "BUSY_S", 3600.0)
    monkeypatch.setattr(batches, "NEAR", batches.GatherWait(1.0, 10.0))

    async def count_timers() -> int:
        loop = asyncio.get_running_loop()
        gathering = Batches(lambda batch: batch.resolve([None] * len(batch.works)))
        await gathering.write(_plain)
        slow = asyncio.ensure_future(gathering.write(_Patient()))
        await asyncio.sleep(6)
        await asyncio.gather(slow, gathering.write(_Patient()))
        before = loop.jumps.count
        await asyncio.sleep(30)
        return loop.jumps.count - before

    assert run_in_virtual_time(count_timers()) == 1  # that of the sleep


def test_writes_that_nothing_takes_fail_after_a_minute_and_harm_nobody_when_they_are_done_later():
    async def main() -> None:
        taken, loop = _Taken(), asyncio.get_running_loop()
        writes = [asyncio.ensure_future(taken.batches.write(_plain)) for _ in range(3)]
        await asyncio.sleep(1.0)
        writes[0].cancel()  # its caller gave up
        given_up, *late = await asyncio.gather(*writes, return_exceptions=True)
        assert isinstance(given_up, asyncio.CancelledError) and 59.0 < loop.time() < 61.0
        assert [str(error) for error in late] == ["the database took no write for 60 s (is its disk full?)"] * 2
        (batch,) = taken.waiting
        batch.resolve([None] * 3)

    run_in_virtual_time(main())


def test_a_call_waits_for_others_a_small_part_of_the_time_that_it_took():
    record = replace(conversation("r1", 1)[1][0][0].record, received_at=1000.0)
    commits = {s: CommitCall(replace(record, finished_at=1000.0 + s), (), {}) for s in (0.1, 0.5, 60.0)}
    near = {s: batches.NEAR.wait_s(commit) for s, commit in commits.items()}
    distant = {s: batches.DISTANT.wait_s(commit) for s, commit in commits.items()}
    assert near == pytest.approx({0.1: 0.005, 0.5: 0.025, 60.0: 0.03}, rel=1e-6)
    assert distant == pytest.approx({0.1: 0.005, 0.5: 0.025, 60.0: 0.1}, rel=1e-6)
    assert batches.NEAR.wait_s(CommitCall(replace(record, finished_at=None), (), {})) == 0.0
    assert batches.NEAR.wait_s(_plain) == 0.0


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
