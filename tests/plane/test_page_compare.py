"""Anything beside anything: two runs, two agents or policies of one run, two transcripts from where they part."""

import html
import re

import pytest

import rollyard as ry
from bench.page import rollouts
from rollyard.core.call import Call, Reply
from rollyard.core.errors import ConfigError
from rollyard.core.message import Message, Text
from rollyard.core.rollout import Failure, Rollout, Verdict
from rollyard.core.task import Task
from rollyard.page.app import page_app
from rollyard.page.export import run_page
from rollyard.runs.report.compare import compare
from rollyard.testing.serve import serve_app
from rollyard.trajectory.trajectory import Trajectory
from tests.plane.test_page import get

pytestmark = pytest.mark.anyio
CONFIG = {"tasks": "bench", "agents": ["pi", "codex"], "policies": {"small": "u", "large": "u"}}


async def test_agents_and_policies_of_one_run_are_sides_of_a_comparison(tmp_path):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        await store.create_run(CONFIG, id="run_a")
        made = [one for one in rollouts("run_a", 80) if not one.failure]
        for one in made:
            await store.commit_rollout(one)
        whole = await compare(store, "run_a@pi", "run_a@codex / large")
        assert whole.paired.tasks == 4
        for task, before, after in whole.paired.means:
            mine = [r.reward for r in made if (r.task.id, r.agent) == (task, "pi")]
            assert before == pytest.approx(sum(mine) / len(mine))
            of = {r.id: (r.task.id, r.agent, r.labels["policy"], r.reward) for r in made}
            first, second = (of[id] for id in whole.pairs[task])
            assert first[:2] == (task, "pi") and second[:3] == (task, "codex", "large")
            theirs = [r.reward for r in made if (r.task.id, r.agent, r.labels["policy"]) == (task, "codex", "large")]
            if {*mine} != {*theirs} or len({*mine, *theirs}) > 1:
                assert first[3] != second[3]
            assert after == pytest.approx(sum(theirs) / len(theirs))
        with pytest.raises(ConfigError, match="did you mean 'small'"):
            await compare(store, "run_a@smal", "run_a@large")
        async with serve_app(page_app(store)) as url:
            _, _, body, _ = await get(f"{url}/compare?a=run_a@small&b=run_a@large")
            assert '<option value="run_a@small" selected>' in body
            assert '<option value="run_a@codex / large">' in body
            pair = re.search(r'href="(/side\?a=ro_[^"]+)"', body)
            assert pair is not None
            status, _, side, _ = await get(url + html.unescape(pair[1]))
            assert status == 200 and "Side by side" in side
            assert (await get(f"{url}/compare?a=run_a@none&b=run_a@large"))[0] == 404


async def test_two_transcripts_are_shown_from_where_they_first_differ(tmp_path):
    asked = (Message("system", (Text("Be brief."),)), Message("user", (Text("fix it"),)))
    async with ry.Store.open(tmp_path / "runs.db") as store:
        for name, said in (("ro_1", "left words"), ("ro_2", "right words")):
            trajectory = Trajectory(name)
            call = Call(id=f"{name}_c", rollout_id=name, dialect="chat", model="m", messages=asked)
            added = trajectory.add(call, Reply(message=Message("assistant", (Text(said),))))
            await store.commit(added.record, added.nodes, added.blobs)
            await store.commit_rollout(Rollout(id=name, task=Task(id="t", instruction="x"), agent="pi", calls=1))
        async with serve_app(page_app(store)) as url:
            _, _, body, _ = await get(f"{url}/side?a=ro_1&b=ro_2")
            assert "2 steps alike, then they differ" in body
            assert body.count("fix it") == 1
            assert body.index("left words") < body.index('id="bs2"') < body.index("right words")
            _, _, body, _ = await get(f"{url}/side?a=ro_1&b=ro_1")
            assert "the same from first to last" in body


@pytest.mark.adversarial
async def test_a_report_as_one_file_shows_hostile_names_as_text(tmp_path):
    hostile = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    lost = Failure(
        boundary="agent", cause=hostile, message=hostile, stage="wait", retry=False, grade=False, trainable=False
    )
    async with ry.Store.open(tmp_path / "runs.db") as store:
        run_id = await store.create_run({"tasks": hostile, "currency": hostile, "name": hostile})
        for number, agent in enumerate((hostile, "=1+1")):
            task = Task(id=hostile, instruction=hostile)
            scored = Rollout(id=f"ro_{number}", run_id=run_id, task=task, agent=agent, verdict=Verdict(reward=1.0))
            await store.commit_rollout(scored)
        failed = Rollout(id="ro_2", run_id=run_id, task=task, agent="x", failure=lost, labels={"policy": hostile})
        await store.commit_rollout(failed)
        _, text = await run_page(store, run_id)
    assert text.count("<script") == 1 and "<img" not in text
    assert "&lt;script&gt;alert(1)" in text
