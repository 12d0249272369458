"""Verifiers on real sandboxes: what each gives, and None whenever it could not run."""

import msgspec
import pytest

import rollyard as ry
from rollyard.core.call import Reply
from rollyard.core.errors import ConfigError, SandboxInterrupted, StreamDropped
from rollyard.core.message import Message, Text
from rollyard.core.rollout import Failure
from rollyard.core.task import Step, VerifierSpec
from rollyard.tasks.harbor.load import load_folder
from rollyard.tasks.steps import combine, may_go_on
from rollyard.tasks.verifiers import verifier_for

pytestmark = pytest.mark.anyio


def harbor_task(folders, root, script, **files):
    return load_folder(folders.simple(root, **{"tests/test.sh": f"#!/bin/sh\n{script}\n", **files}))


@pytest.mark.parametrize("grade", ["sealed", "shared", "live"])
async def test_harbor_tests_reward_the_work_and_the_verdict_shows_the_grade(attempt, folders, tmp_path, grade):
    task = load_folder(folders.simple(tmp_path / "t"))
    async with attempt(task) as it:
        failed = await it.verdict(grade=grade)
        await it.act("touch done")
        passed = await it.verdict(grade=grade)
    assert (failed.reward, failed.status, failed.grade) == (0.0, "scored", grade)
    assert (passed.reward, passed.grade) == (1.0, grade)


@pytest.mark.parametrize(
    ("script", "reward", "parts"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt; exit 3", 0.25, {"reward": 0.25}),
        ("echo 1 > /logs/verifier/reward.txt; echo 0.5 > /logs/verifier/reward.json", 0.5, {"reward": 0.5}),
        ("""echo '{"reward": 0.5, "style": 1}' > /logs/verifier/reward.json""", 0.5, {"reward": 0.5, "style": 1.0}),
        ("""echo '{"a": 0, "b": 1}' > /logs/verifier/reward.json""", 0.5, {"a": 0.0, "b": 1.0}),
        ("echo nan > /logs/verifier/reward.txt", None, {}),
        ("echo NaN > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", None, {}),
        ("""echo '{"reward": "1"}' > /logs/verifier/reward.json""", None, {}),
        ("""echo '{"reward": true}' > /logs/verifier/reward.json""", None, {}),
        (": > /logs/verifier/reward.txt", None, {}),
        ("exit 0", None, {}),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", None, {}),
    ],
)
async def test_reward_files_are_read_by_the_book(attempt, folders, tmp_path, script, reward, parts):
    async with attempt(harbor_task(folders, tmp_path / "t", script)) as it:
        verdict = await it.verdict(grade="shared")
    assert (verdict.reward, verdict.parts) == (reward, parts)
    assert verdict.status == ("failed" if reward is None else "scored")
    assert (verdict.error is not None) == (reward is None)


async def test_harbor_runs_in_the_working_directory_with_its_env_and_logs(attempt, folders, tmp_path):
    script = 'pwd; echo "$GREETING"; echo oops >&2; echo 1 > /logs/verifier/reward.txt'
    async with attempt(harbor_task(folders, tmp_path / "t", script)) as it:
        verdict = await it.verdict(env={"GREETING": "hello there"})
    assert verdict.log.split("\n")[-4:-1] == ["/app", "hello there", "oops"]


async def test_a_verifier_that_takes_too_long_gives_no_reward(attempt, folders, tmp_path):
    async with attempt(harbor_task(folders, tmp_path / "t", "echo 1 > /logs/verifier/reward.txt; sleep 60")) as it:
        verdict = await it.verdict(timeout_s=1.0)
    assert verdict.reward is None
    assert "limits.verify" in verdict.error


class Flaky:
    """A real sandbox behind a connection that drops: after start, while waiting, and while reading."""

    def __init__(self, sandbox):
        self.sandbox, self.drops = sandbox, {"start": 1, "wait": 2, "job": 1, "read": 2, "stat": 1}

    def __getattr__(self, name):
        return getattr(self.sandbox, name)

    def drop(self, what, error):
        if self.drops[what]:
            self.drops[what] -= 1
            raise error("the connection broke")

    async def start(self, cmd, **options):
        job = await self.sandbox.start(cmd, **options)
        self.drop("start", SandboxInterrupted)
        return FlakyJob(self, job)

    async def job(self, job_id):
        self.drop("job", SandboxInterrupted)
        return FlakyJob(self, await self.sandbox.job(job_id))

    async def read(self, path, **options):
        self.drop("read", SandboxInterrupted)
        return await self.sandbox.read(path, **options)

    async def stat(self, path):
        if path.endswith("reward.txt"):
            self.drop("stat", StreamDropped)
        return await self.sandbox.stat(path)


class FlakyJob:
    def __init__(self, flaky, job):
        self.flaky, self.job = flaky, job

    def __getattr__(self, name):
        return getattr(self.job, name)

    async def wait(self, timeout=None):
        self.flaky.drop("wait", StreamDropped)
        return await self.job.wait(timeout)


async def test_a_dropped_connection_is_reattached_and_tests_never_run_twice(attempt, folders, tmp_path):
    """T2"""
    script = "echo ran >> /app/runs; sleep 0.5; echo 1 > /logs/verifier/reward.txt"
    async with attempt(harbor_task(folders, tmp_path / "t", script)) as it:
        real = it.sandbox
        it.sandbox = Flaky(real)
        verdict = await it.verdict(grade="live")
        assert it.sandbox.drops == {"start": 0, "wait": 0, "job": 0, "read": 0, "stat": 0}
        assert verdict.reward == 1.0
        assert await real.read("/app/runs") == b"ran\n"


async def test_judging_is_skipped_when_infrastructure_failed(attempt, folders, tmp_path):
    failure = Failure(
        boundary="sandbox", cause="SandboxGone", message="gone", stage="wait", retry=True, grade=False, trainable=False
    )
    async with attempt(
        harbor_task(folders, tmp_path / "t", "echo 1 > /logs/verifier/reward.txt; touch /app/ran")
    ) as it:
        verdict = await it.verdict(rollout={"failure": failure}, grade="shared")
        assert not await it.sandbox.exists("/app/ran")
    assert (verdict.reward, verdict.status) == (None, "skipped")


async def test_harborignored_files_never_reach_the_sandbox(attempt, folders, tmp_path):
    script = "test -e /tests/secret; echo $? > /logs/verifier/reward.txt"
    files = {"tests/secret": "x", "tests/.harborignore": "secret\n"}
    async with attempt(harbor_task(folders, tmp_path / "t", script, **files)) as it:
        assert (await it.verdict(grade="shared")).reward == 1.0


def commands(*items, **options):
    return {"instruction": "x", "verifier": {"kind": "commands", "options": {"commands": list(items), **options}}}


async def test_commands_give_the_share_that_passed_or_all(attempt):
    async with attempt(commands("true", "false", "test -d .", {"run": "false", "name": "n", "weight": 2.0})) as it:
        verdict = await it.verdict()
        assert verdict.reward == pytest.approx(0.4)
        assert verdict.checks == {"true": True, "false": False, "test -d .": True, "n": False}
        assert [record.exit_code for record in verdict.commands] == [0, 1, 0, 1]
    async with attempt(commands("true", "false", score="all")) as it:
        assert (await it.verdict()).reward == 0.0
    async with attempt(commands("sleep 30", timeout_s=0.5)) as it:
        verdict = await it.verdict()
        assert (verdict.reward, verdict.commands[0].exit_code, verdict.commands[0].timed_out) == (0.0, None, True)


async def test_a_python_verifier_sees_the_sandbox_and_the_rollout(attempt):
    """T3"""

    @ry.verifier
    async def wants_the_task_id(sandbox, rollout):
        return ry.Verdict(reward=float((await sandbox.read_text("/app/id")) == rollout.task.id))

    async with attempt({"id": "seven", "instruction": "x", "verify": "true"}) as it:
        await it.act("printf seven > id")
        assert (await it.verdict(verifier=wants_the_task_id)).reward == 1.0


@pytest.mark.parametrize(
    ("gives", "reward", "status"),
    [
        (True, 1.0, "scored"),
        (0.5, 0.5, "scored"),
        ({"reward": 1, "speed": 0.5}, 1.0, "scored"),
        (None, None, "none"),
        (float("nan"), None, "failed"),
        ("yes", None, "failed"),
        (ZeroDivisionError("boom"), None, "failed"),
    ],
)
async def test_what_a_function_may_give(attempt, gives, reward, status):
    @ry.verifier
    def check(sandbox, rollout):
        if isinstance(gives, Exception):
            raise gives
        return gives

    async with attempt({"instruction": "x", "verify": "true"}) as it:
        verdict = await it.verdict(verifier=check)
    assert (verdict.reward, verdict.status) == (reward, status)
    if isinstance(gives, Exception):
        assert "boom" in verdict.error
        assert "ZeroDivisionError" in verdict.log


async def test_a_function_in_a_file_is_found_by_its_reference(attempt, tmp_path):
    file = tmp_path / "checks.py"
    file.write_text(
        "import rollyard as ry\n@ry.verifier(grade='shared')\ndef half(sandbox, rollout):\n    return 0.5\n"
    )
    task = {"instruction": "x", "verifier": {"kind": "python", "options": {"ref": f"{file}:half"}}}
    async with attempt(task) as it:
        assert (await it.verdict()).reward == 0.5
    with pytest.raises(ConfigError, match="top of a module"):
        ry.verifier(lambda sandbox, rollout: 1).spec()


@pytest.mark.parametrize(
    ("options", "work", "reward"),
    [
        ({"files": {"a.txt": "one\n", "gone": None}}, "printf 'one  \\n\\n' > a.txt", 1.0),
        ({"files": {"a.txt": "one\n"}, "ignore_space": False}, "printf 'one  ' > a.txt", 0.0),
        ({"files": {"a.txt": "one\n", "gone": None}, "score": "fraction"}, "touch gone; echo one > a.txt", 0.5),
        ({"files": {"a.txt": "one\n"}}, "ln -s /etc/hostname a.txt", 0.0),
    ],
)
async def test_expected_files(attempt, options, work, reward):
    async with attempt({"instruction": "x", "verifier": {"kind": "diff", "options": options}}) as it:
        await it.act(work)
        assert (await it.verdict()).reward == reward


async def test_an_expected_patch_is_compared_by_its_lines(attempt):
    wanted = "--- a/f.py\n+++ b/f.py\n@@ -1,2 +1,2 @@\n keep\n-old\n+new\n"
    same = "diff --git a/f.py b/f.py\nindex 1..2 100644\n--- a/f.py\n+++ b/f.py\n@@ -7 +7 @@ def x\n-old  \n+new\n"
    task = {"instruction": "x", "verifier": {"kind": "diff", "options": {"patch": wanted}}}
    async with attempt(task) as it:
        assert (await it.verdict(rollout={"diff": same})).reward == 1.0
        more = same + "--- /dev/null\n+++ b/extra\n@@ -0,0 +1 @@\n+x\n"
        assert (await it.verdict(rollout={"diff": more})).reward == 0.0
        assert (await it.verdict()).reward is None


class Judge:
    """A policy that answers in turn."""

    def __init__(self, *answers):
        self.answers, self.calls = list(answers), []

    async def __call__(self, call):
        self.calls.append(call)
        return Reply(message=Message("assistant", (Text(self.answers.pop(0)),)))


CRITERIA = [{"name": "right", "ask": "Is it right?", "weight": 3.0}, {"name": "short", "ask": "Is it short?"}]
JUDGED = {"instruction": "Do it", "verifier": {"kind": "judge", "options": {"criteria": CRITERIA, "files": ["a.txt"]}}}


async def test_a_judge_scores_each_criterion_and_is_asked_again_when_it_rambles(attempt):
    policy = Judge("I would say it is fine.", 'Well: {"scores": {"right": 1, "short": 0.5}, "reason": "ok"} done')
    async with attempt(JUDGED) as it:
        await it.act("echo content-of-a > a.txt")
        verdict = await it.verdict(policy=policy, rollout={"diff": "+added"})
    assert verdict.reward == pytest.approx(0.875)
    assert verdict.parts == {"right": 1.0, "short": 0.5, "reward": verdict.reward}
    shown = policy.calls[0].messages[1].text
    assert "content-of-a" in shown
    assert "+added" in shown
    assert policy.calls[0].rollout_id != "ro_test"


async def test_a_judge_that_cannot_be_read_gives_no_reward(attempt):
    policy = Judge('{"scores": {"right": 7, "short": 1}}', '{"scores": {"right": 1}}', "no")
    async with attempt(JUDGED) as it:
        verdict = await it.verdict(policy=policy)
    assert (verdict.reward, verdict.status) == (None, "failed")
    with pytest.raises(ConfigError, match="needs a policy"):
        verifier_for(it.task.verifier)


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "commands", "options": {}},
        {"kind": "commands", "options": {"commands": [], "extra": 1}},
        {"kind": "commands", "options": {"commands": []}},
        {"kind": "pytest", "options": {"paths": ["../x"]}},
        {"kind": "diff", "options": {}},
        {"kind": "harbor", "options": {"x": 1}},
        {"kind": "no-such-kind"},
    ],
)
async def test_bad_options_are_refused_before_anything_runs(spec):
    with pytest.raises(ConfigError):
        verifier_for(msgspec.convert(spec, VerifierSpec))


async def test_steps_gate_and_combine():
    steps = tuple(
        Step(name=name, instruction="x", min_reward=gate) for name, gate in (("a", {"reward": 0.5}), ("b", None))
    )
    task = ry.Task(id="t", instruction="", steps=steps)
    good = ry.Verdict(reward=1.0, parts={"reward": 1.0, "style": 0.5}, grade="sealed")
    bad = ry.Verdict(reward=0.25, parts={"reward": 0.25}, grade="shared")
    none = ry.Verdict(status="failed")
    assert may_go_on(steps[0], good)
    assert not may_go_on(steps[0], bad)
    assert not may_go_on(steps[0], none)
    assert may_go_on(steps[1], none)
    assert not may_go_on(Step(name="c", instruction="x", min_reward={"style": 0.1}), bad)
    both = combine(task, (good, bad))
    assert both.parts == {"reward": 0.625, "style": 0.25}
    assert (both.reward, both.grade) == (0.625, "shared")
    assert combine(task, (good, none)).reward == 1.0
    assert combine(task, (none,)).reward is None
    final = msgspec.structs.replace(task, step_reward="final")
    assert combine(final, (good, bad)).reward == 0.25
