"""Local sandboxes whose programs run in a virtual machine: the same sandbox, a kernel of its own and no network device."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import IsolationTooWeak, PathError, Unsupported
from rollyard.core.limits import Limits
from rollyard.core.sandbox import Volume
from rollyard.sandbox.local import guest_image, microvm
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.sandbox.local.inner.streams import Streams

pytestmark = pytest.mark.anyio
MICROVM = ry.SandboxSpec(min_isolation="microvm", boot_s=300.0, resources=ry.Resources(memory_mb=512, pids=200, cpus=1))
SLOW = Limits(boot=300.0, setup=600.0, agent=600.0, verify=600.0)

SERVER = """
import socket
server = socket.create_server(('127.0.0.1', 8100))
print('up', flush=True)
server.accept()[0].sendall(b'hi')
"""


def why_not() -> str:
    try:
        microvm.MicrovmUse(always=True, level="full", root=Path("/nowhere")).takes(MICROVM)
    except IsolationTooWeak as error:
        return str(error)
    return ""


needs_machine = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is qemu and a kernel")


@needs_machine
@pytest.mark.slow
async def test_programs_have_a_kernel_of_their_own_and_the_sandboxs_files_users_and_exit_codes(backend):
    async with backend.open(MICROVM) as box:
        assert (box.info.isolation, box.capabilities.isolation) == ("microvm", "microvm")
        await box.write("/tmp/in", b"given")
        script = "uname -r; cat in; id -u; echo made > out; ls -d /sys/class/net/* /dev/microvm; echo told >&2; exit 3"
        done = await box.exec(script, cwd="/tmp", user="agent", timeout=200)
        version, rest = done.stdout.decode().splitlines()
        assert (f"vmlinuz-{version}", rest, done.exit_code) == (microvm.find_kernel().name, "given1000", 3)
        assert b"told" in done.stderr and await box.exists("/dev/microvm")  # which is not in the guest
        assert await box.read("/tmp/out") == b"made\n"
        data = os.urandom(3_000_000)
        fed = await box.exec(["cat"], stdin=data, timeout=200)
        assert fed.stdout == data
        for missing, name in (("no-such-program", "ENOENT"), ("/etc/passwd", "EACCES")):
            with pytest.raises(PathError, match=name):
                await box.exec([missing], timeout=200)
        assert (await box.exec("kill -9 $$", timeout=200)).signal == 9
        hungry = await box.exec(["sh", "-c", "exec tail /dev/zero"], timeout=300)
        assert (hungry.exit_code, hungry.oom) == (None, True)
        image = await box.snapshot()
    async with backend.open(ry.SandboxSpec(image=image)) as again:
        assert await again.read("/tmp/out") == b"made\n"


@needs_machine
@pytest.mark.slow
async def test_ports_lead_both_ways_and_what_is_killed_is_dead_with_all_that_came_of_it(backend):
    async with backend.pool(MICROVM, 1) as pool:
        box = await pool.take(300)
        listener = await box.listen(8099)
        talk = "exec 3<>/dev/tcp/127.0.0.1/8099; echo hello >&3; cat <&3"
        asking = asyncio.ensure_future(box.exec(["bash", "-c", talk], timeout=200))
        stream = await listener.accept()
        await stream.send(b"got " + await stream.receive())
        await stream.aclose()
        assert (await asking).stdout == b"got hello\n"
        server = await box.start(["python3", "-S", "-c", SERVER])
        async for _ in server.stream():
            break
        inward = await box.dial(8100)
        assert await inward.receive() == b"hi"
        await inward.aclose()
        job = await box.start("(setsid sleep 777 &); echo up; sleep 777")
        async for _ in job.stream():
            break
        await job.kill()
        assert (await job.wait(200)).exit_code is None
        assert (await box.exec("pgrep -x sleep", timeout=200)).stdout == b""
        other = await box.start("echo left > /dev/shm/left; echo up; sleep 777")
        async for _ in other.stream():
            break
        await box.kill_processes()
        assert (await other.wait(200)).signal == 9
        assert (await box.exec("ls /dev/shm", timeout=200)).stdout == b""
        late = await box.exec("echo out; sleep 777", timeout=20)
        assert (late.timed_out, late.stdout) == (True, b"out\n")
        assert await box.kill()
    assert await backend.list() == []


@needs_machine
@pytest.mark.slow
async def test_a_rollout_reaches_the_gate_from_there(backend):
    script = ry.policy.scripted({"steps": [{"shell": "uname -r > out.txt"}, {"text": "done"}]})
    check = [f'test "vmlinuz-$(cat out.txt)" = {microvm.find_kernel().name}']
    options = {"sandbox": backend, "min_isolation": "microvm", "verify": check, "limits": SLOW}
    done = await ry.run_rollout("x", agent="shell-agent", policy=script, **options)
    assert (done.failure, done.reward, done.isolation, done.calls) == (None, 1.0, "microvm", 2)


def _pretend_programs(folder: Path, monkeypatch) -> None:
    folder.mkdir()
    for name in microvm.PROGRAMS:
        (folder / name).symlink_to("/usr/bin/true")
    monkeypatch.setenv("PATH", str(folder))


async def test_without_its_programs_a_kernel_or_namespaces_it_is_refused_by_name(backend, tmp_path, monkeypatch):
    kernel = tmp_path / "boot/vmlinuz-1.2.3"
    monkeypatch.setenv("ROLLYARD_MICROVM_KERNEL", str(kernel))
    weak = LocalBackend(root=tmp_path / "weak", level="landlock", isolation="microvm")
    with pytest.raises(IsolationTooWeak, match="the level here is 'landlock'"):
        weak.open(ry.SandboxSpec())
    _pretend_programs(tmp_path / "bin", monkeypatch)
    with pytest.raises(IsolationTooWeak, match="needs a kernel, and there is none at .*linux-image-cloud-amd64"):
        backend.open(MICROVM)
    kernel.parent.mkdir()
    kernel.touch()
    with pytest.raises(IsolationTooWeak, match="the modules of the kernel .* are not in"):
        backend.open(MICROVM)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(IsolationTooWeak, match="needs qemu-system-x86_64, which is not below /usr .*apt-get install"):
        backend.open(MICROVM)


async def test_what_a_guest_cannot_have_is_refused_by_name(backend, tmp_path, monkeypatch):
    (tmp_path / "boot").mkdir()
    (tmp_path / "lib/modules/1.2.3").mkdir(parents=True)
    (tmp_path / "boot/vmlinuz-1.2.3").touch()
    monkeypatch.setenv("ROLLYARD_MICROVM_KERNEL", str(tmp_path / "boot/vmlinuz-1.2.3"))
    _pretend_programs(tmp_path / "bin", monkeypatch)
    asked = {"network": "allowlist", "allowed_hosts": ("example.com",), "options": {"nesting": "yes"}}
    spec = ry.SandboxSpec(min_isolation="microvm", allow_unsafe=True, volumes=(Volume(name="v", path="/v"),), **asked)
    with pytest.raises(Unsupported, match="no network='allowlist' and no services and volumes and no options.nesting"):
        backend.open(spec)


def test_a_kernels_modules_come_after_those_they_need(tmp_path):
    kernel = tmp_path / "boot/vmlinuz-1.2.3"
    folder = tmp_path / "lib/modules/1.2.3"
    folder.mkdir(parents=True)
    needs = {
        "virtio_mmio": "virtio_ring,virtio",
        "virtio-ring": "virtio",
        "virtio": "",
        "virtio_console": "virtio_ring",
    }
    for name, needed in needs.items():
        (folder / f"{name}.ko").write_bytes(b"\x7fELF\0license=GPL\0depends=" + needed.encode() + b"\0")
    with pytest.raises(IsolationTooWeak, match="has no module virtiofs"):
        guest_image.find_drivers(kernel)
    (folder / "virtiofs.ko").write_bytes(b"\0depends=fuse\0")
    (folder / "modules.builtin").write_text("kernel/fs/fuse/fuse.ko\n")
    found = [path.stem for path in guest_image.find_drivers(kernel)]
    assert found == ["virtio", "virtio-ring", "virtio_mmio", "virtio_console", "virtiofs"]


class End:
    """One end of a serial port, served by a thread until the other is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self.heard: list[tuple[int, object]] = []
        self.streams = Streams(sock.fileno(), lambda *said: self.heard.append(said), self._stop)
        self.thread = threading.Thread(target=self._serve)

    def _stop(self) -> None:
        raise EOFError

    def _serve(self) -> None:
        try:
            self.streams.serve()
        except EOFError:
            pass


def test_a_stream_that_nobody_reads_holds_up_no_other_and_bytes_arrive_as_they_were():
    ours, theirs = socket.socketpair()
    left, right = End(ours), End(theirs)
    stuck, busy = (os.pipe(), os.pipe()), (os.pipe(), os.pipe())
    for number, (source, sink) in ((5, stuck), (6, busy)):
        left.streams.carry(number, source=source[0])
        right.streams.carry(number, sink=sink[1])
    for end in (left, right):
        end.thread.start()
    data = os.urandom(2**21)
    feeders = [threading.Thread(target=_feed, args=(pipes[0][1], data)) for pipes in (stuck, busy)]
    for feeder in feeders:
        feeder.start()
    assert _read_all(busy[1][0]) == data
    assert _read_all(stuck[1][0]) == data
    for feeder in feeders:
        feeder.join()
    ours.shutdown(socket.SHUT_RDWR)
    for end in (left, right):
        end.thread.join()
    ours.close()
    theirs.close()


def _feed(fd: int, data: bytes) -> None:
    with open(fd, "wb") as file:
        file.write(data)


def _read_all(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()
