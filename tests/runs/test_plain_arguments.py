"""Arguments as a newcomer writes them: one command as a string, tasks as mappings, verifiers as plain functions."""

from __future__ import annotations

import msgspec
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.core.task import Task, VerifierSpec
from rollyard.runs import evaluate_task
from rollyard.runs.rescore import rescore
from rollyard.tasks.verifiers import verifier_for
from tests.runs.conftest import CHECK, HELLO

pytestmark = pytest.mark.anyio


def plain(sandbox, rollout):
    return 0.25


def says_yes(sandbox, rollout):
    return True


async def waits(sandbox, rollout):
    return 0.5 if (await sandbox.exec(CHECK, timeout=30)).ok else 0.0


def a_verdict(sandbox, rollout):
    return ry.Verdict(reward=0.75)


class Counting:
    """An object that is called; `grade` is its own."""

    grade = "shared"

    def __call__(self, sandbox, rollout):
        return 1


def breaks(sandbox, rollout):
    raise ValueError("boom")


async def test_one_command_as_a_string_is_one_command(backend):
    done = await ry.run_rollout("x", agent="nop", sandbox=backend, setup="echo a b > made", verify="test -f made")
    assert [record.command for record in done.setup] == ["echo a b > made"]
    assert [record.command for record in done.verdict.commands] == ["test -f made"]
    assert done.reward == 1.0


async def test_a_row_may_say_its_commands_as_strings(backend):
    row = {"instruction": "x", "setup": "touch made", "verify": "test -f made"}
    assert (await ry.run_rollout(row, agent="nop", sandbox=backend)).reward == 1.0
    options = {"commands": "test -f made"}
    task = Task(id="t", instruction="x", setup="touch made", verifier=VerifierSpec(kind="commands", options=options))
    assert (await ry.run_rollout(task, agent="nop", sandbox=backend)).reward == 1.0


@pytest.mark.parametrize("name", ["disabled_tools", "collect", "mcp", "tools", "files"])
async def test_any_other_string_is_refused_by_name(name, backend):
    with pytest.raises(ConfigError, match=f"^{name}: a list, not 'bash'"):
        await ry.run_rollout("x", agent="nop", sandbox=backend, **{name: "bash"})


CHECKS = [
    (plain, 0.25),
    (says_yes, 1.0),
    (waits, 0.5),
    (a_verdict, 0.75),
    (Counting(), 1.0),
    (ry.verifier(plain), 0.25),
]


@pytest.mark.parametrize(("check", "reward"), CHECKS, ids=lambda v: getattr(v, "__name__", type(v).__name__))
async def test_any_function_of_sandbox_and_rollout_is_a_verifier(check, reward, backend):
    answers = ry.policy.scripted(HELLO)
    done = await ry.run_rollout("x", agent="shell-agent", policy=answers, sandbox=backend, verifier=check)
    assert done.failure is None and done.reward == reward
    assert done.verdict.grade == (getattr(check, "grade", None) or "sealed")


async def test_a_plain_function_that_fails_leaves_no_reward(backend):
    done = await ry.run_rollout("x", agent="nop", sandbox=backend, verifier=breaks)
    assert done.reward is None and "ValueError: boom" in done.verdict.error


async def test_what_is_no_function_is_refused_before_anything_opens(backend):
    for wrong in ("true", ["true"], 1.0):
        with pytest.raises(ConfigError, match="verifier: a function"):
            await ry.run_rollout("x", agent="nop", sandbox=backend, verifier=wrong)


async def test_a_run_takes_mappings_and_strings_as_tasks_and_a_plain_verifier(tmp_path, backend):
    rows = [{"id": "one", "instruction": "x", "verify": CHECK}, {"instruction": "y", "verifier": plain}, "do z"]
    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(ry.policy.scripted(HELLO), log=store) as gate:
        given = {"agent": "shell-agent", "sandbox": backend, "gate": gate, "store": store}
        async with ry.Run(rows, **given) as run:
            found = {r.task.instruction: r.reward async for r in run}
        assert found == {"x": 1.0, "y": 0.25, "do z": None}
        async with ry.Run(rows[2:], verifier=plain, **given) as run:
            assert [r.reward async for r in run] == [0.25]
        assert [row.after async for row in rescore(store, run.id, sandbox=backend, verifier=says_yes)] == [1.0]


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        ("examples/tasks", "Taskset.load"),
        ({"instruction": "x"}, "tasks: a list"),
        ([7], r"tasks\[0\]"),
        ([{"id": "t"}], r"tasks\[0\]: instruction"),
        ([{"instruction": "x", "setpu": "y"}], "setpu"),
        ([{"id": "t", "instruction": "x"}, {"id": "t", "instruction": "y"}], "two tasks"),
        (7, "tasks: a list"),
    ],
)
async def test_a_run_refuses_what_are_no_tasks(tasks, says, tmp_path):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        with pytest.raises(ConfigError, match=says):
            ry.Run(tasks, store=store)


async def test_a_run_refuses_strings_among_its_fields(tmp_path):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        for name in ("filter", "disabled_tools", "agents"):
            with pytest.raises(ConfigError, match=rf"RunConfig\.{name}"):
                ry.Run(["x"], store=store, **{name: "bug-*"})
        with pytest.raises(ConfigError, match="verifier: a function"):
            ry.Run(["x"], store=store, verifier="true")
        with pytest.raises(ConfigError, match="gate and base_url"):
            ry.Run(["x"], store=store, gate=ry.Gate(ry.policy.scripted(HELLO)), base_url="http://127.0.0.1:9/v1")
        with pytest.raises(ConfigError, match="models"):
            await evaluate_task("x", "upstream:http://127.0.0.1:9/v1")


async def test_files_say_one_command_as_a_string_too(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(
        msgspec.json.encode({"instruction": "x", "setup": "make", "verify": "make test"}) + b"\n"
    )
    (row,) = ry.Taskset.load(tmp_path / "rows.jsonl")
    assert row.setup == ("make",) and row.verifier.options == {"commands": ["make test"]}
    folder = tmp_path / "task"
    (folder / "tests").mkdir(parents=True)
    (folder / "instruction.md").write_text("x")
    (folder / "tests/test.sh").write_text("#!/bin/sh\n")
    extra = 'setup = "make"\nverifier = "commands"\noptions = { commands = "make test" }\n'
    (folder / "task.toml").write_text(f'version = "1.0"\n[metadata.rollyard]\n{extra}')
    (task,) = ry.Taskset.load(folder)
    assert task.setup == ("make",)
    verifier_for(task.verifier)
    (tmp_path / "run.toml").write_text('tasks = "x"\nagents = "pi"\n')
    from rollyard.runs.run.config import load

    with pytest.raises(ConfigError, match="agents"):
        load(tmp_path / "run.toml")
