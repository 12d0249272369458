"""Attempts, leases with fencing numbers, and rollouts committed whole or not at all."""

import asyncio
import time

import pytest
from msgspec.structs import replace
from sqlalchemy import text

from rollyard.core.errors import ConfigError, LeaseLost, SessionClosed, StoreError, Unsupported
from rollyard.core.events import AgentEvent, Event
from rollyard.core.lease import Attempt
from rollyard.core.protocols import SessionRecord
from rollyard.core.rollout import CommandRecord, Failure, Rollout, StageRecord, Verdict
from rollyard.core.task import File, Task
from rollyard.store import Store, leases, sweep
from rollyard.store.values import RolloutQuery
from rollyard.testing.call_log import commit_all, conversation
from tests.waiting import Clock

pytestmark = pytest.mark.anyio

TASK = Task(id="fix", instruction="fix it", files=(File(path="/a", data=b"\0\xff"),), metadata={"n": 1})


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
async def store(open_store, clock):
    async with open_store(clock=clock) as store:
        yield store


def attempts(run_id, count):
    return [Attempt(id=f"{run_id}-{n}", run_id=run_id, task_id=f"t{n % 3}", agent="pi", number=n) for n in range(count)]


def rollout(id="ro1", **fields):
    base = {
        "task": TASK,
        "run_id": "run1",
        "agent": "pi",
        "started_at": 5.0,
        "verdict": Verdict(reward=0.5, grade="sealed", parts={"a": 1.0}, checks={"b": False}, log="l\0g"),
        "setup": (CommandRecord(command="make", exit_code=None, timed_out=True),),
        "stages": (StageRecord(name="launch", started_at=1.0, duration_s=2.0),),
        "events": (AgentEvent(kind="done", ok=True),),
        "files": {"out.txt": b"\0\x01out", "log": b"x" * 50_000},
        "usage": {"completion_tokens": 7},
        "calls": 3,
    }
    return Rollout(id=id, **{**base, **fields})


async def run_with(store, count):
    await store.create_run({"parallel": 4, "nested": {"a": [1, None]}}, id="run1")
    await store.add_attempts("run1", attempts("run1", count))


async def test_attempts_are_handed_out_in_order_and_once(store):
    await run_with(store, 5)
    leases = [await store.claim("run1", owner="a", ttl_s=10) for _ in range(6)]
    assert [lease.attempt.number for lease in leases[:5]] == [0, 1, 2, 3, 4]
    assert leases[5] is None
    assert {lease.fence for lease in leases[:5]} == {1}
    assert await store.progress("run1") == {"leased": 5}


async def owes(store, *needs, **fields):
    await store.create_run({}, id="run1")
    new = [
        Attempt(id=f"a{n}", run_id="run1", task_id=f"t{n}", number=n, image=image, **fields)
        for n, image in enumerate(needs)
    ]
    await store.add_attempts("run1", new)


async def claimed(store, *images, **options):
    lease = await store.claim("run1", owner="w", ttl_s=10, images=list(images), **options)
    return None if lease is None else lease.attempt.number


async def test_a_worker_is_given_first_what_its_machine_has_and_then_all_else(store):
    await owes(store, "a", "b", "a", "b", "", "b")
    assert [await claimed(store, "b") for _ in range(7)] == [1, 3, 4, 5, 0, 2, None]


async def test_what_no_machine_has_goes_to_one_that_begins_with_it(store):
    await owes(store, "a", "a", "b", "c", "a")
    assert [await claimed(store) for _ in range(5)] == [0, 2, 3, 1, 4]


async def test_an_attempt_is_overtaken_by_so_many_and_no_more(store):
    await owes(store, "a", *["b"] * (leases.AHEAD + 1))
    await store.withdraw([f"a{n}" for n in range(1, leases.AHEAD)])
    assert [await claimed(store, "b") for _ in range(3)] == [leases.AHEAD, 0, leases.AHEAD + 1]


async def test_what_needs_more_gpus_than_a_machine_has_is_left_for_others(store):
    await owes(store, "", "", gpus=2)
    assert await claimed(store, gpus=0) is None and await claimed(store, gpus=1) is None
    assert await claimed(store, gpus=2) == 0
    assert await claimed(store) == 1  # a worker that has not to leave any


async def test_a_machine_with_gpus_takes_first_what_needs_them(store):
    await store.create_run({}, id="run1")
    new = [Attempt(id=f"a{n}", run_id="run1", task_id=f"t{n}", number=n, gpus=n // 2) for n in range(3)]
    await store.add_attempts("run1", new)
    assert [await claimed(store, gpus=gpus) for gpus in (0, 1, 1)] == [0, 2, 1]


async def test_claims_at_the_same_moment_never_give_one_attempt_twice(store):
    await run_with(store, 30)
    leases = await asyncio.gather(*(store.claim("run1", owner=f"w{n}", ttl_s=10) for n in range(40)))
    numbers = [lease.attempt.number for lease in leases if lease is not None]
    assert sorted(numbers) == list(range(30))


async def test_adding_attempts_again_changes_nothing(store):
    await run_with(store, 3)
    lease = await store.claim("run1", owner="a", ttl_s=10)
    again = [Attempt(id=f"other-{n}", run_id="run1", task_id=f"t{n % 3}", agent="pi", number=n) for n in range(4)]
    await store.add_attempts("run1", again)
    assert [(a.id, a.state) for a in await store.attempts("run1")] == [
        (lease.attempt.id, "leased"),
        ("run1-1", "owed"),
        ("run1-2", "owed"),
        ("other-3", "owed"),
    ]


async def test_what_ran_out_is_taken_over_by_others_alone_and_by_the_patient_later(store, clock):
    await run_with(store, 1)
    lease = await store.claim("run1", owner="slow", ttl_s=10)
    clock.now += 11
    assert await store.claim("run1", owner="slow", ttl_s=10) is None
    assert await store.claim("run1", owner="b", ttl_s=10, grace_s=50) is None
    assert await store.reclaim("run1", grace_s=50) == 0
    lease = await store.heartbeat(lease, ttl_s=10)
    clock.now += 61
    assert (await store.claim("run1", owner="b", ttl_s=10, grace_s=50)).fence == lease.fence + 1


async def test_a_lease_that_ran_out_is_claimed_again_and_the_zombie_commits_nothing(store, clock):
    await run_with(store, 1)
    old = await store.claim("run1", owner="zombie", ttl_s=10)
    clock.now += 9
    assert await store.claim("run1", owner="b", ttl_s=10) is None
    clock.now += 2
    new = await store.claim("run1", owner="b", ttl_s=10)
    assert (new.fence, new.attempt.tries, new.owner) == (old.fence + 1, 2, "b")
    with pytest.raises(LeaseLost):
        await store.heartbeat(old, ttl_s=10)
    with pytest.raises(LeaseLost):
        await store.commit_rollout(rollout("ro-zombie"), lease=old)
    assert await store.release(old) is False
    with pytest.raises(StoreError):
        await store.get_rollout("ro-zombie")
    assert await store.verdicts("ro-zombie") == [] and await store.artifacts("ro-zombie") == []
    await store.commit_rollout(rollout("ro-b"), lease=new)
    assert await store.progress("run1") == {"done": 1}
    with pytest.raises(LeaseLost):
        await store.commit_rollout(rollout("ro-again"), lease=new)
    assert [r.id async for r in store.rollouts("run1")] == ["ro-b"]


async def test_heartbeats_keep_a_lease(store, clock):
    await run_with(store, 1)
    lease = await store.claim("run1", owner="a", ttl_s=10)
    for _ in range(5):
        clock.now += 8
        lease = await store.heartbeat(lease, ttl_s=10)
        assert lease.expires_at == clock.now + 10
        assert await store.claim("run1", owner="b", ttl_s=10) is None


async def test_a_released_attempt_is_owed_again_and_counts_its_tries(store):
    await run_with(store, 1)
    lease = await store.claim("run1", owner="a", ttl_s=10)
    assert await store.release(lease) is True
    again = await store.claim("run1", owner="a", ttl_s=10)
    assert (again.attempt.tries, again.fence) == (2, 2)
    assert [held.owner for held in await store.leases("run1")] == ["a"]
    assert await store.expire(again) is True
    assert await store.leases("run1") == []


async def test_a_failure_that_might_have_been_retried_leaves_the_attempt_failed(store):
    await run_with(store, 2)
    failure = Failure(
        boundary="sandbox",
        cause="SandboxGone",
        message="gone",
        stage="launch",
        retry=True,
        grade=False,
        trainable=False,
    )
    lease = await store.claim("run1", owner="a", ttl_s=10)
    await store.commit_rollout(rollout("ro1", failure=failure, status="infra_error", verdict=None), lease=lease)
    assert await store.progress("run1") == {"failed": 1, "owed": 1}
    (line,) = (await store.list_rollouts(RolloutQuery(run_id="run1", boundary="sandbox"))).rows
    assert (line.status, line.reward, line.boundary) == ("infra_error", None, "sandbox")


async def test_a_rollout_comes_back_whole(store):
    kept = await store.put_blob(b"artifact")
    given = rollout(artifacts={"report": kept})
    await store.commit_rollout(given)
    found = await store.get_rollout("ro1")
    assert found.trajectory.records == ()

    assert replace(found, trajectory=None) == given
    assert {(a.name, a.size) for a in await store.artifacts("ro1")} == {("out.txt", 5), ("log", 50_000), ("report", 8)}
    assert await store.get_blob(kept) == b"artifact"
    await store.add_artifacts("ro1", {"later": b"more"})
    assert len(await store.artifacts("ro1")) == 4
    assert (await store.get_rollout("ro1")).files == given.files


async def test_a_rollout_is_committed_once(store):
    await store.commit_rollout(rollout())
    with pytest.raises(StoreError):
        await store.commit_rollout(rollout(verdict=Verdict(reward=1.0)))
    assert (await store.get_rollout("ro1")).reward == 0.5
    assert len(await store.verdicts("ro1")) == 1


async def test_rescoring_adds_a_verdict_and_the_last_one_counts(store, clock):
    await store.commit_rollout(rollout())
    clock.now += 1
    await store.add_verdict("ro1", Verdict(reward=1.0))
    assert (await store.get_rollout("ro1")).reward == 1.0
    assert [(v.at, v.verdict.reward) for v in await store.verdicts("ro1")] == [(1000.0, 0.5), (1001.0, 1.0)]
    assert (await store.list_rollouts()).rows[0].reward == 1.0


async def test_rollouts_are_paged_filtered_and_sorted_by_the_database(store):
    for n in range(25):
        reward = None if n % 5 == 0 else n / 10
        await store.commit_rollout(
            rollout(f"ro{n:02}", started_at=float(-n), attempt=n, verdict=Verdict(reward=reward), agent=f"a{n % 2}")
        )
    first = await store.list_rollouts(RolloutQuery(run_id="run1", limit=10))
    assert (first.total, first.next, len(first.rows)) == (25, 10, 10)
    assert [row.attempt for row in first.rows] == list(range(24, 14, -1))
    last = await store.list_rollouts(RolloutQuery(run_id="run1", limit=10, offset=20))
    assert (last.next, len(last.rows)) == (None, 5)
    best = await store.list_rollouts(RolloutQuery(run_id="run1", sort="reward", descending=True, limit=25))
    assert [row.attempt for row in best.rows[:2]] == [24, 23]
    assert all(row.reward is None for row in best.rows[-5:])
    assert (await store.list_rollouts(RolloutQuery(agent="a1"))).total == 12
    assert (await store.list_rollouts(RolloutQuery(search="ro2"))).total == 5
    assert (await store.list_rollouts(RolloutQuery(search="%"))).total == 0
    assert (await store.list_rollouts(RolloutQuery(run_id="other"))).rows == ()


async def test_rollouts_stream_in_order_past_one_page(store):
    for n in range(150):
        await store.commit_rollout(rollout(f"ro{n:03}", files={}))
    assert [r.id async for r in store.rollouts("run1")] == [f"ro{n:03}" for n in range(150)]
    assert [r.task async for r in store.rollouts()][149] == TASK


async def test_a_run_tells_where_it_stands(store, clock):
    await run_with(store, 4)
    clock.now += 1
    await store.create_run({}, id="run2")
    for n in range(2):
        lease = await store.claim("run1", owner="a", ttl_s=10)
        await store.commit_rollout(rollout(f"ro{n}", verdict=Verdict(reward=float(n))), lease=lease)
    info = await store.get_run("run1")
    assert info.config == {"parallel": 4, "nested": {"a": [1, None]}}
    assert (info.rollouts, info.scored, info.mean_reward, info.finished) == (2, 2, 0.5, False)
    assert [run.id for run in await store.list_runs()] == ["run2", "run1"]
    with pytest.raises(StoreError):
        await store.get_run("run3")


async def test_events_are_appended_and_watched(store):
    for n in range(3):
        await store.event(Event(at=float(n), name="stage.finished", rollout_id="ro1", run_id="run1", fields={"n": n}))
    await store.event(Event(at=9.0, name="other", rollout_id="ro2"))
    found = await store.events(rollout_id="ro1")
    assert [e.event.fields["n"] for e in found] == [0, 1, 2]
    assert [e.event.name for e in await store.events(after=found[-1].seq)] == ["other"]
    seen = []

    async def watch():
        async for stored in store.watch(run_id="run1", after=found[0].seq, every_s=0.01):
            seen.append(stored.event.fields["n"])
            if len(seen) == 3:
                return

    watching = asyncio.create_task(watch())
    await store.event(Event(at=3.0, name="late", run_id="run1", fields={"n": 3}))
    await asyncio.wait_for(watching, 10)
    assert seen == [1, 2, 3]


async def test_a_reader_that_polls_by_number_misses_no_event(store):
    done = asyncio.Event()

    async def append(n):
        await store.event(Event(at=float(n), name=f"e{n}", run_id="run1"))

    async def poll():
        seen, last = [], 0
        while not done.is_set() or len(seen) < 120:
            for stored in await store.events(run_id="run1", after=last):
                seen.append(stored.event.name)
                last = stored.seq
            await asyncio.sleep(0)
        return seen

    polling = asyncio.create_task(poll())
    await asyncio.gather(*(append(n) for n in range(120)))
    done.set()
    assert sorted(await asyncio.wait_for(polling, 20)) == sorted(f"e{n}" for n in range(120))


async def test_the_start_of_an_id_is_enough_when_it_is_unique(store):
    await store.create_run({}, id="run_abc1")
    await store.create_run({}, id="run_abd2")
    await store.commit_rollout(rollout("ro_xyz"))
    assert await store.resolve("run_abc") == ("run", "run_abc1")
    assert await store.resolve("ro_") == ("rollout", "ro_xyz")
    for start in ("run_ab", "nothing", "run%"):
        with pytest.raises(StoreError):
            await store.resolve(start)


async def test_a_deleted_run_takes_its_rollouts_and_a_sweep_their_bodies(store):
    await run_with(store, 1)
    lease = await store.claim("run1", owner="a", ttl_s=10)
    with pytest.raises(StoreError):
        await store.sweep()
    await store.commit_rollout(rollout("ro1"), lease=lease)
    await store.commit_rollout(rollout("ro2", run_id="run2", files={"keep": b"kept"}))
    assert await store.delete_run("run1") == 1
    assert await store.sweep() == 2
    assert (await store.get_rollout("ro2")).files == {"keep": b"kept"}
    with pytest.raises(StoreError):
        await store.get_rollout("ro1")


async def test_a_sweep_that_a_writer_overtakes_removes_nothing(store):
    """A body that was found unused may be named by what is written before it goes."""
    await store.put_blob(b"found unused")
    write = store.database.write

    async def overtaken(work):
        store.database.write = write
        await store.commit_rollout(rollout("ro1", files={"f": b"found unused"}))
        return await write(work)

    store.database.write = overtaken
    with pytest.raises(StoreError, match="written meanwhile"):
        await store.sweep()
    assert (await store.get_rollout("ro1")).files == {"f": b"found unused"}
    assert await store.sweep() == 0


def forget_first_call(connection):
    connection.execute(text("DELETE FROM calls WHERE seq = 0"))


async def test_a_sweep_takes_several_transactions_and_keeps_what_differences_build_on(store, monkeypatch):
    monkeypatch.setattr(sweep, "AT_ONCE", 7)
    for n in range(30):
        await store.put_blob(b"unused %d" % n)
    _, added = conversation("ro1", 4, pad=20_000)
    await commit_all(store, added)
    # the body of the first request is named by no call any more, and the later ones are differences from it
    await store.database.write(forget_first_call)
    assert await store.sweep() == 30
    for one, call in added[1:]:
        assert await store.load_blob(one.record.raw_request, one.record.rollout_id) == call.raw


async def test_a_run_is_removed_in_transactions_of_a_few_rollouts_and_can_be_broken_off(store):
    """What removes a large run must not keep the others from their store meanwhile."""
    await store.create_run({}, id="run1")
    for n in range(5):
        events = [Event(at=1.0, name="committed", run_id="run1", rollout_id=f"ro{n}")]
        await store.commit_rollout(rollout(f"ro{n}"), last_events=events)
    left, write = [], store.database.write

    async def counted(work):
        done = await write(work)
        left.append((await store.list_rollouts(RolloutQuery(run_id="run1"))).total)
        if left == [3]:
            raise StoreError("the connection is gone")
        return done

    store.database.write = counted
    with pytest.raises(StoreError, match="is gone"):
        await store.delete_run("run1", at_once=2)
    assert [stored.event.rollout_id for stored in await store.events()] == ["ro2", "ro3", "ro4"]
    assert (await store.get_run("run1")).rollouts == 3
    assert await store.delete_run("run1", at_once=2) == 3
    assert left[:3] == [3, 1, 0] and await store.events() == []
    with pytest.raises(StoreError, match="no run"):
        await store.get_run("run1")


async def test_a_backup_is_a_store(store, tmp_path, request):
    await store.commit_rollout(rollout())
    copy = tmp_path / "copy.db"
    if "postgres" in request.node.name:
        with pytest.raises(Unsupported):
            await store.backup(copy)
        return
    await store.backup(copy)
    await store.commit_rollout(rollout("ro2"))
    with pytest.raises(ConfigError):
        await store.backup(copy)
    await Store.restore(copy, tmp_path / "again.db")
    async with Store.open(tmp_path / "again.db") as again:
        assert [r.id async for r in again.rollouts()] == ["ro1"]
    (tmp_path / "bad.db").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError):
        await Store.restore(tmp_path / "bad.db", tmp_path / "never.db")


async def test_a_claim_that_was_taken_over_records_no_call_no_session_and_no_event(store, clock):
    """A worker that wakes up after its lease ran out can commit nothing at all."""
    await run_with(store, 1)
    old = await store.claim("run1", owner="zombie", ttl_s=10)
    session = SessionRecord(
        rollout_id="ro-z", key_hash=b"k", created_at=1.0, attempt_id=old.attempt.id, fence=old.fence
    )
    await store.save_session(session)
    added = conversation("ro-z", 2)[1]
    await commit_all(store, added[:1])
    clock.now += 11
    new = await store.claim("run1", owner="b", ttl_s=10)
    with pytest.raises(SessionClosed):
        await commit_all(store, added[1:])
    with pytest.raises(LeaseLost):
        await store.save_session(session)
    events = [(lease, Event(at=1.0, name=lease.owner, run_id="run1")) for lease in (old, new)]
    await store.events_under(events)
    assert [stored.event.name for stored in await store.events(run_id="run1")] == ["b"]
    assert await store.sessions() == []  # a session under a claim is never gone on with


async def test_events_under_more_claims_than_a_statement_takes_are_appended_at_once(store):
    await run_with(store, 1)
    good = await store.claim("run1", owner="a", ttl_s=60)
    lost = [replace(good, attempt=replace(good.attempt, id=f"lost{n}")) for n in range(17_000)]
    events = [(lease, Event(at=1.0, name=lease.attempt.id, run_id="run1")) for lease in (*lost, good)]
    await store.events_under(events)
    assert [stored.event.name for stored in await store.events(run_id="run1")] == [good.attempt.id]


async def test_all_leases_of_a_worker_are_kept_at_once_and_the_lost_ones_named(store, clock):
    await run_with(store, 4)
    held = [await store.claim("run1", owner="a", ttl_s=10) for _ in range(4)]
    clock.now += 11
    stolen = await store.claim("run1", owner="b", ttl_s=60)
    assert await store.heartbeats(held, ttl_s=30) == {stolen.attempt.id}
    clock.now += 20
    assert await store.reclaim("run1") == 0
    clock.now += 20
    assert await store.reclaim("run1") == 3
    assert await store.progress("run1") == {"leased": 1, "owed": 3}
    assert await store.heartbeats(held, ttl_s=30) == {lease.attempt.id for lease in held}


async def test_a_policys_bound_and_its_pauses_hold_for_everybody_who_claims(store, clock):
    await store.create_run({}, id="run1")
    both = [
        Attempt(id=f"{policy}{n}", run_id="run1", task_id="t", policy=policy, number=n)
        for n in range(4)
        for policy in ("small", "large")
    ]
    await store.add_attempts("run1", both)

    async def claim(owner):
        lease = await store.claim("run1", owner=owner, ttl_s=60, concurrency={"large": 2})
        return lease and lease.attempt.policy

    claimed = await asyncio.gather(*(claim(f"w{n}") for n in range(8)))
    assert sorted(filter(None, claimed)) == ["large"] * 2 + ["small"] * 4
    assert await claim("late") is None
    clock.now += 61
    await store.pause("run1", "small", 30)
    await store.pause("run1", "small", 5)  # the longer one stays
    clock.now += 10
    assert {await claim("w") for _ in range(4)} == {"large", None}
    clock.now += 21
    assert await claim("w") == "small"


async def test_an_attempt_given_back_for_later_is_owed_but_not_yet(store, clock):
    await run_with(store, 1)
    lease = await store.claim("run1", owner="a", ttl_s=10)
    await store.release(lease, after_s=5)
    assert await store.progress("run1") == {"owed": 1}
    assert await store.claim("run1", owner="b", ttl_s=10) is None
    clock.now += 6
    assert (await store.claim("run1", owner="b", ttl_s=10)).fence == 2


async def test_committing_the_same_rollout_again_under_its_lease_changes_nothing(store):
    await run_with(store, 1)
    lease = await store.claim("run1", owner="a", ttl_s=10)
    events = [Event(at=1.0, name="rollout.committed", run_id="run1")]
    for _ in range(2):
        await store.commit_rollout(rollout("ro1"), lease=lease, last_events=events)
    assert len(await store.events(run_id="run1")) == 1
    assert len(await store.verdicts("ro1")) == 1


async def test_on_a_shared_database_its_servers_clock_decides_about_leases(postgres_url):
    """Machines whose clocks differ by an hour do not take each other's leases."""
    async with Store.open(postgres_url) as store:
        await run_with(store, 1)
        lease = await store.claim("run1", owner="a", ttl_s=60)
        assert abs(lease.expires_at - time.time() - 60) < 30
        assert await store.claim("run1", owner="b", ttl_s=60) is None
