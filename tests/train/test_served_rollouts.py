"""What plug-ins ask a server of rollouts: the trainer's engine answers, its errors are its own, and nothing is left running."""

import asyncio
import json

import anyio
import pytest

from rollyard.core.errors import ConfigError
from rollyard.store.exports.lines import read_sample, sample_line
from rollyard.train.plugins.served_rollouts import Generation, RolloutsFailed, ServedRollouts, job_fields, one_by_one
from rollyard.trajectory.samples import samples
from tests.train.rollouts import branchy, linear
from tests.train.served import server

pytestmark = pytest.mark.anyio
TASK = {"id": "t", "instruction": "x", "verify": ["test -f out.txt"]}
END = 261  # of the renderer of bytes


class Engine:
    """Solves every second task."""

    def __init__(self):
        self.begun = {}

    async def generate(self, calls):
        return [self.answer(call) for call in calls]

    def answer(self, call):
        if call["session_id"] in self.begun:
            return Generation([*b"done", END], [-0.25] * 5, 7)
        command = "echo hello > out.txt" if len(self.begun) % 2 == 0 else "true"
        self.begun[call["session_id"]] = command
        asked = json.dumps({"name": "shell", "arguments": {"command": command}})
        ids = [*f"<tool_call>\n{asked}\n</tool_call>".encode(), END]
        return Generation(ids, [-0.25] * len(ids), 7)


async def test_the_trainers_engine_answers_and_its_error_ends_the_job(tmp_path):
    async def broken(calls):
        raise ZeroDivisionError("the engine is gone")

    async with server(tmp_path, "--policy", "queue#renderer=bytes", script=None) as (url, _):
        rollouts = ServedRollouts(url)
        group = await rollouts.group(json.dumps(TASK), attempts=2, generate=Engine().generate)
        assert sorted(rows[0].reward for rows in group.rollouts) == [0.0, 1.0]
        assert {version for rows in group.rollouts for version in rows[0].versions} == {-1, 7}
        unjudged = await rollouts.group({"id": "u", "instruction": "x"}, generate=Engine().generate)
        assert unjudged.rollouts == ((),)
        with pytest.raises(RolloutsFailed, match="no reward"):
            unjudged.only_rows()
        with pytest.raises(ZeroDivisionError, match="the engine is gone"):
            await rollouts.group(TASK, generate=broken)
        listed = json.loads((await anyio.run_process(["curl", "-s", f"{url}/v1/jobs"])).stdout)
        assert [job["state"] for job in listed["jobs"]] == ["done", "done", "cancelled"]


def test_a_task_is_a_row_or_a_name_and_a_server_must_be_known(monkeypatch):
    assert job_fields(TASK) == {"tasks": [TASK]}
    assert job_fields(json.dumps({**TASK, "image": None})) == {"tasks": [TASK]}
    assert job_fields({"taskset": "swe", "task": "a[b]*"}) == {"taskset": "swe", "filter": ["a[[]b][*]"]}
    with pytest.raises(ConfigError, match="a row or its JSON"):
        job_fields("3")
    monkeypatch.delenv("ROLLYARD_ROLLOUTS_URL", raising=False)
    with pytest.raises(ConfigError, match="where is the server"):
        ServedRollouts()


def test_a_row_that_was_a_line_is_the_same_row():
    for row in (*samples(linear()).rows, *samples(branchy()).rows):
        line = json.loads(json.dumps(sample_line(row)))
        assert sample_line(read_sample(line)) == line


async def test_an_engine_that_takes_one_call_is_asked_for_all_of_a_batch_at_once():
    together = asyncio.Barrier(3)

    async def sample(call):
        async with asyncio.timeout(30):
            await together.wait()
        return Generation([call["number"]], [0.0])

    made = await one_by_one(sample)([{"number": number} for number in range(3)])
    assert [one.ids for one in made] == [[0], [1], [2]]
