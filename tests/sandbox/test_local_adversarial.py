"""Attacks from inside a local sandbox. Each must fail, and the sandbox must survive it."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, SandboxError

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]
EPERM = 1


async def python(box, code: str, *args: str, user: str | None = None) -> str:
    done = await box.exec(["python3", "-I", "-c", code, *args], timeout=60, user=user)
    return done.text.strip()


async def test_homes_the_project_and_the_hosts_tmp_are_absent(box, tmp_path):
    (tmp_path / "secret").write_text("x")
    hidden = [str(tmp_path), str(Path(ry.__file__).parent), str(Path.home() / ".ssh"), str(Path.home() / ".local")]
    for path in hidden:
        assert not await box.exists(path), path
    assert (await box.exec("cat /etc/shadow", timeout=10)).stdout == b""
    found = await box.exec("ls -A /tmp /mnt /media /srv /run/* | grep -v :", timeout=10)
    assert found.stdout.split() in ([], [b"lock"]), found.text
    assert (await box.exec("ls /home /home/agent", timeout=10)).stdout == b"/home:\nagent\n\n/home/agent:\n"


async def test_only_its_own_processes_exist(box):
    pids = [int(name) for name in (await box.exec("ls /proc", timeout=10)).stdout.split() if name.isdigit()]
    assert set(pids) <= set(range(1, 20)) and len(pids) <= 5


async def test_there_is_loopback_and_nothing_else(box):
    code = """
import socket
print(sorted(name for _, name in socket.if_nameindex()))
print(open('/proc/net/route').read().count('\\n'), open('/proc/net/ipv6_route').read().count(' lo\\n'))
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    s = socket.socket(socket.AF_INET, kind); s.settimeout(5)
    try: s.connect(('192.0.2.1', 9)); print('connected')
    except OSError as e: print(e.errno)
try: socket.getaddrinfo('example.com', 80); print('resolved')
except OSError: print('unresolved')
"""
    lines = (await python(box, code)).splitlines()
    assert lines[0] == "['lo']"
    assert lines[1].startswith("1 ") and lines[2:] == ["101", "101", "unresolved"]


async def test_services_on_the_hosts_loopback_and_abstract_sockets_are_out_of_reach(box):
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        name = f"rollyard-test-{os.getpid()}"
        unix.bind(f"\0{name}")
        unix.listen()
        code = """
import socket, sys
for family, address in ((socket.AF_INET, ('127.0.0.1', int(sys.argv[1]))), (socket.AF_UNIX, '\\0' + sys.argv[2])):
    try: socket.socket(family).connect(address); print('connected')
    except OSError as e: print(e.errno)
"""
        assert await python(box, code, str(tcp.getsockname()[1]), name) == "111\n111"


@pytest.mark.parametrize("family", ["AF_VSOCK", "AF_ALG", "AF_PACKET"])
async def test_socket_families_that_namespaces_do_not_confine_are_refused(box, family):
    code = f"import socket\ntry: socket.socket(socket.{family}, socket.SOCK_DGRAM)\nexcept OSError as e: print(e.errno)"
    assert await python(box, code) == str(EPERM)
    if box.capabilities.users:
        assert await python(box, code, user="agent") == str(EPERM)


async def test_only_four_socket_families_can_be_opened(box):
    code = """
import socket
for family in range(64):
    try: socket.socket(family, socket.SOCK_DGRAM, 0).close(); print(family, 'open')
    except OSError as e: e.errno == 1 or print(family, e.errno)
"""
    opened = [int(line.split()[0]) for line in (await python(box, code)).splitlines()]
    assert set(opened) <= {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}
    assert {socket.AF_UNIX, socket.AF_INET} <= set(opened)


SYSCALLS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for number in map(int, sys.argv[1:]):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0)
    print(number, result, ctypes.get_errno())
"""


async def test_system_calls_that_reach_the_kernel_itself_are_refused(box):
    from rollyard.sandbox.local.inner import seccomp, syscalls

    column = 0 if syscalls.MACHINE == "x86_64" else 1
    numbers = [pair[column] for pair in seccomp.DENIED.values() if pair[column] is not None]
    numbers += [425, 426, 427, 428, 429, 430, 442]
    if column == 0:
        numbers += [0x40000000 + 39, 0x40000000 + 41]  # the x32 table
    printed = await python(box, SYSCALLS, *map(str, numbers))
    assert printed.splitlines() == [f"{number} -1 {EPERM}" for number in numbers]
    assert (await python(box, SYSCALLS, "435")).split()[1:] == ["-1", "38"], "clone3 falls back to clone"


async def test_new_namespaces_and_mounts_are_refused(box):
    for command in (
        "unshare -U true",
        "unshare -m true",
        "mount -t tmpfs none /mnt",
        "mount -t proc proc /mnt",
        "umount /usr",
    ):
        assert (await box.exec(command, timeout=10)).exit_code != 0, command
    assert (await box.exec("ls /usr/bin/env && ls -A /mnt", timeout=10)).stdout == b"/usr/bin/env\n"


async def test_devices_sysctls_and_the_kernel_log_are_refused(box):
    for command in (
        "mknod /tmp/disk b 254 0",
        "mknod /tmp/mem c 1 1",
        "echo 1 > /proc/sys/kernel/sysrq",
        "echo x > /proc/sys/kernel/core_pattern",
        "echo b > /proc/sysrq-trigger",
        "dmesg",
        "cat /proc/kcore",
        "cat /proc/kmsg",
        "date -s 2001-01-01",
        "hostname other",
        "chroot /proc/1/root true",
        "nsenter -t 1 -m true",
    ):
        assert (await box.exec(command, timeout=10)).exit_code != 0, command


async def test_privileges_are_given_up_before_any_program_runs(box):
    status = (await box.exec("cat /proc/self/status", timeout=10)).text
    fields = dict(re.findall(r"^(\w+):\s+(\S+)", status, re.M))
    assert fields["NoNewPrivs"] == "1" and fields["Seccomp"] == "2"
    assert {fields["CapBnd"], fields["CapPrm"], fields["CapEff"]} == {"00000000800404fb"}
    assert fields["CapAmb"] == fields["CapInh"] == "0000000000000000"


async def test_a_setuid_program_gains_nothing(box):
    if not box.capabilities.users:
        pytest.skip("one user id only: there is nobody to gain from")
    await box.exec("cp /usr/bin/id /tmp/id; chown root /tmp/id; chmod 4755 /tmp/id", timeout=10)
    assert (await box.exec(["/tmp/id", "-u"], user="agent", timeout=10)).stdout == b"1000\n"
    assert (await box.exec("su -c id root </dev/null", user="agent", timeout=10)).exit_code != 0


async def test_the_supervisor_cannot_be_read_traced_or_killed_from_inside(box):
    code = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
keeper = os.getppid()
for pid in (1, keeper):
    for name in ('mem', 'environ', 'maps', 'fd', 'fdinfo', 'cwd', 'exe', 'root', 'auxv', 'syscall'):
        path = f'/proc/{pid}/{name}'
        try:
            if name.startswith('fd'): os.listdir(path)
            elif name in ('cwd', 'exe', 'root'): os.readlink(path)
            else: open(path, 'rb').read(1)
            print('read', path)
        except OSError: pass
    if libc.ptrace(16, pid, 0, 0) == 0: print('traced', pid)
    print(repr(open(f'/proc/{pid}/cmdline').read().strip('\\0')))
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV, signal.SIGUSR1):
    os.kill(1, number)
print('done')
"""
    assert await python(box, code) == "'rollyard'\n'rollyard'\ndone"
    assert await box.alive()


async def test_no_descriptor_leaks_into_a_program(box):
    code = "import os\nfor n in range(200):\n  try: print(n, os.readlink(f'/proc/self/fd/{n}'))\n  except OSError: pass"
    printed = await python(box, code)
    shown = [line.split() for line in printed.splitlines()]
    assert [number for number, _ in shown] == ["0", "1", "2"]
    assert shown[0][1] == "/dev/null" and all(target.startswith("pipe:") for _, target in shown[1:])
    job = await box.start(["python3", "-I", "-c", code], stdin=True)
    assert "/" not in (await job.wait(20)).text.replace("/dev/null", "")


async def test_no_control_socket_is_reachable_from_inside(box):
    assert (
        await box.exec("find / -xdev -type s; cat /proc/net/unix | tail -n +2 | grep -c /", timeout=30)
    ).stdout == b"0\n"
    root = str(box.written.parent)
    mounts = (await box.exec("cat /proc/self/mounts /proc/self/mountinfo", timeout=10)).text
    assert root not in mounts and "boxes" not in mounts


async def test_killing_or_stopping_the_keeper_frees_nothing(box):
    done = await box.exec("sleep 777 & sleep 778 & kill -9 $PPID; sleep 779", timeout=20)
    assert done.exit_code is None and done.lost
    left = "ps -eo args | grep -c '[s]leep 77'"
    async with asyncio.timeout(10):
        while (await box.exec(left, timeout=10)).stdout != b"0\n":
            await asyncio.sleep(0.05)
    done = await box.exec("kill -STOP $PPID; sleep 776", timeout=0.5)
    assert done.timed_out
    async with asyncio.timeout(10):
        while (await box.exec(left, timeout=10)).stdout != b"0\n":
            await asyncio.sleep(0.05)


async def test_sandboxes_do_not_see_each_others_arguments_or_files(backend):
    async with backend.open(ry.SandboxSpec()) as one, backend.open(ry.SandboxSpec()) as two:
        await one.start(["sleep", "31337"], env={"SECRET": "one"})
        await one.write("/tmp/secret", "one")
        seen = await two.exec("ps -ef; cat /proc/*/environ /proc/*/cmdline; ls /tmp", timeout=10)
        assert "31337" not in seen.text and "SECRET" not in seen.text and "secret" not in seen.text


CANARY = """
import asyncio, os, sys, rollyard as ry
held = "canary-" + "in-the-heap-" + sys.argv[2]
async def main(root):
    async with ry.sandbox.backend("local", root=root) as backend, backend.open(ry.SandboxSpec()) as box:
        await box.exec(["true"], timeout=10)
        print(box.info.pid, flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main(sys.argv[1]))
"""


def memory_of(pid: int) -> bytes:
    found = b""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if match:
                start, end = (int(part, 16) for part in match.groups())
                memory.seek(start)
                found += memory.read(end - start)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="reading the memory of a process that is not dumpable needs root")
async def test_the_owners_secrets_are_not_in_the_memory_of_the_first_process(tmp_path):
    env = {**os.environ, "API_KEY": "canary-in-the-environment"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CANARY, str(tmp_path), "x", env=env, stdin=-1, stdout=-1
    )
    assert process.stdout is not None
    pid = int(await asyncio.wait_for(process.stdout.readline(), 30))
    memory = memory_of(pid)
    assert len(memory) > 100_000 and b"rollyard" in memory
    assert b"canary-in-the" not in memory
    assert Path(f"/proc/{pid}/environ").read_bytes().strip(b"\0") == b""
    assert Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0") == b"rollyard"
    await asyncio.wait_for(process.communicate(b""), 30)


async def test_a_fork_bomb_is_stopped_and_the_sandbox_survives(backend):
    async with backend.open(ry.SandboxSpec(resources=ry.Resources(pids=64))) as box:
        bomb = "import os, time\nn = 0\ntry:\n  while os.fork(): n += 1\n  time.sleep(60)\nexcept OSError: print(n)"
        done = await box.exec(["python3", "-I", "-c", bomb], timeout=30)
        assert 10 < int(done.stdout) < 64
        await box.kill_processes()
        assert (await box.exec("echo fine", timeout=10)).stdout == b"fine\n"


async def test_a_memory_bomb_is_killed_and_called_so(backend):
    if not backend.capabilities.memory_limit:
        pytest.skip("no memory controller for this user")
    async with backend.open(ry.SandboxSpec(resources=ry.Resources(memory_mb=96))) as box:
        done = await box.exec(["python3", "-I", "-c", "x = bytearray(400 * 2**20)"], timeout=60)
        assert done.signal == 9 and done.oom and done.exit_code is None
        done = await box.exec("kill -9 $$", timeout=10)
        assert done.signal == 9 and not done.oom


async def test_a_busy_loop_gets_its_share_of_cpu_and_no_more(backend):
    if not backend.capabilities.cpu_limit:
        pytest.skip("no cpu controller for this user")
    async with backend.open(ry.SandboxSpec(resources=ry.Resources(cpus=0.25))) as box:
        code = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
        assert float(await python(box, code)) < 1.0


async def test_filling_the_disk_stops_at_the_limit(backend):
    spec = ry.SandboxSpec(disk="tmpfs", resources=ry.Resources(disk_mb=16))
    async with backend.open(spec) as box:
        done = await box.exec("head -c 64M /dev/zero > /tmp/a; stat -c %s /tmp/a; rm /tmp/a", timeout=30)
        assert int(done.stdout) <= 16 * 2**20
    async with backend.open(ry.SandboxSpec(resources=ry.Resources(disk_mb=16))) as box:
        job = await box.start("while :; do head -c 4M /dev/zero >> /tmp/a; sleep 0.05; done")
        assert (await job.wait(30)).signal == 9
        assert await box.alive() and (await box.stat("/tmp/a")).size >= 16 * 2**20  # its directory counts too


@pytest.mark.slow
async def test_four_gigabytes_of_output_are_capped_and_cost_no_memory(box):
    before = int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    done = await box.exec("yes 0123456789abcdef | head -c 4G", timeout=300, max_output=1000)
    after = int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    assert done.exit_code == 0 and done.truncated and len(done.stdout) == 1000
    assert after - before < 50_000


async def test_a_hostile_image_cannot_send_a_mount_to_the_host(backend, tmp_path):
    image = tmp_path / "image"
    for name in ("usr", "etc", "tmp"):
        (image / name).mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.mkdir()
    (image / "dev").symlink_to(victim)
    (image / "proc").symlink_to("../../../../../../" + str(victim))
    try:
        box = await backend.open(ry.SandboxSpec(image=str(image)))
        await box.kill()
    except SandboxError:
        pass
    assert list(victim.iterdir()) == []


def test_the_filter_decides_alike_on_both_architectures():
    from rollyard.sandbox.local.inner import seccomp

    def verdict(code: bytes, arch: int, number: int, arg0: int = 0) -> int:
        import struct

        at, accumulator = 0, 0
        memory = {0: number, 4: arch, 16: arg0}
        while True:
            op, yes, no, value = struct.unpack_from("=HBBI", code, at * 8)
            at += 1
            if op == 0x20:
                accumulator = memory[value]
            elif op == 0x06:
                return value
            else:
                hit = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[op]
                at += yes if hit else no

    for machine, column in (("x86_64", 0), ("aarch64", 1)):
        code, arch = seccomp.program(machine), seccomp.AUDIT_ARCH[machine]
        refused, allowed = 0x00050001, 0x7FFF0000
        for pair in seccomp.DENIED.values():
            if pair[column] is not None:
                assert verdict(code, arch, pair[column]) == refused
        open_, clone, socket_ = ((2, 56, 41), (56, 220, 198))[column]
        assert verdict(code, arch, open_) == allowed
        assert verdict(code, arch, clone, 0x11) == allowed and verdict(code, arch, clone, 0x10000011) == refused
        for family, answer in ((1, allowed), (2, allowed), (16, allowed), (40, refused), (38, refused), (17, refused)):
            assert verdict(code, arch, socket_, family) == answer
        assert verdict(code, 0x40000003, open_) == refused, "another architecture's calls"
        assert verdict(code, arch, 435) == 0x00050026
    assert verdict(seccomp.program("x86_64"), seccomp.AUDIT_ARCH["x86_64"], 0x40000002) == refused


def test_what_the_zygote_imports_is_the_standard_library_alone():
    import subprocess

    code = "import sys; sys.path.append(sys.argv[1]); import rollyard.sandbox.local.inner.zygote; print(*sys.modules)"
    root = str(Path(ry.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, root], capture_output=True, text=True, env={}, check=True
    )
    allowed = set(sys.stdlib_module_names) | {"rollyard", "__main__"}
    assert {name.partition(".")[0] for name in done.stdout.split()} <= allowed
    ours = {name for name in done.stdout.split() if name.startswith("rollyard.")}
    shared = {
        "rollyard.core",
        "rollyard.core.folders",
        "rollyard.images",
        "rollyard.images.mount_table",
        "rollyard.images.tree_pipe",
        "rollyard.lazy",
    }
    assert {name for name in ours if not name.startswith("rollyard.sandbox")} <= shared


async def test_a_program_that_may_mount_reaches_no_tree_of_the_host(backend, tmp_path, monkeypatch):
    """With `nesting` a read-only mount can be made writable: what is written then stays in the sandbox."""
    prefix = tmp_path / "prefix"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "tool").write_text("host")
    monkeypatch.setenv("ROLLYARD_HOST_PREFIXES", str(prefix))
    script = f"cd {prefix}/bin || exit 9; mount -o remount,bind,rw {prefix}; echo forged > tool; touch new; cat tool"
    for way in (["sh", "-c", script], ["unshare", "-m", "sh", "-c", script]):
        async with backend.open(ry.SandboxSpec(options={"nesting": "yes"}, allow_unsafe=True)) as box:
            assert (await box.exec(way, timeout=20)).stdout == b"forged\n"
    assert (prefix / "bin" / "tool").read_text() == "host"
    assert [path.name for path in (prefix / "bin").iterdir()] == ["tool"]
    mounts = (ry.Mount(local_dir="/data", remote_dir=str(tmp_path / "shared")),)
    with pytest.raises(ConfigError, match="read-only mount writable"):
        backend.open(ry.SandboxSpec(options={"nesting": "yes"}, allow_unsafe=True, mounts=mounts))
