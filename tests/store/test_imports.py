"""What other systems recorded becomes a run: our own exports come back as they went, and so does what the real packages write."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollyard.cli.main import app
from rollyard.core.errors import ConfigError
from rollyard.core.rollout import Failure
from rollyard.store import Store
from rollyard.store.exports import export
from rollyard.store.imports.load import import_run
from rollyard.trajectory.samples import samples
from tests.plane.venvs import told, venv_or_skip
from tests.store.builders import keep
from tests.store.test_inspect import INSPECT
from tests.tasks.test_harbor_itself import PACKAGES, python312

pytestmark = pytest.mark.anyio


@pytest.fixture
async def kept(tmp_path):
    """A store with one rollout of many calls, and one that was never judged."""
    async with Store.open(tmp_path / "runs.db") as store:
        await store.create_run({"tasks": "many", "agents": ["pi"], "model": "m"}, id="run1")
        await keep(store, "r1", started_at=100.0, wall_s=2.5)
        await keep(store, "r2", attempt=1, verdict=None, started_at=100.0, wall_s=1)
        yield store


async def read_back(where, run_id):
    async with Store.open(where, create=False) as store:
        found = [rollout async for rollout in store.rollouts(run_id, trajectories=True)]
    return sorted(found, key=lambda rollout: rollout.attempt)


def check(first, second):
    assert (first.task.id, first.agent, first.reward, first.wall_s) == ("t1", "pi", 0.5, 2.5)
    assert first.labels["policy"] == "served" and first.task.instruction.startswith("fix it")
    assert second.reward is None and second.verdict is None and second.attempt == 1
    said = [record for record in first.captured.records if record.kind == "agent"]
    answers = [first.captured.answer(record.id).message for record in said]
    assert [call.name for call in answers[1].tool_calls] == ["sh", "task"] and answers[1].thinking == "hm"
    assert "done" in [answer.text for answer in answers]


async def test_an_inspect_log_comes_back_as_it_went(kept, tmp_path):
    await export(kept, "run1", tmp_path / "run.eval")
    done = await import_run(str(tmp_path / "b.db"), str(tmp_path / "run.eval"), None, "back")
    assert (done.format, done.rollouts, done.scored) == ("inspect", 2, 1)
    check(*await read_back(tmp_path / "b.db", done.run_id))
    async with Store.open(tmp_path / "b.db") as store:
        info = await store.get_run(done.run_id)
    assert info.finished and info.config["name"] == "back" and info.mean_reward == 0.5


async def test_atif_comes_back_with_its_tokens(kept, tmp_path):
    await export(kept, "run1", tmp_path / "run.jsonl", format="atif")
    done = await import_run(str(tmp_path / "b.db"), str(tmp_path / "run.jsonl"), None, "")
    first, second = await read_back(tmp_path / "b.db", done.run_id)
    assert (first.task.id, first.agent, first.reward, second.reward) == ("t1", "pi", 0.5, None)
    assert first.labels["imported"] == "atif" and first.labels["source"] == "r1"
    rows = [list(row.ids) for row in samples(first).rows]
    assert [1, 2, 3, 4, 5, 6, 7, 8] in rows, "the ids of the prompt and of both answers"


def trial(folder, number, reward, **more):
    own = folder / f"hello__{number}"
    (own / "agent").mkdir(parents=True)
    result = {
        "trial_name": own.name, "task_name": "hello",
        "agent_info": {"name": "codex", "version": "1", "model_info": {"name": "m"}},
        "verifier_result": None if reward is None else {"rewards": {"reward": reward}},
        "started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T00:00:05Z", **more,
    }  # fmt: skip
    (own / "result.json").write_text(json.dumps(result))
    steps = [
        {"step_id": 1, "source": "user", "message": "greet"},
        {
            "step_id": 2, "source": "agent", "message": "", "metrics": {"prompt_tokens": 7, "completion_tokens": 2},
            "tool_calls": [{"tool_call_id": "a", "function_name": "sh", "arguments": {"cmd": "ls"}}],
            "observation": {"results": [{"source_call_id": "a", "content": "file"}]},
        },
        {"step_id": 3, "source": "agent", "message": "done"},
    ]  # fmt: skip
    document = {"schema_version": "ATIF-v1.8", "agent": {"name": "codex", "version": "1"}, "steps": steps}
    (own / "agent" / "trajectory.json").write_text(json.dumps(document))


async def test_a_job_of_harbor_is_a_run(tmp_path):
    job = tmp_path / "job"
    trial(job, "aaa", 1.0)
    trial(job, "bbb", None, exception_info={"exception_type": "AgentTimeoutError", "exception_message": "too long"})
    (job / "result.json").write_text(json.dumps({"id": "x", "n_total_trials": 2}))
    done = await import_run(str(tmp_path / "b.db"), str(job), None, "")
    first, second = await read_back(tmp_path / "b.db", done.run_id)
    assert (first.task.id, first.agent, first.reward, first.attempt, first.wall_s) == ("hello", "codex", 1.0, 0, 5.0)
    assert first.calls == 2 and first.usage["prompt_tokens"] == 7 and first.task.instruction == "greet"
    assert second.reward is None and "AgentTimeoutError: too long" in second.failure.message


async def test_a_job_of_harbor_comes_back_as_it_went(kept, tmp_path):
    failed = Failure(
        boundary="sandbox",
        cause="SandboxGone",
        message="it went",
        stage="wait",
        retry=True,
        grade=False,
        trainable=False,
    )
    await keep(kept, "r3", attempt=7, verdict=None, failure=failed, status="infra_error", started_at=100.0, wall_s=1)
    done = await export(kept, "run1", tmp_path / "job", format="harbor")
    assert (done.rows, done.refused) == (3, 0)
    assert json.loads((tmp_path / "job" / "result.json").read_text())["stats"]["n_errored_trials"] == 1
    back = await import_run(str(tmp_path / "b.db"), str(tmp_path / "job"), None, "")
    assert (back.format, back.rollouts, back.scored) == ("harbor", 3, 1)
    found = await read_back(tmp_path / "b.db", back.run_id)
    (first,) = [one for one in found if one.reward is not None]
    (lost,) = [one for one in found if one.failure is not None]
    assert (first.task.id, first.agent, first.reward, first.wall_s) == ("t1", "pi", 0.5, 2.5)
    assert [1, 2, 3, 4, 5, 6, 7, 8] in [list(row.ids) for row in samples(first).rows]
    assert "SandboxGone: it went" in lost.failure.message and lost.attempt == 7
    with pytest.raises(ConfigError, match="exists already"):
        await export(kept, "run1", tmp_path / "job", format="harbor")


async def test_what_cannot_be_read_is_an_error_and_leaves_no_run(tmp_path):
    for name, text, says in (
        ("a.eval", "no zip", "is no Inspect log"),
        ("a.json", "{}", "is no ATIF document"),
        ("b.json", '{"schema_version": "ATIF-v1.8", "steps": [{"source": "nobody"}]}', "is not as atif writes it"),
        ("a.txt", "", "no import format named '.txt'"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=says):
            await import_run(str(tmp_path / "b.db"), str(tmp_path / name), None, "")
    assert not (tmp_path / "b.db").exists()


def test_the_verb_says_what_it_kept(tmp_path):
    trial(tmp_path / "job", "aaa", 1.0)
    words = ["import", str(tmp_path / "job"), "--store", str(tmp_path / "b.db"), "--name", "theirs"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and done.stdout.startswith("1 rollouts, 1 with a reward, as run run_")


AGAIN = """
import json, sys
from inspect_ai.log import read_eval_log, write_eval_log
write_eval_log(read_eval_log(sys.argv[1]), sys.argv[2])
print(json.dumps({}))
"""


@pytest.mark.slow
async def test_a_log_that_inspect_itself_wrote_is_read(kept, tmp_path):
    await export(kept, "run1", tmp_path / "run.eval")
    program = tmp_path / "again.py"
    program.write_text(AGAIN)
    python = venv_or_skip("inspect", [INSPECT, "pandas", "pyarrow"])
    await told(python, program, str(tmp_path / "run.eval"), str(tmp_path / "theirs.eval"), timeout=300)
    done = await import_run(str(tmp_path / "b.db"), str(tmp_path / "theirs.eval"), None, "")
    check(*await read_back(tmp_path / "b.db", done.run_id))


@pytest.mark.slow
async def test_a_job_that_harbor_itself_wrote_is_read(tmp_path):
    python = venv_or_skip("harbor", ["--no-deps", "harbor==0.25.0"], PACKAGES, python=python312())
    await told(python, Path(__file__).with_name("harbor_job.py"), str(tmp_path / "job"), timeout=300)
    done = await import_run(str(tmp_path / "b.db"), str(tmp_path / "job"), None, "")
    first, second = await read_back(tmp_path / "b.db", done.run_id)
    assert (first.task.id, first.agent, first.labels["policy"], first.wall_s) == ("hello", "codex", "m", 5.0)
    assert (first.reward, second.reward, second.attempt, first.calls) == (1.0, 0.0, 1, 2)


@pytest.mark.slow
async def test_a_job_of_ours_is_read_by_harbor_itself(kept, tmp_path):
    await export(kept, "run1", tmp_path / "job", format="harbor")
    python = venv_or_skip("harbor", ["--no-deps", "harbor==0.25.0"], PACKAGES, python=python312())
    found = await told(python, Path(__file__).with_name("harbor_reads.py"), str(tmp_path / "job"), timeout=300)
    assert (found["jobs"], found["total"], found["errors"]) == (["job"], 2, 0)
    judged, other = sorted(found["trials"], key=lambda trial: trial["rewards"] is None)
    assert (judged["task"], judged["agent"], judged["rewards"]["reward"], judged["valid"]) == ("t1", "pi", 0.5, True)
    assert judged["model"] == "served" and judged["steps"] > 3 and not other["valid"]
