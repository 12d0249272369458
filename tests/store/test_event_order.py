"""Readers that follow events by number get each of them once and in order, while transactions end in any other order."""

import asyncio
from contextlib import asynccontextmanager

import asyncpg
import pytest

from rollyard.core.events import Event
from rollyard.store import Store

pytestmark = pytest.mark.anyio
INSERT = "INSERT INTO events (at, name, run_id, fields) VALUES (1, $1, $2, '{}')"


@asynccontextmanager
async def appending(url, *names, run_id="run1"):
    """A transaction that has drawn its numbers and has not ended."""
    connection = await asyncpg.connect(url)
    transaction = connection.transaction()
    await transaction.start()
    try:
        for name in names:
            await connection.execute(INSERT, name, run_id)
        yield transaction
    finally:
        await connection.close()


def names(found):
    return [stored.event.name for stored in found]


async def test_an_event_that_was_numbered_before_and_commits_after_another_is_not_missed(postgres_url):
    async with Store.open(postgres_url) as store, Store.open(postgres_url) as reader:
        await store.event(Event(at=1.0, name="start", run_id="run1"))
        first = await reader.events(after=0)
        async with appending(postgres_url, "slow", "slower", run_id="run2") as slow:
            await store.event(Event(at=2.0, name="fast", run_id="run1"))  # waits for nobody
            assert names(await reader.events()) == ["start", "fast"]
            assert names(await reader.events(run_id="run1", after=first[-1].seq)) == []
            assert await reader.has_more_events("run1", after=first[-1].seq)
            latest = asyncio.create_task(store.latest_event())
            await asyncio.wait([latest], timeout=0.2)
            assert not latest.done()
            await slow.commit()
        assert names(await reader.events(after=first[-1].seq)) == ["slow", "slower", "fast"]
        assert names(await reader.events(run_id="run1", after=first[-1].seq)) == ["fast"]
        last = await asyncio.wait_for(latest, 10)
        assert await store.events(after=last) == [] and not await store.has_more_events("run1", after=last)


async def test_numbers_that_were_rolled_back_hold_up_nobody(postgres_url):
    async with Store.open(postgres_url) as store:
        async with appending(postgres_url, "never") as lost:
            await store.event(Event(at=1.0, name="one"))
            await lost.rollback()
        await store.event(Event(at=2.0, name="two"))
        assert names(await store.events(after=0)) == ["one", "two"]


async def test_a_long_transaction_that_appends_nothing_delays_no_event(postgres_url):
    """Pruning a large run is one, and so is whatever else uses the server."""
    async with Store.open(postgres_url) as store:
        await store.event(Event(at=1.0, name="one"))
        busy = await asyncpg.connect(postgres_url)
        async with busy.transaction():
            await busy.execute("DELETE FROM events")
            async with appending(postgres_url, "never") as lost:
                await store.event(Event(at=2.0, name="two"))
                await lost.rollback()
            assert names(await store.events(after=0)) == ["one", "two"]
        await busy.close()


async def test_a_reader_beside_many_writers_sees_every_event_once_and_in_order(postgres_url):
    writers, each = 8, 10
    done = asyncio.Event()

    async def write(store, n):
        run_id = f"run{n % 2}"
        for number in range(each):
            async with appending(postgres_url, f"{n}/{number}/slow", run_id=run_id) as slow:
                await store.event(*(Event(at=1.0, name=f"{n}/{number}/{part}", run_id=run_id) for part in range(2)))
                for _ in range(4):  # long enough for a reader to come by
                    await store.has_more_events(run_id, after=0)
                await (slow.commit() if number % 2 else slow.rollback())

    async def read(store, run_id):
        seen, last = [], 0
        while True:
            over = done.is_set()
            found = await store.events(run_id=run_id, after=last, limit=7)
            seen += found
            last = found[-1].seq if found else last
            if over and not found:
                return seen

    async with Store.open(postgres_url) as one, Store.open(postgres_url) as other:
        readers = [asyncio.create_task(read(store, run)) for store, run in ((one, None), (other, "run1"))]
        await asyncio.gather(*(write(one if n % 3 else other, n) for n in range(writers)))
        done.set()
        everything, of_run = await asyncio.gather(*readers)
        there = await one.events(limit=10_000)
        assert len(there) == writers * each * 5 // 2
        assert [stored.seq for stored in everything] == [stored.seq for stored in there]
        assert names(of_run) == [name for name in names(there) if int(name.partition("/")[0]) % 2]


async def test_a_transaction_that_stands_still_is_ended_by_the_server(postgres_url):
    """What a frozen process locked would keep others waiting for as long as it is frozen."""
    async with Store.open(postgres_url) as store:
        found = await store.database.read(
            lambda c: c.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar_one()
        )
        assert found == "30s"
