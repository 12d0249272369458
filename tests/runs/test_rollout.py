"""The one lifecycle, with real agents in real sandboxes (T1-T5, K1, K10)."""

from __future__ import annotations

import os

import anyio
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, SandboxInterrupted, Unsupported
from rollyard.core.sandbox_wrapper import SandboxWrapper
from rollyard.core.task import Step, Task, VerifierSpec
from rollyard.runs.rollout.plan import Hooks
from tests.runs.conftest import CHECK, HELLO

pytestmark = pytest.mark.anyio
FAST = {"agent": "shell-agent", "verify": [CHECK]}


def scripted(steps=None):
    return ry.policy.scripted(steps or HELLO)


@pytest.mark.agent
@pytest.mark.parametrize("agent", ["shell-agent", "pi", "codex", "claude-code", "goose"])
async def test_a_real_agent_solves_a_task_through_the_gate_and_is_judged(agent, backend):
    done = await ry.run_rollout("write out.txt", agent=agent, policy=scripted(), sandbox=backend, verify=[CHECK])
    assert done.failure is None, (done.failure, done.log_tail)
    assert (done.status, done.reward, done.exit_code) == ("completed", 1.0, 0)
    assert done.verdict.grade == "sealed"
    assert "+hello" in done.diff
    assert [turn.finish_reason for turn in done.turns] == ["tool_calls", "stop"]
    assert all(turn.completion_ids and turn.logprobs for turn in done.turns)
    assert len(done.trajectory.branches) == 1
    installed = [] if agent == "shell-agent" else ["install"]
    assert [stage.name for stage in done.stages] == [
        *installed, "provision", "prepare", "launch", "wait", "stop", "collect", "verify",
    ]  # fmt: skip


async def test_setup_commands_run_once_in_order_with_their_own_exit_codes(backend):
    done = await ry.run_rollout(
        "x", setup=["echo one >> log", "echo two >> log; echo err >&2"], policy=scripted(), sandbox=backend,
        collect=["log"], **FAST,
    )  # fmt: skip
    assert [(r.command, r.exit_code, r.stderr) for r in done.setup][1] == ("echo two >> log; echo err >&2", 0, "err\n")
    assert done.files["/workspace/log"] == b"one\ntwo\n"


async def test_the_first_setup_command_that_fails_ends_it_before_the_agent_and_the_verifier(backend):
    done = await ry.run_rollout(
        "x", setup=["true", "echo out; echo why >&2; exit 9", "touch never"], policy=scripted(), sandbox=backend, **FAST
    )
    assert [r.exit_code for r in done.setup] == [0, 9]
    assert (done.setup[1].stdout, done.setup[1].stderr) == ("out\n", "why\n")
    assert (done.status, done.reward, done.calls, done.exit_code) == ("infra_error", None, 0, None)
    assert done.failure.stage == "prepare"
    assert "exited with 9" in done.failure.message
    assert not await backend.list({"rollyard.rollout": done.id})


async def test_a_timed_out_agent_is_still_graded_out_of_the_time_kept_for_it(backend):
    # Its own time, not the model's
    steps = {"steps": [{"shell": "echo hello > out.txt; sleep 60"}, {"text": "too late"}]}
    done = await ry.run_rollout("x", policy=scripted(steps), sandbox=backend, limits=ry.Limits(agent=3), **FAST)
    assert (done.status, done.reward) == ("timeout", 1.0)
    assert "limits.agent" in done.failure.message
    assert done.failure.grade


async def test_a_policy_that_fails_is_an_infra_failure_and_never_a_zero(backend):
    done = await ry.run_rollout("x", policy=scripted({"steps": [{"error": 500}] * 9}), sandbox=backend, **FAST)
    assert (done.status, done.reward) == ("infra_error", None)
    assert done.failure.boundary == "policy"
    assert done.failure.retry
    assert not done.failure.trainable
    assert done.gate_log_tail


async def test_without_a_verifier_the_reward_is_none_and_the_rollout_is_complete(backend):
    done = await ry.run_rollout("x", agent="shell-agent", policy=scripted(), sandbox=backend)
    assert (done.status, done.reward, done.verdict) == ("completed", None, None)


async def test_a_callable_verifier_gets_the_sandbox_and_the_rollout_with_its_task(backend):
    @ry.verifier
    async def looks(sandbox, rollout):
        found = await sandbox.read("/workspace/out.txt")
        return ry.Verdict(reward=float(found == b"hello\n"), checks={rollout.task.id: True})

    done = await ry.run_rollout(
        "x", agent="shell-agent", policy=scripted(), sandbox=backend, verifier=looks, task_id="mine"
    )
    assert done.reward == 1.0
    assert done.verdict.checks == {"mine": True}


async def test_hooks_see_the_sandbox_and_teardown_hooks_always_run(backend):
    seen = []

    async def after(sandbox, rollout):
        seen.append(("after", rollout.task.id, await sandbox.exists("/workspace")))

    async def last(sandbox, rollout):
        seen.append(("last", rollout.status))

    async def breaks(sandbox, rollout):
        raise ValueError("boom")

    await ry.run_rollout("x", policy=scripted(), sandbox=backend, hooks=Hooks((after,), (last,)), task_id="t", **FAST)
    assert seen == [("after", "t", True), ("last", "completed")]
    done = await ry.run_rollout("x", policy=scripted(), sandbox=backend, hooks=Hooks((breaks,), (last,)), **FAST)
    assert "hook 'breaks'" in done.failure.message
    assert done.calls == 0
    assert len(seen) == 3


async def test_cancelling_at_any_moment_leaves_no_sandbox(backend):
    labels, seen = {"drill": "cancel"}, []

    async def cancel(sandbox, rollout):
        seen.extend(await backend.list(labels))
        scope.cancel()

    for delay in (0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.25, None):  # None: once the sandbox is certainly there
        hooks = Hooks((cancel,)) if delay is None else Hooks()
        with anyio.CancelScope() if delay is None else anyio.move_on_after(delay) as scope:
            await ry.run_rollout("x", policy=scripted(), sandbox=backend, labels=labels, hooks=hooks, **FAST)
        with anyio.fail_after(10):
            while await backend.list(labels):
                await anyio.sleep(0.02)
    assert seen


class Stubborn:
    """A backend whose first sandbox does everything but die: the provider never answers to the kill."""

    def __init__(self, real):
        self.real, self.opened = real, 0

    def __getattr__(self, name):
        return getattr(self.real, name)

    def open(self, spec):
        self.opened += 1
        return self._first(spec) if self.opened == 1 else self.real.open(spec)

    async def _first(self, spec):
        return Stubborn(await self.real.open(spec))

    async def kill(self):
        raise SandboxInterrupted("the connection broke")


async def test_a_sandbox_that_cannot_be_killed_costs_neither_the_verdict_nor_the_session(backend):
    """T7"""
    told = []

    async def sink(event):
        told.append(event)

    done = await ry.run_rollout(
        "write out.txt", policy=scripted(), sandbox=Stubborn(backend), sink=sink, labels={"drill": "stubborn"}, **FAST
    )
    assert (done.status, done.reward, done.failure) == ("completed", 1.0, None)
    assert [event.name for event in told if event.name.startswith("sandbox.")] == [
        "sandbox.opened",
        "sandbox.not_closed",
    ]
    assert [info.id for info in await backend.list({"drill": "stubborn"})] == [done.sandbox_id]
    assert done.sandbox_id in await backend.reap({"drill": "stubborn"})
    assert await backend.list({"drill": "stubborn"}) == []


async def test_a_gate_that_is_not_running_fails_before_the_agent_starts(backend):
    from rollyard.gate import Gate

    policy = scripted()
    done = await ry.run_rollout("x", policy=policy, gate=Gate(policy), sandbox=backend, **FAST)
    assert (done.status, done.failure.boundary, done.failure.stage) == ("infra_error", "gate", "provision")
    assert "not running" in done.failure.message
    assert done.exit_code is None


class Elsewhere:
    """A backend that says the wrong port of a sandbox's listener: nothing answers there."""

    def __init__(self, real):
        self.real = real

    def __getattr__(self, name):
        return getattr(self.real, name)

    async def open(self, spec):
        return NoListener(await self.real.open(spec))


class NoListener(SandboxWrapper):
    async def listen(self, port=0):
        listener, unused = await self.sandbox.listen(port), await self.sandbox.listen(0)
        listener.port = unused.port
        await unused.aclose()
        return listener


async def test_a_listener_that_does_not_lead_to_the_gate_fails_before_the_agent_starts(backend):
    done = await ry.run_rollout("x", policy=scripted(), sandbox=Elsewhere(backend), **FAST)
    assert (done.status, done.failure.boundary, done.failure.stage) == ("infra_error", "gate", "provision")
    assert "does not answer at 127.0.0.1:" in done.failure.message
    assert (done.reward, done.failure.retry, done.exit_code) == (None, True, None)


async def test_an_agent_at_the_end_of_its_budget_is_judged(backend):
    done = await ry.run_rollout("x", policy=scripted(), sandbox=backend, max_calls=1, **FAST)
    assert (done.status, done.stop_reason, done.reward, done.failure) == ("budget", "calls", 1.0, None)


@pytest.mark.parametrize("judged", [True, False])
async def test_no_process_of_the_agent_is_there_when_its_files_are_taken_and_judged(backend, judged):
    seen = []

    async def look(sandbox, rollout):
        seen.append((await sandbox.exec("test -d /proc/$(cat /tmp/left)", cwd="/", timeout=20)).exit_code)

    steps = [{"shell": "setsid sleep 600 >/dev/null 2>&1 & echo $! > /tmp/left; test -d /proc/$!"}, {"text": "done"}]
    hooks = Hooks(after_agent=(look,), **{"before_verdict" if judged else "teardown": (look,)})
    verify = ["true"] if judged else []
    done = await ry.run_rollout(
        "x", agent="shell-agent", policy=scripted({"steps": steps}), sandbox=backend, hooks=hooks, verify=verify
    )
    assert done.failure is None and seen == [0, 1]  # it lived until the agent had ended, and no longer


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"mode": "guess"}, "black_box, transparent_proxy, interception_gate"),
        ({"mode": "interception_gate"}, "Queue"),
        ({"mode": "black_box", "top_logprobs": 3, "base_url": "http://127.0.0.1:9/v1"}, "top_logprobs"),
        ({"disabled_tools": ["x"]}, "disabled_tools"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name_before_anything_opens(options, word, backend):
    fields = {"policy": None if "base_url" in options else scripted(), **options}
    with pytest.raises((ConfigError, Unsupported), match=word):
        await ry.run_rollout("x", agent="shell-agent", sandbox=backend, labels={"drill": "refuse"}, **fields)
    assert await backend.list({"drill": "refuse"}) == []


async def test_the_trainer_answers_each_call_in_interception_mode(backend):
    queue = ry.policy.Queue()
    seen = []

    async def trainer():
        while batch := await queue.take():
            for held in batch:
                seen.append(held.call.messages[-1].role)
                await held.reply(text="nothing to do")

    async with anyio.create_task_group() as group:
        group.start_soon(trainer)
        done = await ry.run_rollout("x", agent="shell-agent", policy=queue, sandbox=backend)
        await queue.aclose()
    assert (done.mode, done.status) == ("interception_gate", "completed")
    assert seen == ["user"]


async def test_labels_name_the_task_attempt_and_episode_on_the_sandbox(backend):
    seen = {}

    async def look(sandbox, rollout):
        (info,) = await backend.list({"rollyard.rollout": rollout.id})
        seen.update(info.labels)

    await ry.run_rollout(
        Task(id="t1", instruction="x"), agent="nop", policy=scripted(), sandbox=backend, episode_id="e1",
        labels={"team": "a"}, hooks=Hooks((look,)),
    )  # fmt: skip
    assert {
        "rollyard.task": "t1",
        "rollyard.episode": "e1",
        "rollyard.attempt": "0",
        "team": "a",
    }.items() <= seen.items()


async def test_the_hosts_environment_never_reaches_the_agent(backend):
    os.environ["ROLLYARD_CANARY"] = "canary-3141"
    try:
        steps = {"steps": [{"shell": "env > env.txt; cat /proc/*/environ >> env.txt 2>/dev/null"}, {"text": "done"}]}
        done = await ry.run_rollout(
            "x", agent="shell-agent", policy=scripted(steps), sandbox=backend, collect=["env.txt"]
        )
        assert b"canary-3141" not in done.files["/workspace/env.txt"]
    finally:
        del os.environ["ROLLYARD_CANARY"]


def step(name, command, **fields):
    verifier = VerifierSpec(kind="commands", grade="shared", options={"commands": [command]})
    return Step(name=name, instruction=name, verifier=verifier, **fields)


async def test_steps_share_one_sandbox_and_trajectory_and_each_is_judged_under_a_dead_key(backend):
    script = {"steps": [{"shell": "echo hello >> out.txt"}, {"text": "done"}]}
    task = Task(
        id="steps",
        instruction="",
        steps=(step("one", "test $(wc -l < out.txt) = 1"), step("two", "test $(wc -l < out.txt) = 2")),
    )
    done = await ry.run_rollout(task, agent="shell-agent", policy=scripted(script), sandbox=backend)
    assert done.failure is None, done.failure
    assert (done.reward, done.calls) == (1.0, 4)
    assert len(done.trajectory.branches) == 2


async def test_a_step_that_misses_its_minimum_ends_the_rollout(backend):
    task = Task(
        id="steps", instruction="", steps=(step("one", "false", min_reward={"reward": 0.5}), step("two", "true"))
    )
    done = await ry.run_rollout(task, agent="shell-agent", policy=scripted(), sandbox=backend)
    assert (done.reward, done.calls) == (0.0, 2)
    assert "'one'" in done.stop_reason


async def test_an_agent_that_calls_no_model_needs_no_policy(backend):
    done = await ry.run_rollout("x", agent="nop", sandbox=backend, verify=["true"])
    assert (done.status, done.reward, done.calls) == ("completed", 1.0, 0)


@pytest.mark.parametrize("grade", ["sealed", "shared"])
async def test_the_verifiers_own_logs_come_whole_and_no_file_of_the_agents_is_among_them(backend, grade):
    write = "head -c 100000 /dev/zero | tr '\\0' x > /logs/verifier/all.log"
    task = Task(
        id="t",
        instruction="x",
        setup=("mkdir -p /logs/verifier && echo forged > /logs/verifier/forged.log && echo mine > mine.txt",),
        verifier=VerifierSpec(kind="commands", grade=grade, options={"commands": [write]}),
    )
    done = await ry.run_rollout(
        task, agent="nop", policy=scripted([]), sandbox=backend, collect=["/logs/verifier/*", "mine.txt"]
    )
    assert done.reward == 1.0
    assert {name.rpartition("/")[2]: len(data) for name, data in done.files.items()} == {
        "all.log": 100000, "mine.txt": 5,
    }  # fmt: skip
