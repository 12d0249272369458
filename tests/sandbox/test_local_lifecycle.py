"""Lives of local sandboxes: opening, attaching, ending in time, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import (
    ConfigError,
    IsolationTooWeak,
    SandboxError,
    SandboxGone,
    SandboxUnavailable,
    UnknownName,
    Unsupported,
)
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.sandbox.retry import OpenLimits
from tests.waiting import until

pytestmark = pytest.mark.anyio


def homes(backend: LocalBackend) -> list[str]:
    return os.listdir(backend.root / "boxes")


async def until_gone(backend: LocalBackend) -> None:
    async with asyncio.timeout(20):
        while homes(backend):
            await asyncio.sleep(0.02)


async def test_leaving_the_block_leaves_nothing(tmp_path):
    async with LocalBackend(root=tmp_path) as backend:
        async with backend.open(ry.SandboxSpec()) as box:
            await box.exec("touch /usr/new /tmp/new", timeout=10)
        assert not await box.alive()
    assert homes(backend) == []
    assert not Path("/usr/new").exists()


async def test_what_dead_sandboxes_left_is_removed_also_when_the_process_that_removes_is_killed(backend):
    async with backend.open(ry.SandboxSpec()) as box:
        zygote = int(Path(f"/proc/{box.info.pid}/stat").read_text().rpartition(")")[2].split()[1])
    await until_gone(backend)
    children = Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()
    (janitor,) = (int(pid) for pid in children if not is_in_a_sandbox(pid))
    os.kill(janitor, signal.SIGSTOP)
    for _ in range(3):
        await (await backend.open(ry.SandboxSpec())).kill()
    assert len(homes(backend)) == 3
    os.kill(janitor, signal.SIGKILL)
    await until_gone(backend)
    await (await backend.open(ry.SandboxSpec())).kill()
    await until_gone(backend)


def is_in_a_sandbox(pid: str) -> bool:
    return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")


async def test_twenty_open_at_once_and_share_nothing(backend):
    boxes = await asyncio.gather(*(backend.open(ry.SandboxSpec(env={"N": str(n)})) for n in range(20)))
    outputs = await asyncio.gather(
        *(box.exec("echo $N > /tmp/n; sleep 0.1; cat /tmp/n; hostname", timeout=30) for box in boxes)
    )
    assert [done.stdout for done in outputs] == [f"{n}\nsandbox\n".encode() for n in range(20)]
    assert len({box.id for box in boxes}) == 20
    await asyncio.gather(*(box.kill() for box in boxes))
    await until_gone(backend)


async def test_a_cancelled_open_leaves_nothing(backend):
    for delay in (0, 0.001, 0.002, 0.004, 0.01, 0.05):
        opening = asyncio.ensure_future(backend.open(ry.SandboxSpec()))
        await asyncio.sleep(delay)
        opening.cancel()
        result = (await asyncio.gather(opening, return_exceptions=True))[0]
        if not isinstance(result, BaseException):
            await result.kill()
    await until_gone(backend)
    assert await backend.list() == []


async def test_labels_find_sandboxes_and_reap_ends_only_those(backend):
    mine = await backend.open(ry.SandboxSpec(labels={"run": "a"}))
    other = await backend.open(ry.SandboxSpec(labels={"run": "b"}))
    assert [info.id for info in await backend.list({"run": "a"})] == [mine.id]
    assert await backend.reap({"run": "a"}) == [mine.id]
    assert (await mine.alive(), await other.alive()) == (False, True)
    assert await backend.reap() == []
    assert await backend.reap({"run": "b"}, older_than=3600) == []
    assert await other.alive()


async def test_the_time_to_live_ends_it_and_can_be_extended(backend):
    short = await backend.open(ry.SandboxSpec(ttl_s=0.5))
    longer = await backend.open(ry.SandboxSpec(ttl_s=0.5))
    await longer.extend(60)
    job = await short.start(["sleep", "100"])
    async with asyncio.timeout(10):
        assert (await job.wait()).lost
    with pytest.raises(SandboxGone):
        await short.exec(["true"], timeout=5)
    assert await longer.alive()


async def test_idleness_ends_it_but_a_running_program_is_not_idle(backend):
    idle = await backend.open(ry.SandboxSpec(idle_ttl_s=0.4))
    busy = await backend.open(ry.SandboxSpec(idle_ttl_s=0.4))
    job = await busy.start(["sleep", "1.2"])
    async with asyncio.timeout(10):
        while not idle.dead:
            await asyncio.sleep(0.05)
    assert (await job.wait(10)).exit_code == 0
    async with asyncio.timeout(10):
        while not busy.dead:
            await asyncio.sleep(0.05)


ATTACH = """
import asyncio, sys, rollyard as ry
async def main(root, sandbox_id):
    async with ry.sandbox.backend("local", root=root) as backend:
        box = await backend.attach(sandbox_id)
        job = await box.job("counting")
        text = b"".join([chunk async for _, chunk in job.stream(2)])
        done = await job.wait(10)
        print(text, done.exit_code, (await box.exec("cat /tmp/mark", timeout=5)).stdout)
asyncio.run(main(*sys.argv[1:]))
"""


async def run_python(code: str, *args: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return output.decode()


async def test_another_process_attaches_and_finds_jobs_by_id(backend):
    box = await backend.open(ry.SandboxSpec())
    await box.write("/tmp/mark", "found")
    await box.start("for i in 1 2 3; do echo $i; sleep 0.3; done; exit 6", job_id="counting")
    printed = await run_python(ATTACH, str(backend.root), box.id)
    assert printed == "b'2\\n3\\n' 6 b'found'\n"
    assert await box.alive(), "whoever attached has gone; the owner has not"


OPEN_AND_LEAVE = """
import asyncio, os, sys, rollyard as ry
async def main(root, lifetime):
    backend = ry.sandbox.backend("local", root=root)
    await backend.__aenter__()
    box = await backend.open(ry.SandboxSpec(lifetime=lifetime, ttl_s=300))
    await box.start("sleep 1000", job_id="long")
    print(box.id, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main(*sys.argv[1:]))
"""


async def test_an_owner_that_is_killed_takes_its_sandbox_along_and_nothing_is_left(backend):
    sandbox_id = (await run_python(OPEN_AND_LEAVE, str(backend.root), "owner")).strip()
    assert sandbox_id.startswith("sbx_")
    await until_gone(backend)
    with pytest.raises(SandboxGone):
        await backend.attach(sandbox_id)


async def test_a_sandbox_with_a_lifetime_of_its_own_survives_its_owner_until_killed(backend):
    sandbox_id = (await run_python(OPEN_AND_LEAVE, str(backend.root), "ttl")).strip()
    box = await backend.attach(sandbox_id)
    assert await (await box.job("long")).poll() is None
    assert await box.kill()
    await until_gone(backend)


async def test_a_pool_hands_out_ready_sandboxes_and_refills(backend):
    async with backend.pool(ry.SandboxSpec(), 2) as pool:
        boxes = [await pool.take() for _ in range(5)]
        assert len({box.id for box in boxes}) == 5
        assert all([(await box.exec(["true"], timeout=10)).ok for box in boxes])
        await asyncio.gather(*(box.kill() for box in boxes))
    await until_gone(backend)


async def test_a_snapshot_carries_files_removals_and_modes_and_siblings_differ(backend):
    for disk in ("disk", "tmpfs"):
        async with backend.open(ry.SandboxSpec(disk=disk)) as base:
            await base.exec(
                "echo one > /workspace/f; echo x > /usr/made; rm /etc/hostname; chmod 640 /workspace/f", timeout=10
            )
            await base.exec("chown agent /workspace/f", timeout=10)
            image = await base.snapshot()
            assert (await base.exec("echo later > /workspace/f; cat /workspace/f", timeout=10)).stdout == b"later\n"
        async with backend.open(ry.SandboxSpec(image=image)) as a, backend.open(ry.SandboxSpec(image=image)) as b:
            await a.write("/workspace/f", "changed")
            seen = await b.exec(
                "cat /workspace/f /usr/made; stat -c '%a %U' /workspace/f; test -e /etc/hostname", timeout=10
            )
            assert (seen.stdout, seen.exit_code) == (b"one\nx\n640 agent\n", 1)
            again = await a.snapshot()
        async with backend.open(ry.SandboxSpec(image=again)) as c:
            assert await c.read("/workspace/f") == b"changed"


async def test_pausing_stops_programs_and_resuming_lets_them_go_on(box):
    job = await box.start("while :; do echo x; sleep 0.02; done")
    await until(job.tail)
    await box.pause()
    before = len(await job.tail(10**6))
    await asyncio.sleep(0.3)
    assert len(await job.tail(10**6)) - before <= 2
    await box.resume()
    async with asyncio.timeout(10):
        while len(await job.tail(10**6)) <= before + 4:
            await asyncio.sleep(0.05)
    await job.kill()


async def test_the_host_serves_on_a_port_inside_and_dials_into_one(box):
    listener = await box.listen()

    async def answer() -> None:
        stream = await listener.accept()
        await stream.send(b"got " + await stream.receive())
        await stream.aclose()

    serving = asyncio.create_task(answer())
    code = "import socket,sys; s=socket.create_connection(('127.0.0.1',int(sys.argv[1]))); s.send(b'hi'); print(s.recv(99))"
    done = await box.exec(["python3", "-c", code, str(listener.port)], timeout=20)
    await serving
    assert done.stdout == b"b'got hi'\n", done.text
    await listener.aclose()

    server = "import socket; s=socket.create_server(('127.0.0.1',7070)); print(1,flush=True); c,_=s.accept(); c.send(c.recv(9))"
    job = await box.start(["python3", "-c", server])
    async for _ in job.stream():
        break
    stream = await box.dial(7070)
    await stream.send(b"echo")
    assert await stream.receive() == b"echo"
    await stream.aclose()


async def test_the_hosts_network_is_an_explicit_choice(backend):

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        code = "import socket,sys; socket.create_connection(('127.0.0.1',int(sys.argv[1])),5); print('reached')"
        async with backend.open(ry.SandboxSpec(network="host", allow_unsafe=True)) as box:
            assert (await box.exec(["python3", "-c", code, port], timeout=20)).stdout == b"reached\n"


async def test_nesting_lets_a_program_make_namespaces_and_only_when_asked(backend):
    with pytest.raises(ConfigError):
        backend.open(ry.SandboxSpec(options={"nesting": "yes"}))
    async with backend.open(ry.SandboxSpec(options={"nesting": "yes"}, allow_unsafe=True)) as box:
        done = await box.exec("unshare -U -r -m -p --fork sh -c 'mount -t tmpfs none /mnt && echo nested'", timeout=20)
        assert done.stdout == b"nested\n", done.text


async def test_a_mount_shows_an_allowed_directory_read_only_unless_asked(backend, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "data").write_text("host")
    mounts = (ry.Mount(local_dir="/data", remote_dir=str(shared)),)
    async with backend.open(ry.SandboxSpec(mounts=mounts)) as box:
        assert await box.read("/data/data") == b"host"
        assert (await box.exec("touch /data/new", timeout=10)).exit_code == 1
    mounts = (ry.Mount(local_dir="/data", remote_dir=str(shared), writable=True),)
    async with backend.open(ry.SandboxSpec(mounts=mounts)) as box:
        assert (await box.exec("echo back > /data/new", timeout=10)).exit_code == 0
    assert (shared / "new").read_text() == "back\n"
    with pytest.raises(ConfigError, match="not allowed"):
        backend.open(ry.SandboxSpec(mounts=(ry.Mount(local_dir="/etc2", remote_dir="/etc"),)))


async def test_bad_input_is_refused_with_a_next_step_and_nothing_is_started(backend, monkeypatch):
    monkeypatch.setenv("ROLLYARD_MICROVM_KERNEL", "/no/such/kernel")
    with pytest.raises(UnknownName) as unknown:
        await backend.open(ry.SandboxSpec(image="no-such-image"))
    with pytest.raises(IsolationTooWeak) as weak:
        backend.open(ry.SandboxSpec(min_isolation="microvm"))
    with pytest.raises(ConfigError) as network:
        backend.open(ry.SandboxSpec(network="host"))
    with pytest.raises(Unsupported) as option:
        backend.open(ry.SandboxSpec(options={"privileged": "yes"}))
    for error in (unknown, weak, network, option):
        assert error.value.hint
    with pytest.raises(ConfigError):
        ry.SandboxSpec(resources=ry.Resources(memory_mb=-1))
    with pytest.raises(UnknownName):
        ry.sandbox.backend("locall")
    assert homes(backend) == []


async def test_a_limit_on_live_sandboxes_is_a_typed_refusal(tmp_path):
    async with LocalBackend(root=tmp_path, limits=OpenLimits(live=1, attempts=1)) as backend:
        async with backend.open(ry.SandboxSpec()):
            with pytest.raises(SandboxUnavailable):
                await backend.open(ry.SandboxSpec())
        async with backend.open(ry.SandboxSpec()) as box:
            assert await box.alive()


async def test_a_new_end_and_a_pause_are_seen_by_everybody(backend, tmp_path):
    async with backend.open(ry.SandboxSpec(ttl_s=60)) as box, LocalBackend(root=tmp_path / "home") as other:
        await box.extend(5000)
        (seen,) = await other.list()
        assert seen.expires_at == box.info.expires_at > time.time() + 4000
        theirs = await other.attach(box.id)
        assert theirs.info.expires_at == seen.expires_at
        if box.capabilities.pause:
            await theirs.pause()
            assert [info.state for info in await backend.list()] == ["paused"]
            await box.resume()
        assert [(info.state, info.pid) for info in await other.list()] == [("running", box.info.pid)]


async def test_reaping_what_is_still_being_made_breaks_nobody(backend):
    """Whoever takes over an attempt reaps while its former owner may be in the middle of opening."""
    spec = ry.SandboxSpec(labels={"reaped": "yes"})
    over = False

    async def opening():
        for _ in range(6):
            with contextlib.suppress(SandboxError):  # it was reaped under our hands
                async with backend.open(spec):
                    await asyncio.sleep(0.01)

    async def reaping():
        while not over:
            await backend.reap({"reaped": "yes"})
            await asyncio.sleep(0)

    reaper = asyncio.create_task(reaping())
    async with asyncio.timeout(120):
        await asyncio.gather(*(opening() for _ in range(3)))
    over = True
    await reaper
    assert await backend.list({"reaped": "yes"}) == []
