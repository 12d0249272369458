"""`rollyard init`: what it makes works before anything is changed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.policy.scripted_policy import scripted
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.tasks.scaffold import new_agent, new_task, new_taskset
from rollyard.testing.tasks import CheckOptions, check_tasks


@pytest.mark.anyio
async def test_new_tasks_pass_their_check(backend, tmp_path):
    for kind in ("tests", "pytest", "steps"):
        new_task(tmp_path / "tasks" / kind, kind)
    found = [check async for check in check_tasks(str(tmp_path / "tasks"), backend, CheckOptions(repeats=1))]
    assert {check.task_id: check.ok for check in found} == {"tests": True, "pytest": True, "steps": True}
    assert [finding for check in found for finding in check.findings] == []


@pytest.mark.anyio
async def test_a_new_taskset_runs_and_its_verifier_judges(backend, tmp_path):
    task = ry.Taskset.load(new_taskset(tmp_path / "mine"), trust_tasks=True)["count-2"]
    idle = await run_rollout(task, agent="nop", policy=scripted([]), sandbox=backend)
    assert (idle.reward, idle.verdict.grade) == (0.0, "sealed")
    right = await run_rollout(
        task, agent="nop", policy=scripted([]), sandbox=backend, setup=["wc -l < input.txt > answer.txt"]
    )
    assert right.reward == 1.0


@pytest.mark.anyio
async def test_a_new_agent_asks_the_model(backend, tmp_path):
    agent = new_agent(tmp_path / "my-agent")
    done = await run_rollout("Say hello.", agent=str(agent), policy=scripted(["hello from the model"]), sandbox=backend)
    assert (done.status, done.calls, done.exit_code) == ("completed", 1, 0), done
    assert "hello from the model" in done.log_tail


def test_what_exists_is_not_overwritten_and_names_are_checked(tmp_path):
    new_task(tmp_path / "a")
    with pytest.raises(ConfigError, match="exists already"):
        new_task(tmp_path / "a")
    with pytest.raises(ConfigError, match="not a name"):
        new_task(tmp_path / "Not Good")
    with pytest.raises(ConfigError, match="not a name"):
        new_agent(tmp_path / "Bad Name.toml")


def test_the_command_says_what_it_made_and_what_comes_next(tmp_path):
    rollyard = Path(sys.executable).with_name("rollyard")
    made = subprocess.run(
        [rollyard, "init", "task", "t", "--kind", "steps", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(made.stdout) == {"made": "t", "next": "rollyard check tasks t"}
    again = subprocess.run([rollyard, "init", "task", "t"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    wrong = subprocess.run(
        [rollyard, "init", "task", "u", "--kind", "x"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (wrong.returncode, "known: pytest, steps, tests" in wrong.stderr) == (2, True)
