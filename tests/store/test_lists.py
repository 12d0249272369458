"""Lists of runs and rollouts: filtered, sorted, searched and paged by the database, from an index alone on SQLite."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from sqlalchemy import text

from rollyard.core.events import POLICY_STOPPED, Event
from rollyard.core.lease import Attempt
from rollyard.core.rollout import Failure, Rollout, Verdict
from rollyard.core.task import Task
from rollyard.store import Store
from rollyard.store.values import RolloutQuery

pytestmark = pytest.mark.anyio


def rollout(run_id, number, policy, reward, tokens):
    return Rollout(
        id=f"ro_{run_id}_{number:03}",
        task=Task(id=f"t{number % 3}", instruction="x"),
        run_id=run_id,
        attempt=number,
        labels={"policy": policy},
        verdict=None if reward is None else Verdict(reward=reward),
        usage={"prompt_tokens": tokens, "completion_tokens": 1},
    )


async def filled(store):
    await store.create_run({"tasks": "easy"}, id="run_a")
    await store.create_run({"tasks": "hard%"}, id="run_b")
    for number in range(6):
        await store.commit_rollout(rollout("run_a", number, "p" if number % 2 else "q", number / 5, 100 - number))
    await store.commit_rollout(rollout("run_b", 0, "p", None, 5))


async def test_rollouts_are_filtered_by_policy_and_sorted_by_tokens(store_url):
    async with Store.open(store_url) as store:
        await filled(store)
        page = await store.list_rollouts(RolloutQuery(run_id="run_a", policy="p", sort="prompt_tokens", limit=2))
    assert page.total == 3
    assert [row.prompt_tokens for row in page.rows] == [95, 97]


async def test_failures_are_grouped_by_what_they_say_and_a_stopped_policy_is_named_while_attempts_are_owed(store_url):
    said = ["no answer to req_18f2ab (3 s)", "no answer to req_99c0de (4 s)", "the model `x` does not exist"]
    async with Store.open(store_url) as store:
        await store.create_run({}, id="run_c")
        await store.create_run({}, id="run_d")
        for number, message in enumerate(said):
            why = Failure(
                boundary="policy", cause="E", message=message, stage="wait", retry=True, grade=False, trainable=False
            )
            failed = replace(rollout("run_c", number, "p", None, 1), failure=why, started_at=float(number))
            await store.commit_rollout(failed)
        groups = await store.failures("run_c")
        assert [(group.count, group.message) for group in groups] == [(2, said[0]), (1, said[2])]
        assert await store.failures("run_d") == ()
        event = Event(at=1.0, name=POLICY_STOPPED, run_id="run_c", fields={"policy": "p", "message": said[2]})
        await store.event(event)
        assert await store.stopped_policies("run_c") == {}, "nothing is owed"
        one = Attempt(id="a", run_id="run_c", task_id="t", task_digest="", agent="x", policy="p", number=0)
        await store.add_attempts("run_c", [one])
        assert await store.stopped_policies("run_c") == {"p": said[2]}


async def test_runs_are_searched_in_id_and_config_and_sorted_with_unknown_last(store_url):
    async with Store.open(store_url) as store:
        await filled(store)
        assert [run.id for run in await store.list_runs(search="hard%")] == ["run_b"]
        assert [run.id for run in await store.list_runs(search="run_a")] == ["run_a"]
        best = await store.list_runs(sort="mean_reward")
    assert [(run.id, run.scored) for run in best] == [("run_a", 6), ("run_b", 0)]
    assert best[0].mean_reward == pytest.approx(0.5)


async def test_on_sqlite_a_list_never_reads_the_bodies(tmp_path):
    async with Store.open(tmp_path / "runs.db") as store:
        await filled(store)
        query = "EXPLAIN QUERY PLAN SELECT task_id, policy, reward, prompt_tokens FROM rollouts WHERE run_id = 'run_a'"
        plan = await store.database.read(lambda c: " ".join(str(row) for row in c.execute(text(query))))
    assert "COVERING INDEX rollouts_lines" in plan
