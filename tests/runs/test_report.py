"""A report counts what was scored, names what failed, and never turns a failure into a zero."""

import msgspec
import pytest

from rollyard.core.rollout import Failure, Rollout, StageRecord, Verdict
from rollyard.core.task import Task
from rollyard.runs.report.plots import draw_all, page
from rollyard.runs.report.report import Report, summarise, text
from rollyard.runs.report.spending import Price


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


@pytest.mark.adversarial
def test_a_report_as_a_page_shows_hostile_names_as_text():
    hostile = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    attempts = [rollout(hostile, 0, 1.0, agent=hostile), rollout("=1+1", 0, None, agent="=1+1", failure=LOST)]
    shown = page(summarise(hostile, attempts), [])
    assert "&lt;script&gt;" in shown and "<script" not in shown and "<img" not in shown


@pytest.mark.adversarial
@pytest.mark.parametrize("hostile", ["a$\\frac$b", "<script>--></script>"])
def test_a_name_is_drawn_as_it_is(hostile):
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    report = summarise("r", [rollout(hostile, 0, 1.0, agent=hostile)])
    for _, svg in draw_all(report, {(hostile, hostile): 1.0}):
        assert "<script" not in svg


def test_a_run_without_a_single_attempt_still_reports():
    assert "0 attempts" in text(summarise("r", []))
