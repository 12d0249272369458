"""The recipes of `examples/trainers`: each configuration is read by its trainer's own parser, and the tasks are tasks."""

import json
import os
import subprocess
import sys

import pytest

from rollyard.tasks.taskset import Taskset
from tests.plane.venvs import venv_or_skip
from tests.train.foreign_python import HERE, ROOT, foreign
from tests.train.test_plugins import SKYRL, TORCH, VERL

RECIPES = ROOT / "examples" / "trainers"
OURS = [path for path in sys.path if path.endswith("site-packages")]


def start(python, command, **variables):
    """A recipe's command, with the trainer's Python before all others."""
    environment = {**os.environ, "PATH": f"{os.path.dirname(python)}:{os.environ['PATH']}", **variables}
    done = subprocess.run(command, cwd=RECIPES, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_the_recipes_tasks_are_tasks_and_become_a_dataset(tmp_path):
    tasks = list(Taskset.load(RECIPES / "tasks.jsonl", strict=True))
    assert len(tasks) == 4 and all(task.verifier for task in tasks)
    pq = pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")
    target = tmp_path / "train.parquet"
    words = [sys.executable, RECIPES / "dataset.py", RECIPES / "tasks.jsonl", target]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    rows = pq.read_table(target).to_pylist()
    assert [json.loads(row["task"])["id"] for row in rows] == [task.id for task in tasks]
    assert [row["prompt"][0]["content"] for row in rows] == [task.instruction for task in tasks]


@pytest.mark.slow
def test_trls_parser_reads_its_recipe():
    python = venv_or_skip("trainer-trl-1.16.0", ["trl==1.16.0", *TORCH, "requests"])
    words = [
        "--config",
        "trl/config.yaml",
        "--tasks",
        "tasks.jsonl",
        "--dry_run",
        "true",
        "--use_cpu",
        "true",
        "--bf16",
        "false",
    ]
    ours = f"import runpy, sys; sys.path += {OURS!r}; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    command = [python, "-c", ours, "trl/train.py", *words]
    said = start(python, command, PYTHONPATH=str(ROOT), ROLLYARD_ROLLOUTS_URL="http://127.0.0.1:1")
    assert said.splitlines()[-1] == "4 tasks, groups of 8, 200 steps"


@pytest.mark.slow
def test_verls_configuration_takes_its_recipe():
    python = venv_or_skip("trainer-verl-0.9.1", ["--no-deps", VERL[0]], VERL[1:])
    said = start(python, ["verl/run.sh", "--cfg", "job"])
    assert "default_agent_loop: rollyard" in said and f"agent_loop_config_path: {RECIPES}/verl/loops.yaml" in said


@pytest.mark.slow
def test_skyrls_checks_take_its_recipe():
    python = venv_or_skip("trainer-skyrl-0.3.0", SKYRL)
    said = start(python, ["skyrl/run.sh"], ENTRYPOINT="recipe_skyrl", PYTHONPATH=str(HERE / "foreign"))
    assert said.splitlines()[-1] == "ok"


@pytest.mark.slow
def test_verifiers_takes_the_environment_of_prime_rls_recipe():
    run = foreign("verifiers-0.4.0", "verifiers==0.4.0")
    assert run("recipe_prime_rl.py", RECIPES / "prime_rl" / "rl.toml") == "ok"
