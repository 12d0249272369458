"""Inspect logs: what is in the file, and that `inspect_ai` itself opens it."""

import json
import zipfile

import pytest

from rollyard.core.errors import StoreError
from rollyard.core.rollout import Failure, Rollout
from rollyard.core.task import Task
from rollyard.store import Store
from rollyard.store.exports import export
from tests.plane.venvs import told, venv_or_skip
from tests.store.builders import keep

pytestmark = pytest.mark.anyio
INSPECT = "inspect_ai==0.3.285"


@pytest.fixture
async def log(tmp_path):
    """A run of two agents: a rollout of many calls, twice, and one that never got to a model."""
    async with Store.open(tmp_path / "runs.db") as store:
        await store.create_run({"tasks": "/somewhere/many", "agents": ["pi", "nop"], "model": "m"}, id="run1")
        await keep(store, "r1", started_at=100.0, wall_s=2.5)
        await keep(store, "r2", attempt=1, verdict=None, started_at=100.0, wall_s=1)
        failure = Failure(
            boundary="sandbox", cause="SandboxError", message="no room", stage="open", retry=True, grade=False, trainable=False
        )  # fmt: skip
        task = Task(id="t1", instruction="fix it")
        failed = Rollout(id="r3", run_id="run1", agent="nop", task=task, status="infra_error", failure=failure)
        await store.commit_rollout(failed)
        done = await export(store, "run1", tmp_path / "run.eval")
        assert (done.format, done.rollouts, done.rows) == ("inspect", 3, 3)
    return tmp_path / "run.eval"


async def test_a_rollout_is_a_sample_with_its_messages_calls_and_score(log):
    with zipfile.ZipFile(log) as opened:
        names = sorted(opened.namelist())
        read = {name: json.loads(opened.read(name)) for name in names}
    assert names == [
        "_journal/start.json", "header.json", "samples/t1 [nop]_epoch_1.json", "samples/t1 [pi]_epoch_1.json",
        "samples/t1 [pi]_epoch_2.json", "summaries.json",
    ]  # fmt: skip
    sample = read["samples/t1 [pi]_epoch_1.json"]
    assert [message["role"] for message in sample["messages"]] == ["system", "user", "assistant"]
    assert sample["scores"]["reward"]["value"] == 0.5 and read["samples/t1 [pi]_epoch_2.json"]["scores"] == {}
    calls = [event for event in sample["events"] if event["event"] == "model"]
    pool = sample["events_data"]["messages"]
    second = next(event for event in calls if event["uuid"] == "r1-c2")
    sent = [message for start, end in second["input_refs"] for message in pool[start:end]]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool", "tool"]
    assert second["output"]["metadata"] == {"completion_ids": [7, 8]} and len(calls) == 7
    assert [event["function"] for event in sample["events"] if event["event"] == "tool"] == ["sh", "task"]
    assert read["header.json"]["results"]["scores"][0]["metrics"]["mean"]["value"] == 0.5
    assert "no room" in read["samples/t1 [nop]_epoch_1.json"]["error"]["message"]


async def test_a_log_that_could_not_be_finished_leaves_no_file(tmp_path):
    async with Store.open(tmp_path / "runs.db") as store:
        await store.create_run({}, id="run1")
        await keep(store, "r1")
        await store.database.write(
            lambda c: c.exec_driver_sql("UPDATE calls SET nodes = X'00' WHERE nodes IS NOT NULL")
        )
        with pytest.raises(StoreError, match="damaged"):
            await export(store, "run1", tmp_path / "out.eval")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


READ = """
import json, sys
from inspect_ai.analysis import evals_df, messages_df, samples_df
from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries
log = read_eval_log(sys.argv[1])
first = next(sample for sample in log.samples if sample.uuid == "r1")
model = next(event for event in first.events if event.event == "model" and event.uuid == "r1-c2")
table = samples_df(sys.argv[1])
print(json.dumps({
    "status": log.status, "model": log.eval.model, "mean": log.results.scores[0].metrics["mean"].value,
    "samples": [[sample.id, sample.epoch, sample.error.message if sample.error else None] for sample in log.samples],
    "roles": [message.role for message in model.input], "said": model.output.completion,
    "logprobs": [one.logprob for one in model.output.choices[0].logprobs.content],
    "asked": [call.function for call in first.events[1].output.message.tool_calls],
    "tokens": first.model_usage["served"].total_tokens, "summaries": len(read_eval_log_sample_summaries(sys.argv[1])),
    "rewards": [float(value) for value in table["score_reward"].dropna()], "messages": len(messages_df(sys.argv[1])),
    "evals": len(evals_df(sys.argv[1])),
}))
"""


@pytest.mark.slow
async def test_inspect_itself_opens_the_log(log, tmp_path):
    python = venv_or_skip("inspect", [INSPECT, "pandas", "pyarrow"])
    program = tmp_path / "read.py"
    program.write_text(READ)
    found = await told(python, program, str(log), timeout=300)
    assert (found["status"], found["model"], found["mean"], found["evals"]) == ("success", "served", 0.5, 1)
    assert found["samples"] == [["t1 [nop]", 1, "sandbox: no room"], ["t1 [pi]", 1, None], ["t1 [pi]", 2, None]]
    assert found["roles"] == ["system", "user", "assistant", "tool", "tool"] and found["said"] == "done"
    assert found["logprobs"] == [-0.25, -0.25] and found["asked"] == ["sh", "task"]
    assert found["tokens"] == 23 and found["summaries"] == 3 and found["messages"] >= 6
    assert found["rewards"] == [0.5]  # what was never scored is no zero
