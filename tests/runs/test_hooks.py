"""A caller's own code in the lifecycle: hooks at every turn of it, and verifiers of any shape (T3, T4)."""

from __future__ import annotations

import anyio
import pytest

import rollyard as ry
from rollyard.core.agent import Agent
from rollyard.core.errors import ConfigError
from rollyard.core.task import Task, VerifierSpec
from rollyard.runs.rescore import rescore
from rollyard.runs.rollout.plan import Hooks
from rollyard.tasks.verifiers.weighted import as_judge
from tests.runs.conftest import CHECK, HELLO

pytestmark = pytest.mark.anyio


def run(backend, **options):
    given = {"agent": "shell-agent", "policy": ry.policy.scripted(HELLO), "verify": CHECK, **options}
    return ry.run_rollout("x", sandbox=backend, **given)


async def test_every_teardown_hook_runs_and_the_errors_are_joined_with_their_names(backend):
    seen = []

    async def first(sandbox, rollout):
        raise ValueError("one")

    def second(sandbox, rollout):
        raise RuntimeError("two")

    async def third(sandbox, rollout):
        seen.append((await sandbox.exec("cat out.txt", cwd="/workspace", timeout=20)).stdout)

    done = await run(backend, hooks=Hooks(teardown=(first, second, third)))
    assert seen == [b"hello\n"]
    assert "hook 'first' (teardown) failed: one; hook 'second' (teardown) failed: two" in done.failure.message


async def test_teardown_hooks_after_a_failure_leave_that_failure_and_are_told(backend):
    told = []

    async def keep(event):
        told.append(event)

    def breaks(sandbox, rollout):
        raise ValueError("boom")

    done = await run(backend, setup="exit 3", hooks=Hooks(teardown=(breaks,)), sink=keep)
    assert "exited with 3" in done.failure.message
    assert [e.fields["error"] for e in told if e.name == "teardown.failed"] == ["hook 'breaks' (teardown) failed: boom"]


async def test_hooks_choose_the_image_and_add_variables(backend):
    seen = []
    agent = Agent(name="env", argv=("/bin/sh", "-c", 'echo "$CHOSEN $TASKS"; echo hello > out.txt'))
    task = Task(id="t", instruction="x", image="no-such-image", env={"CHOSEN": "task", "TASKS": "own"})

    def image(task):
        seen.append(task.image)
        return "host"

    async def variables(task):
        return {"CHOSEN": f"by the hook for {task.id}"}

    hooks = Hooks(image=(lambda task: None, image), variables=(variables,))
    done = await ry.run_rollout(
        task, agent=agent, sandbox=backend, hooks=hooks, setup='test "$CHOSEN" = "by the hook for t"', verify=CHECK
    )
    assert (done.failure, done.reward, done.log) == (None, 1.0, b"by the hook for t own\n")
    assert seen == ["no-such-image"] and done.image != "no-such-image"
    assert done.task.env == task.env


async def test_an_image_hook_that_fails_is_named(backend):
    def image(task):
        raise LookupError("no mirror")

    done = await run(backend, hooks=Hooks(image=(image,)))
    assert "hook 'image' (image) failed: no mirror" in done.failure.message and done.sandbox_id is None


async def test_hooks_run_after_the_agent_and_before_the_verdict(backend):
    seen = []
    script = {"steps": [{"shell": "echo hello > out.txt; setsid sleep 321 >/dev/null 2>&1 &"}, {"text": "done"}]}

    async def alive(sandbox):
        done = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=20)
        return "sleep 321" in done.text

    async def after(sandbox, rollout):
        seen.append(("after", await alive(sandbox), rollout.exit_code, rollout.diff is None))

    async def before(sandbox, rollout):
        seen.append(("before", await alive(sandbox), rollout.exit_code, rollout.diff is None))
        await sandbox.write("/workspace/out.txt", b"changed by the hook")

    done = await run(
        backend, policy=ry.policy.scripted(script), hooks=Hooks(after_agent=(after,), before_verdict=(before,))
    )
    assert seen == [("after", True, 0, True), ("before", False, 0, False)]
    assert done.reward == 0.0 and "+hello" in done.diff


async def test_a_plain_function_is_a_verifier_wherever_one_is_taken(backend, tmp_path):
    def half(sandbox, rollout):
        return 0.5

    def all_of_it(sandbox, rollout):
        return 1.0

    async with ry.Store.open(str(tmp_path / "runs.db")) as store:
        gate = ry.Gate(ry.policy.scripted(HELLO), log=store)
        tasks = ry.Taskset([Task(id="t", instruction="x")])
        options = {"agent": "shell-agent", "sandbox": backend, "gate": gate, "store": store}
        async with gate, ry.Run(tasks, verifier=half, **options) as one:
            (done,) = [rollout async for rollout in one]
        assert done.reward == 0.5
        assert [row.after async for row in rescore(store, done.id, sandbox=backend, verifier=all_of_it)] == [1.0]


async def test_several_verifiers_are_weighed_and_keep_their_own_metrics(backend):
    async def tests(sandbox, rollout):
        return ry.Verdict(reward=1.0, parts={"reward": 1.0, "coverage": 0.8}, checks={"passes": True}, log="ran")

    def style(sandbox, rollout):
        return {"reward": 0.0, "lines": 12}

    done = await run(backend, verify=(), verifier={"tests": (3, tests), "style": style})
    assert done.reward == pytest.approx(0.75)
    assert dict(done.verdict.parts) == {
        "reward": 0.75, "tests": 1.0, "tests.coverage": 0.8, "style": 0.0, "style.lines": 12.0,
    }  # fmt: skip
    assert done.verdict.checks == {"tests.passes": True} and done.verdict.log.endswith("--- tests\nran")


async def test_one_of_several_that_cannot_judge_leaves_no_reward(backend):
    def broken(sandbox, rollout):
        raise ValueError("boom")

    done = await run(backend, verify=(), verifier={"fine": lambda sandbox, rollout: 1.0, "broken": broken})
    assert (done.reward, done.verdict.status, done.verdict.error) == (
        None,
        "failed",
        "broken: broken: ValueError: boom",
    )
    assert done.verdict.parts == {"fine": 1.0}


async def test_a_task_names_several_verifiers_with_weights(backend):
    verifiers = {
        "made": {"kind": "commands", "weight": 3, "options": {"commands": ["test -f out.txt"]}},
        "other": {"kind": "commands", "options": {"commands": ["test -f missing", "true"]}},
    }
    spec = VerifierSpec(kind="rollyard.tasks.verifiers.weighted:make", options={"verifiers": verifiers})
    task = Task(id="t", instruction="x", verifier=spec)
    done = await ry.run_rollout(task, agent="shell-agent", policy=ry.policy.scripted(HELLO), sandbox=backend)
    assert done.reward == pytest.approx((3 * 1.0 + 0.5) / 4)
    assert [record.command for record in done.verdict.commands] == ["test -f out.txt", "test -f missing", "true"]
    assert done.verdict.checks["other.test -f missing"] is False


@pytest.mark.parametrize("wrong", [{}, {"a": (0, len)}, {"a": ("x", len)}, {"a": 5}, {"a": (1, len, 3)}])
def test_verifiers_that_cannot_be_weighed_are_refused(wrong):
    with pytest.raises(ConfigError):
        as_judge(wrong)


@pytest.mark.slow
async def test_a_teardown_hook_that_hangs_leaves_the_others_their_time(backend):
    from rollyard.runs.rollout.lifecycle import CLEANUP_S

    seen = []

    async def hangs(sandbox, rollout):
        await anyio.sleep_forever()

    async def last(sandbox, rollout):
        seen.append(rollout.id)

    done = await run(backend, hooks=Hooks(teardown=(hangs, last)))
    assert seen == [done.id] and f"hook 'hangs' (teardown) took over {CLEANUP_S:g} s" in done.failure.message
