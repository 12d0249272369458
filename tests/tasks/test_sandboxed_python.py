"""The Python verifier of a task from elsewhere runs in a sandbox of its own, and gives what it would give in this process."""

import json

import msgspec
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.core.rollout import Rollout
from rollyard.core.sandbox import SandboxSpec
from rollyard.policy.scripted_policy import scripted
from rollyard.tasks.lint import lint
from rollyard.tasks.verifiers import verifier_for
from rollyard.tasks.verifiers.sandbox import VerifierSandbox
from rollyard.tasks.verifiers.sandboxed_python import sandboxed_python

pytestmark = [pytest.mark.anyio]


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """A user of its own, who works in `own`; everything beside it comes from elsewhere."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOST_SECRET", "very secret")
    (tmp_path / "own").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "own")


@pytest.fixture
def load(tmp_path):
    """A task from elsewhere that this code judges; `verifier` takes the place of its verifier."""

    def load(code, verifier=None):
        file, rows = tmp_path / "elsewhere" / "judge.py", tmp_path / "elsewhere" / "rows.jsonl"
        file.write_text(code)
        python = {"kind": "python", "options": {"ref": f"{file}:check"}}
        text = json.dumps({"instruction": "x", "files": {"out.txt": "42\n"}, "verifier": verifier or python})
        rows.write_text(text.replace("JUDGE", f"{file}:check") + "\n")
        (task,) = ry.Taskset.load(rows)
        assert not task.trusted
        return task

    return load


async def judge(task, backend, **options):
    done = await ry.run_rollout(task, agent="nop", policy=scripted([]), sandbox=backend, **options)
    assert done.verdict is not None, done.failure
    return done.verdict


HONEST = {
    "number": "def check(sandbox, rollout):\n    return 0.25\n",
    "boolean": "async def check(sandbox, rollout):\n    return True\n",
    "nothing": "def check(sandbox, rollout):\n    return None\n",
    "parts": "def check(sandbox, rollout):\n    return {'reward': 0.5, 'style': 1}\n",
    "no number": "def check(sandbox, rollout):\n    return float('nan')\n",
    "wrong type": "def check(sandbox, rollout):\n    return object()\n",
    "commands": """
import rollyard as ry
@ry.verifier
async def check(sandbox, rollout):
    done = await sandbox.exec(["cat", "out.txt"], timeout=60)
    more = await sandbox.exec("exit 3", timeout=60)
    return ry.Verdict(reward=float(done.ok), checks={"cat": done.ok, "more": more.ok}, log=done.text + str(more.exit_code))
""",
    "files": """
from rollyard.core.errors import PathError
async def check(sandbox, rollout):
    await sandbox.mkdir(sandbox.cwd + "/new")
    await sandbox.write(sandbox.cwd + "/new/x", bytes(range(256)))
    assert await sandbox.read(sandbox.cwd + "/new/x") == bytes(range(256))
    assert (await sandbox.stat(sandbox.cwd + "/out.txt")).size == 3
    assert {s.path.rpartition("/")[2] for s in await sandbox.list_dir(sandbox.cwd)} >= {"out.txt", "new"}
    await sandbox.remove(sandbox.cwd + "/new")
    try:
        await sandbox.read_text(sandbox.cwd + "/new/x")
    except PathError as error:
        return {"gone": float(error.errno_name == "ENOENT"), "exists": float(await sandbox.exists(sandbox.cwd + "/new"))}
""",
    "rollout": """
def check(sandbox, rollout):
    assert rollout.task.files[0].data == b"42\\n" and rollout.task_id == rollout.task.id and rollout.turns == []
    return 1.0 if (rollout.agent, rollout.status, rollout.log, sandbox.cwd) == ("nop", "completed", b"", "/app") else 0.0
""",
    "at once": """
import asyncio
async def check(sandbox, rollout):
    wait = sandbox.exec("until [ -e go ]; do sleep 0.05; done", timeout=60)
    done, _ = await asyncio.gather(wait, sandbox.exec("touch go", timeout=60))
    return done.ok
""",
    "job": """
async def check(sandbox, rollout):
    job = await sandbox.start("read line; echo got $line", stdin=True)
    await job.write(b"this\\n")
    return float((await job.wait()).stdout == b"got this\\n")
""",
    "error": "def check(sandbox, rollout):\n    return 1 / 0\n",
}


REWARDS = {
    "number": 0.25,
    "boolean": 1.0,
    "parts": 0.5,
    "commands": 1.0,
    "files": 0.5,
    "rollout": 1.0,
    "at once": 1.0,
    "job": 1.0,
}


async def test_a_check_gives_the_same_in_a_sandbox_as_in_this_process(load, backend, tmp_path):
    place = SandboxSpec()
    async with backend.open(place) as sandbox:
        await sandbox.mkdir("/app")
        await sandbox.write("/app/out.txt", "42\n")
        for name, code in HONEST.items():
            task = load(code)
            file = tmp_path / f"{name.replace(' ', '_')}.py"  # a file is loaded once in a process
            file.write_text(code)
            here_spec = msgspec.structs.replace(task.verifier, options={"ref": f"{file}:check"})
            found = []
            for check in (sandboxed_python(task.verifier, backend, place), verifier_for(here_spec)):
                records = []
                box = VerifierSandbox(sandbox, env={}, cwd="/app", user=None, record=records.append)
                verdict = await check(box, Rollout(id="ro_test", task=task, agent="nop"))
                if verdict.error and "ZeroDivisionError" in verdict.error:
                    assert "1 / 0" in verdict.log
                    verdict = msgspec.structs.replace(verdict, log="")  # tracebacks name the files
                found.append((verdict, sorted((record.command, record.exit_code) for record in records)))
            assert found[0] == found[1], name
            assert found[0][0].reward == REWARDS.get(name), name


async def test_a_rollout_of_a_task_from_elsewhere_has_its_reward(load, backend):
    task = load(HONEST["commands"])
    assert (await judge(task, backend)).reward == (await judge(task, backend, trust_tasks=True)).reward == 1.0


SPY = """
import os, pathlib, socket
pathlib.Path("MARK").touch() if pathlib.Path("MARK").parent.exists() else None
def connects():
    try:
        socket.create_connection(("127.0.0.1", PORT), 2).close()
        return 1.0
    except OSError:
        return 0.0
def check(sandbox, rollout):
    return {"reward": 0.5, "secret": float("HOST_SECRET" in os.environ), "connects": connects(),
            "file": float(os.path.exists("FILE")), "runner": float(os.path.exists("/proc/PID/root/proc"))}
"""


@pytest.mark.adversarial
@pytest.mark.parametrize("nested", [False, True])
async def test_the_authors_code_sees_nothing_of_the_host(nested, load, backend, tmp_path, free_port_server):
    mark, file = tmp_path / "mark", tmp_path / "secret.txt"
    file.write_text("secret")
    code = SPY.replace("MARK", str(mark)).replace("FILE", str(file)).replace("PORT", str(free_port_server))
    part = {"kind": "python", "options": {"ref": "JUDGE"}}
    task = load(code, {"kind": "weighted", "options": {"verifiers": {"a": part}}} if nested else None)
    assert not [finding for finding in lint(task) if finding.level == "error"]
    assert not mark.exists()
    verdict = await judge(task, backend)
    assert not mark.exists()
    prefix = "a." if nested else ""
    assert verdict.reward == 0.5, verdict
    assert {name: verdict.parts[f"{prefix}{name}"] for name in ("secret", "connects", "file")} == {
        "secret": 0.0, "connects": 0.0, "file": 0.0
    }  # fmt: skip


@pytest.fixture
async def free_port_server():
    import anyio

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener:
        yield listener.extra(anyio.abc.SocketAttribute.local_port)


# the pipe to the runner is a copy of what was stdout: the code may look for it
SAY = """
import os
def say(data):
    for number in range(3, 20):
        try:
            os.write(number, data)
        except OSError:
            pass
"""
LYING = {
    "a message without end": "def check(s, r):\n    while True: say(b'x' * 2**20)\n",
    "no message": "def check(s, r):\n    say(b'[[[[\\n')\n    return 1.0\n",
    "another number": 'def check(s, r):\n    say(b\'{"id": [1], "call": 7}\\n\')\n    return 1.0\n',
    "a call that is none": "async def check(s, r):\n    return await s.snapshot()\n",
    "a folder of the host": "async def check(s, r):\n    await s.upload_dir('/etc', '/app/etc')\n    return 1.0\n",
    "a download": "async def check(s, r):\n    await s.download_dir('/app', 'TMP')\n    return 1.0\n",
    "private parts": "async def check(s, r):\n    return await s._link.ask('_exec', 1)\n",
    "a type of ours": "async def check(s, r):\n    return await s._link.ask('rollout', '__class__')\n",
    "no end": "def check(s, r):\n    while True: pass\n",
    "jobs without end": "async def check(s, r):\n    for _ in range(9): await s.start('true')\n    return 1.0\n",
    "an early exit": "def check(s, r):\n    os._exit(0)\n",
}


@pytest.mark.adversarial
@pytest.mark.parametrize("attack", LYING)
async def test_a_check_that_lies_to_the_runner_has_no_reward(attack, load, backend, tmp_path):
    code = SAY + LYING[attack].replace("TMP", str(tmp_path / "taken"))
    verdict = await judge(load(code), backend, limits=ry.Limits(verify=2.0 if attack == "no end" else 60.0))
    assert (verdict.reward, verdict.status) == (None, "failed"), verdict
    assert verdict.error
    assert not (tmp_path / "taken").exists()


@pytest.mark.adversarial
async def test_programs_of_the_agent_do_not_meet_the_check(load, backend):
    """The check runs what the agent left, as the same user: in one sandbox that program could change the check's memory."""
    code = """
async def check(sandbox, rollout):
    seen = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\\\0' ' '; ls /", timeout=60)
    return 0.0 if "check.py" in seen.text or "rollyard-verifier" in seen.text else 1.0
"""
    assert (await judge(load(code), backend)).reward == 1.0


@pytest.mark.adversarial
@pytest.mark.parametrize(
    "verifier",
    [
        {"kind": "antigravity:fly"},
        {"kind": "python", "options": {"ref": "antigravity:fly"}},
        {"kind": "weighted", "options": {"verifiers": {"a": {"kind": "antigravity:fly"}}}},
        {
            "kind": "weighted",
            "options": {"verifiers": {"a": {"kind": "python", "options": {"ref": "antigravity:fly"}}}},
        },
    ],
)
async def test_a_verifiers_name_imports_no_module_here(verifier, load, backend):
    import sys

    task = load("", verifier)
    assert any(finding.level == "error" for finding in lint(task))
    with pytest.raises(ConfigError, match="antigravity"):
        await judge(task, backend)
    assert "antigravity" not in sys.modules


@pytest.mark.adversarial
@pytest.mark.parametrize(
    "part",
    [{"kind": "diff", "options": {"folder": "/etc"}}, {"kind": "python", "options": {"ref": "/etc/judge.py:check"}}],
)
async def test_a_part_of_a_verifier_names_no_file_of_the_host(part, load):
    for verifier in (part, {"kind": "weighted", "options": {"verifiers": {"a": part}}}):
        with pytest.raises(ConfigError, match="is outside"):
            load("", verifier)
