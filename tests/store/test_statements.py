"""What verbs ask a large store: how many statements, and for which columns. Bodies and texts are most of a store."""

import asyncio
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine, event

from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.store.check import check_run
from rollyard.store.search import compile_text, search
from rollyard.testing.call_log import commit_all, conversation

pytestmark = pytest.mark.anyio


@contextmanager
def statements():
    """Those that read while it is open."""
    seen = []

    def note(connection, cursor, statement, *_):
        if statement.lstrip().upper().startswith("SELECT"):
            seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


async def fill(store, run_id, rollouts, turns):
    await store.create_run({}, id=run_id)
    for number in range(rollouts):
        name = f"ro_{run_id}_{number:04}"
        trajectory, added = conversation(name, turns)
        await commit_all(store, added)
        task = Task(id=f"t{number}", instruction=f"do {number}")
        done = Rollout(
            id=name, run_id=run_id, task=task, calls=turns, verdict=Verdict(reward=1.0), trajectory=trajectory
        )
        await store.commit_rollout(done)


async def test_a_check_reads_the_bodies_of_a_rollout_at_once(store):
    counts = []
    for turns in (2, 12):
        await fill(store, f"run_{turns}", 3, turns)
        with statements() as seen:
            assert (await check_run(store, f"run_{turns}")).ok
        counts.append(len(seen))
    assert counts[0] == counts[1]


async def test_rollouts_are_streamed_with_few_statements_however_many_tasks_and_calls_they_have(store):
    await fill(store, "run_a", 40, 1)
    with statements() as seen:
        found = [rollout async for rollout in store.rollouts("run_a", trajectories=True)]
    assert [len(rollout.captured.records) for rollout in found] == [1] * 40
    assert {rollout.task.instruction for rollout in found} == {f"do {number}" for number in range(40)}
    assert (
        len([one for one in seen if "FROM calls" in one]) <= 2
        and len([one for one in seen if "FROM blobs" in one]) <= 1
    )


async def test_streamed_rollouts_come_in_larger_reads_while_they_are_short(store):
    names = [f"ro{number:04}" for number in range(300)]
    tasks = (Task(id="t", instruction="x"), Task(id="u", instruction="y"))
    done = [Rollout(id=name, run_id="run_a", task=tasks[n % 2]) for n, name in enumerate(names)]
    done[200] = Rollout(id=names[200], run_id="run_a", task=tasks[0], agent="x" * 2_000_000)
    await asyncio.gather(*(store.commit_rollout(one) for one in done))
    with statements() as seen:
        assert [rollout.id async for rollout in store.rollouts("run_a")] == names
    assert len([one for one in seen if "FROM rollouts" in one]) < 300 / 64


async def test_a_plain_text_is_looked_for_by_the_database(store):
    await fill(store, "run_a", 3, 2)
    with statements() as seen:
        assert [one async for one in search(store, compile_text("nowhere", regex=False, ignore_case=False))] == []
    assert seen and not [one for one in seen if "texts.body" in one.partition("FROM")[0].replace("(texts.body", "")]


async def test_a_sweep_that_finds_nothing_to_remove_reads_no_bodies_of_calls(store):
    await fill(store, "run_a", 2, 3)
    with statements() as seen:
        assert await store.sweep() == 0
    assert [one for one in seen if "calls.record" in one] and not [one for one in seen if "calls.bodies" in one]
    await store.put_blob(b"of nobody")
    with statements() as seen:
        assert await store.sweep() == 1
    assert [one for one in seen if "calls.bodies" in one]


@pytest.mark.parametrize("ask", ["list_rollouts", "lines", "list_runs", "failures", "spent"])
async def test_lists_read_neither_calls_nor_what_they_hold(store, ask):
    await fill(store, "run_a", 2, 2)
    arguments = () if ask in ("list_rollouts", "list_runs") else ("run_a",)
    with statements() as seen:
        await getattr(store, ask)(*arguments)
    assert seen and not [one for one in seen if "FROM calls" in one or "JOIN calls" in one]
