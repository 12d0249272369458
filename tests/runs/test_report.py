"""A report counts what was scored, names what failed, and never turns a failure into a zero."""

import msgspec
import pytest

import rollyard as ry
from rollyard.core.rollout import Failure, MergeCounts, Rollout, StageRecord, Verdict
from rollyard.core.task import Task
from rollyard.runs.report.plots import draw_all
from rollyard.runs.report.report import Report, summarise, text
from rollyard.runs.report.spending import Price
from rollyard.runs.report.statistics import Interval
from rollyard.trajectory.samples import samples


def rollout(task, attempt, reward, agent="pi", failure=None):
    return Rollout(
        id=f"{task}-{attempt}",
        task=Task(id=task, instruction="x"),
        attempt=attempt,
        agent=agent,
        status="completed" if failure is None else "infra_error",
        verdict=None if reward is None else Verdict(reward=reward),
        failure=failure,
        stages=(StageRecord(name="wait", started_at=0, duration_s=2.0),),
        calls=2,
        usage={"prompt_tokens": 1000, "completion_tokens": 100},
        wall_s=3.0,
    )


LOST = Failure(
    boundary="sandbox", cause="SandboxGone", message="", stage="wait", retry=True, grade=False, trainable=False
)


def test_an_unscored_attempt_is_counted_under_its_boundary_and_not_as_zero():
    report = summarise("r", [rollout("a", 0, 1.0), rollout("a", 1, None, failure=LOST), rollout("b", 0, 1.0)])
    (line,) = report.lines
    assert line.reward.value == 1.0
    assert (report.attempts, report.scored) == (3, 2)
    assert report.failures == {"sandbox": {"SandboxGone": 1}}
    assert report.rewards == {"1.0": 2, "unscored": 1}
    assert report.groups.groups == 2


def test_pass_at_k_is_the_mean_over_tasks_with_enough_attempts():
    attempts = [rollout("a", n, float(n == 0)) for n in range(4)] + [rollout("b", n, 0.0) for n in range(4)]
    (line,) = summarise("r", attempts).lines
    assert line.pass_at[1].value == 0.125
    assert line.pass_at[2].value == 0.25
    assert line.pass_at[4].value == 0.5
    assert line.pass_hat[2].value == 0.0


def test_calls_per_row_are_over_all_rollouts_and_text_json_and_page_show_them():
    counts = [
        MergeCounts(calls=4, rows=1, call_tokens=100, row_tokens=40, tree_tokens=40),
        MergeCounts(calls=2, rows=2, call_tokens=30, row_tokens=30, tree_tokens=20),
    ]
    made = [msgspec.structs.replace(rollout("a", n, 1.0), merged=found) for n, found in enumerate(counts)]
    report = summarise("r", [*made, rollout("a", 2, 1.0), rollout("b", 0, 1.0, agent="codex")])
    codex, pi = report.lines
    assert (pi.calls_per_row, pi.saved_by_tree) == (2.0, 1 - 60 / 70) and codex.merged is None
    assert pi.merged == MergeCounts(calls=6, rows=3, call_tokens=130, row_tokens=70, tree_tokens=60)
    assert msgspec.json.decode(msgspec.json.encode(report))["lines"][1]["calls_per_row"] == 2.0
    heads, row = (next(line for line in text(report).splitlines() if word in line) for word in ("calls/row", "pi "))
    assert "saved by tree" in heads and " 2.0 " in row and "14%" in row
    assert "calls/row" not in text(summarise("r", [rollout("a", 0, 1.0)])), "nothing was captured"


@pytest.mark.anyio
async def test_a_rollout_says_how_its_calls_went_into_rows():
    script = {"steps": [{"shell": "true"}, {"shell": "true"}, {"text": "done"}]}
    done = await ry.run_rollout("x", agent="shell-agent", policy=ry.policy.scripted(script), verify=["true"])
    (row,) = samples(done).rows
    assert (done.merged.calls, done.merged.rows, done.merged.row_tokens) == (3, 1, len(row.ids))
    assert done.merged.call_tokens > done.merged.row_tokens == done.merged.tree_tokens
    assert summarise("r", [done]).lines[0].calls_per_row == 3.0


def test_cost_needs_a_price_and_is_per_million_tokens():
    assert summarise("r", [rollout("a", 0, 1.0)]).lines[0].cost is None
    priced = summarise("r", [rollout("a", 0, 1.0)], {"policy": Price(prompt=2.0, completion=10.0)})
    assert priced.lines[0].cost == 0.003


def test_the_text_shows_agents_and_failures_and_the_json_round_trips():
    report = summarise("r", [rollout("a", 0, 1.0), rollout("a", 1, None, agent="codex", failure=LOST)])
    shown = text(report)
    assert "pi" in shown
    assert "codex" in shown
    assert "failed at sandbox: SandboxGone 1" in shown
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) is not None


def test_pass_hat_k_stands_beside_pass_at_k():
    tried = [rollout("a", n, float(n == 0)) for n in range(2)] + [rollout("b", n, 1.0) for n in range(2)]
    shown = text(summarise("r", tried))
    assert "pass@2" in shown and "pass^2" in shown and "pass^1" not in shown
    (line,) = summarise("r", tried).lines
    assert (line.pass_at[2].value, line.pass_hat[2].value) == (1.0, 0.5)


def test_prompt_tokens_that_were_in_the_servers_cache_have_a_price_of_their_own():
    used = msgspec.structs.replace(rollout("a", 0, 1.0), usage={"prompt_tokens": 1000, "cached_tokens": 800})
    prices = (Price(prompt=10.0, completion=1.0), Price(prompt=10.0, completion=1.0, cached=1.0))
    dear, cheap = (summarise("r", [used], {"policy": price}).cost for price in prices)
    assert dear == pytest.approx(0.01) and cheap == pytest.approx(0.0028)


@pytest.mark.adversarial
@pytest.mark.parametrize("hostile", ["a$\\frac$b", "<script>--></script>"])
def test_a_name_is_drawn_as_it_is(hostile):
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    report = summarise("r", [rollout(hostile, 0, 1.0, agent=hostile)])
    for _, svg in draw_all(report, {(hostile, hostile): 1.0}):
        assert "<script" not in svg


def test_a_run_without_a_single_attempt_still_reports():
    assert "0 attempts" in text(summarise("r", []))


def test_one_task_has_no_interval_however_many_attempts():
    (line,) = summarise("r", [rollout("a", n, float(n < 3)) for n in range(8)]).lines
    assert line.pass_at[1] == line.reward == Interval(0.375, None, None)
    assert "[0." not in text(summarise("r", [rollout("a", n, 1.0) for n in range(8)]))
