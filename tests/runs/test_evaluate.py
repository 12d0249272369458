"""Evaluation: a matrix through one queue with budgets, and what k attempts of m models say about a task (V1-V3)."""

from __future__ import annotations

import anyio
import msgspec
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.runs import evaluate_task
from rollyard.runs.report.spending import Price
from rollyard.runs.run.config import load
from tests.runs.conftest import CHECK, HELLO

pytestmark = pytest.mark.anyio
GOOD, BAD = HELLO, {"steps": [{"text": "no"}]}


def write(tmp_path, **more):
    import yaml

    (tmp_path / "good.yaml").write_text(yaml.safe_dump(GOOD))
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(BAD))
    rows = [f'{{"id": "t{n}", "instruction": "x", "verify": ["test -f out.txt"]}}\n' for n in range(2)]
    (tmp_path / "tasks.jsonl").write_text("".join(rows))
    lines = ['tasks = "tasks.jsonl"', 'agents = ["shell-agent"]']
    lines += [f"{name} = {value}" for name, value in {"attempts": 2, "parallel": 4, **more}.items()]
    lines += ["[policies]", 'good = "scripted:good.yaml"', 'bad = "scripted:bad.yaml"']
    (tmp_path / "eval.toml").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "eval.toml")


async def test_a_matrix_is_run_once_and_reported_by_agent_and_model(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        report = await ry.evaluate(write(tmp_path), store=store, sandbox=backend)
    assert {line.name: line.reward.value for line in report.lines} == {
        "shell-agent / good": 1.0,
        "shell-agent / bad": 0.0,
    }
    assert report.attempts == 8
    assert report.lines[1].pass_at[2].value == 1.0


@pytest.mark.slow
async def test_a_money_budget_ends_the_run_and_the_rest_stays_owed(tmp_path, backend):
    path = write(tmp_path, parallel=1, attempts=1, max_cost=0.0001)
    with open(path, "a") as file:
        file.write("[prices.good]\nprompt = 1.0\ncompletion = 1.0\n[prices.bad]\nprompt = 0.0\ncompletion = 0.0\n")
    config = load(path)
    async with ry.Store.open(tmp_path / "runs.db") as store:
        report = await ry.evaluate(config, store=store, sandbox=backend)
        assert 0 < report.attempts < 4
        assert report.owed == 4 - report.attempts
        assert report.cost >= 0.0001
        spent = await ry.evaluate(config, store=store, sandbox=backend, resume=report.run_id)
        assert spent.attempts == report.attempts
        rest = msgspec.structs.replace(config, max_cost=None)
        again = await ry.evaluate(rest, store=store, sandbox=backend, resume=report.run_id)
        assert again.attempts == 4


async def test_a_token_budget_ends_the_run_and_counts_what_was_used_before_it_was_resumed(tmp_path, backend):
    config = load(write(tmp_path, parallel=1, max_tokens=1))
    async with ry.Store.open(tmp_path / "runs.db") as store:
        report = await ry.evaluate(config, store=store, sandbox=backend)
        assert (report.attempts, report.owed) == (1, 7)
        again = await ry.evaluate(config, store=store, sandbox=backend, resume=report.run_id)
        assert (again.attempts, again.owed) == (1, 7)


async def test_a_price_for_a_policy_that_the_run_does_not_have_is_refused(tmp_path):
    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(ry.policy.scripted(GOOD)) as gate:
        with pytest.raises(ConfigError, match="other"):
            ry.Run([ry.Task(id="t", instruction="x")], gate=gate, store=store,
                   policies={"a": gate.policy, "b": gate.policy}, prices={"other": Price(1.0, 1.0)})  # fmt: skip


def test_a_price_for_a_model_that_is_not_there_is_refused(tmp_path):
    path = write(tmp_path)
    with open(path, "a") as file:
        file.write("[prices.other]\nprompt = 1.0\ncompletion = 1.0\n")
    with pytest.raises(ConfigError, match="other"):
        load(path)


async def test_a_task_that_models_solve_differently_is_learnable_and_separates_them(backend):
    quality = await evaluate_task(
        {"id": "t", "instruction": "x", "verify": [CHECK]},
        {"local/good": ry.policy.scripted(GOOD), "bad": ry.policy.scripted(BAD)},
        attempts=2,
        agent="shell-agent",
        sandbox=backend,
    )
    assert quality.judgement == "learnable"
    assert quality.learnability.value == 0.25
    assert quality.scores("good").rewards == (1.0, 1.0)
    (pair,) = quality.separation
    assert pair.difference == 1.0


async def test_a_verifier_that_never_scores_is_called_broken(backend):
    @ry.verifier
    async def broken(sandbox, rollout):
        raise ValueError("boom")

    quality = await evaluate_task(
        "x",
        {"m": ry.policy.scripted(GOOD)},
        agent="shell-agent",
        attempts=2,
        verifier=broken,
        sandbox=backend,
        retries=0,
    )
    assert quality.judgement == "broken verifier"
    assert quality.models[0].rewards == ()


async def test_cancelling_ends_every_rollout_at_once(backend):
    slow = ry.policy.scripted({"steps": [{"sleep": 60}]})
    with anyio.move_on_after(1.5):
        await evaluate_task(
            {"id": "slow", "instruction": "x"}, {"m": slow}, agent="shell-agent", attempts=2, sandbox=backend
        )
    assert await backend.list({"rollyard.task": "slow"}) == []


async def test_a_report_is_written_as_json_text_html_and_pictures(tmp_path, backend):
    from rollyard.page.export import run_page
    from rollyard.runs.report.plots import write_report

    async with ry.Store.open(tmp_path / "runs.db") as store:
        report = await ry.evaluate(write(tmp_path), store=store, sandbox=backend)
        _, html = await run_page(store, report.run_id)
        files = await write_report(store, report, tmp_path / "out", html=html)
    assert {f.suffix for f in files} == {".json", ".txt", ".html", ".svg", ".png"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count('<div class="picture"><svg') == 6
    assert 'class="forest"' in page and "pass^" in page
    assert "src=" not in page
