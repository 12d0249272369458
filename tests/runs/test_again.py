"""What can be done with a kept run: judge it again, replay it, compare two, follow one."""

from __future__ import annotations

import pytest

import rollyard as ry
from rollyard.core.task import Task, VerifierSpec
from rollyard.runs.display.watch import follow
from rollyard.runs.replay import replay
from rollyard.runs.report.compare import compare, text
from rollyard.runs.rescore import rescore
from tests.runs.conftest import CHECK, HELLO

pytestmark = pytest.mark.anyio


def task(command):
    return Task(id="t", instruction="x", verifier=VerifierSpec(kind="commands", options={"commands": [command]}))


async def one_run(store, backend, script=HELLO, command=CHECK, attempts=1):
    async with (
        ry.Gate(ry.policy.scripted(script), log=store) as gate,
        ry.Run([task(command)], agent="shell-agent", attempts=attempts, sandbox=backend, gate=gate, store=store) as run,
    ):
        return run.id, [r async for r in run]


async def test_a_corrected_verifier_rescores_what_the_agent_left_without_running_it(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        run_id, (wrong,) = await one_run(store, backend, command="test -f nothing")
        assert wrong.reward == 0.0
        newer = {"t": task(CHECK)}
        (row,) = [r async for r in rescore(store, run_id, sandbox=backend, tasks=newer)]
        assert (row.before, row.after, row.changed, row.error) == (0.0, 1.0, True, None)
        assert (await store.get_rollout(wrong.id)).reward == 1.0
        assert [v.verdict.reward for v in await store.verdicts(wrong.id)] == [0.0, 1.0]
        assert (await ry.report(store, run_id)).lines[0].reward.value == 1.0


async def test_a_replay_answers_from_the_recording_and_reports_what_differs(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        _, (first,) = await one_run(store, backend)
        again = await replay(store, first.id, sandbox=backend)
        assert again.same
        assert (again.rollout.reward, again.rollout.calls) == (1.0, 2)
        assert [t.completion_ids for t in again.rollout.turns] == [t.completion_ids for t in first.turns]
        script = {"steps": [{"shell": "date +%N; echo hello > out.txt"}, {"text": "done"}]}
        _, (odd,) = await one_run(store, backend, script=script)
        assert not (await replay(store, odd.id, sandbox=backend)).same


async def test_two_runs_are_compared_on_shared_tasks_with_their_flips(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        good, _ = await one_run(store, backend)
        bad, _ = await one_run(store, backend, script={"steps": [{"text": "no"}]})
        found = (await compare(store, good, bad)).paired
        assert found.difference.value == -1.0
        assert found.flips == (("t", 1.0, 0.0),)
        assert "flipped: t" in text(good, bad, found)


async def test_a_finished_run_is_followed_to_its_end_at_once(tmp_path, backend, capsys):
    db = str(tmp_path / "runs.db")
    async with ry.Store.open(db) as store:
        await one_run(store, backend)
    await follow(db, None, "plain")
    assert "reward 1" in capsys.readouterr().out
