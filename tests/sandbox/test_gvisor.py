"""Local sandboxes whose programs run in gVisor: the same sandbox, another kernel."""

from __future__ import annotations

import shutil

import pytest

import rollyard as ry
from rollyard.core.errors import IsolationTooWeak, PathError
from rollyard.core.limits import Limits
from rollyard.sandbox.local.backend import LocalBackend

pytestmark = pytest.mark.anyio
GVISOR = ry.SandboxSpec(min_isolation="gvisor")
needs_runsc = pytest.mark.skipif(
    shutil.which("runsc") is None, reason="runsc is not installed (Debian: apt-get install runsc)"
)
SLOW = Limits(boot=120.0, setup=300.0, agent=300.0, verify=600.0)
KERNEL = "read -r _ _ version _ < /proc/version; echo $version"


@pytest.fixture
async def gvisor(backend):
    async with backend.open(GVISOR) as opened:
        yield opened


@needs_runsc
@pytest.mark.slow
async def test_programs_have_another_kernel_and_the_sandboxs_files_users_and_exit_codes(backend, gvisor, box):
    assert (gvisor.info.isolation, gvisor.capabilities.isolation, box.info.isolation) == (
        "gvisor",
        "gvisor",
        "namespace",
    )
    await gvisor.exec("echo given > /tmp/in", timeout=120)
    done = await gvisor.exec(f"{KERNEL}; cat in; id -u; echo made > out; exit 3", cwd="/tmp", user="agent", timeout=120)
    version, given, uid = done.stdout.decode().splitlines()
    assert version == "4.4.0" != (await box.exec(KERNEL, timeout=20)).stdout.decode().strip()
    assert (given, uid, done.exit_code, await gvisor.read("/tmp/out")) == ("given", "1000", 3, b"made\n")
    fed = await gvisor.exec(["cat"], stdin=b"fed", timeout=120)
    assert fed.stdout == b"fed"
    for missing, name in (("no-such-program", "ENOENT"), ("/etc/passwd", "EACCES")):
        with pytest.raises(PathError, match=name):
            await gvisor.exec([missing], timeout=120)
    assert "/dev/gvisor" not in (await gvisor.exec("echo /dev/*", timeout=120)).text


@needs_runsc
@pytest.mark.slow
async def test_a_rollout_reaches_the_gate_from_there_and_its_programs_are_dead_before_the_verdict(backend):
    line = f"({KERNEL}) > out.txt; setsid sleep 999 > /dev/null 2>&1 &"
    script = ry.policy.scripted({"steps": [{"shell": line}, {"text": "done"}]})
    check = ['test "$(cat out.txt)" = 4.4.0']
    options = {"sandbox": backend, "min_isolation": "gvisor", "verify": check, "limits": SLOW}
    done = await ry.run_rollout("x", agent="shell-agent", policy=script, **options)
    assert (done.failure, done.reward, done.isolation, done.calls) == (None, 1.0, "gvisor", 2)


@needs_runsc
@pytest.mark.slow
async def test_killing_a_job_or_the_sandbox_ends_its_kernel(backend, gvisor):
    job = await gvisor.start("echo up; sleep 999")
    async for _, data in job.stream():
        assert data == b"up\n"
        break
    await job.kill()
    assert (await job.wait(60)).exit_code is None
    second = await gvisor.start("sleep 999")
    await gvisor.kill_processes()
    await second.wait(60)
    assert (await gvisor.exec("echo still here", timeout=120)).ok


async def test_without_runsc_or_namespaces_it_is_refused_by_name(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(IsolationTooWeak, match="needs runsc, which is not on this machine"):
        backend.open(GVISOR)
    monkeypatch.setenv("ROLLYARD_RUNSC", "/bin/true")
    with pytest.raises(IsolationTooWeak, match="cannot run programs here: it ended with 0"):
        await backend.open(GVISOR)
    assert await backend.list() == []
    weak = LocalBackend(root=tmp_path / "weak", level="landlock", isolation="gvisor")
    with pytest.raises(IsolationTooWeak, match="the level here is 'landlock'"):
        weak.open(ry.SandboxSpec())
