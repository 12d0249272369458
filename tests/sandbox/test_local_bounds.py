"""What a program in a sandbox can make the host hold or count is bounded, and gone with it."""

import asyncio
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, PathError
from rollyard.sandbox.local import cgroups, disk

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]

SHARED = """
import ctypes, os
libc = ctypes.CDLL(None)
assert libc.shmget(42, 4096, 0o1666) >= 0 and libc.semget(42, 1, 0o1666) >= 0 and libc.msgget(42, 0o1666) >= 0
os.makedirs('/dev/shm/d'); open('/dev/shm/d/f', 'w').write('x'); open('/dev/shm/g', 'w').write('x')
"""
LEFT = "tail -qn +2 /proc/sysvipc/shm /proc/sysvipc/sem /proc/sysvipc/msg; ls -A /dev/shm"


async def test_shared_memory_is_gone_with_the_programs(box):
    assert (await box.exec(["python3", "-c", SHARED], timeout=30)).ok
    assert len((await box.exec(LEFT, timeout=10)).text.splitlines()) == 5
    await box.kill_processes()
    assert (await box.exec(LEFT, timeout=10)).text == ""


@pytest.mark.slow
async def test_a_directory_of_any_size_costs_the_host_a_bounded_list(box):
    code = "import os\nos.mkdir('/big')\nfor n in range(50_001): os.symlink('x' * 500, f'/big/{n}')"
    assert (await box.exec(["python3", "-c", code], timeout=120)).ok
    with pytest.raises(PathError, match="EFBIG"):
        await box.list_dir("/big")
    await box.remove("/big/0")
    assert len(await box.list_dir("/big")) == 50_000


@pytest.mark.parametrize("labels", [{"x" * 300: "y"}, {"x": "y" * 5000}, {f"x{n}": "y" for n in range(300)}])
async def test_labels_are_bounded(backend, labels):
    with pytest.raises(ConfigError, match="label"):
        backend.open(ry.SandboxSpec(labels=labels))


async def test_a_sandbox_without_limits_has_half_of_the_memory(backend, box):
    if not cgroups.find().has("memory"):
        pytest.skip("no cgroup bounds memory here")
    limits = [Path(group, name) for group in box.group.dirs for name in ("memory.max", "memory.limit_in_bytes")]
    (limit,) = [int(path.read_text()) for path in limits if path.exists()]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0.45 * total < limit <= 0.5 * total


async def test_a_sandbox_without_limits_has_half_a_share_of_busy_processors(box):
    if not cgroups.find().has("cpu"):
        pytest.skip("no cgroup shares out processors here")
    shares = [Path(group, name) for group in box.group.dirs for name in ("cpu.weight", "cpu.shares")]
    usual = {"cpu.weight": 100, "cpu.shares": 1024}
    assert [int(path.read_text()) / usual[path.name] for path in shares if path.exists()] == [0.5]


async def test_a_sandbox_without_limits_may_fill_a_share_of_the_disk(tmp_path):
    status = os.statvfs(tmp_path)
    total = status.f_blocks * status.f_frsize >> 20
    assert disk.default_disk_mb(tmp_path, "disk") <= max(1, total // 2)
    assert disk.default_disk_mb(tmp_path, "tmpfs") <= cgroups.default_memory_mb()


FILLS = {
    "files": "dd if=/dev/zero of=/fill bs=1M count=40 2>/dev/null; sleep 60",
    "an unlinked open file": "exec 9>/fill; rm /fill; dd if=/dev/zero bs=1M count=40 >&9 2>/dev/null; sleep 60",
    "an unlinked mapped file": (
        "exec python3 -c \"import mmap, os, time; f = open('/fill', 'w+b'); os.truncate('/fill', 40 << 20);"
        " m = mmap.mmap(f.fileno(), 40 << 20); os.unlink('/fill'); f.close();"
        ' [m.__setitem__(n, 1) for n in range(0, 40 << 20, 4096)]; m.flush(); time.sleep(60)"'
    ),
    "empty files": "mkdir /many; cd /many; seq 1 30000 | xargs touch; sleep 60",
}


@pytest.mark.parametrize("how", FILLS)
async def test_a_full_disk_ends_the_programs_however_it_is_filled(backend, how):
    limits = ry.Resources(disk_mb=16)
    async with backend.open(ry.SandboxSpec(disk="disk", resources=limits)) as box:
        job = await box.start(FILLS[how])
        done = await job.wait(timeout=45)
        assert done.exit_code != 0
        assert await box.alive()


IN_MEMORY = {
    "files": "dd if=/dev/zero of=/fill bs=1M count=40",
    "an unlinked open file": "exec 9>/fill; rm /fill; dd if=/dev/zero bs=1M count=40 >&9",
    "empty files": "mkdir /many; cd /many; seq 1 30000 | xargs touch",
    "/tmp": "dd if=/dev/zero of=/tmp/fill bs=1M count=40",
}


@pytest.mark.parametrize("how", IN_MEMORY)
async def test_a_disk_in_memory_is_bounded_by_the_kernel(backend, how):
    """No watch: the write itself fails."""
    limits = ry.Resources(disk_mb=16)
    async with backend.open(ry.SandboxSpec(disk="tmpfs", resources=limits)) as box:
        done = await box.exec(IN_MEMORY[how], timeout=60)
        assert not done.ok
        assert "No space left on device" in done.text


class _Box:
    """Stands for a sandbox that is over its limit; ending its programs fails once, in a way that nobody foresaw."""

    id, info, group = "sbx_full", SimpleNamespace(pid=None, level="full"), cgroups.Group()

    def __init__(self, written):
        self.written, self.asked, self.ended = written, 0, asyncio.Event()

    async def kill_processes(self):
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError("not foreseen")
        self.ended.set()


async def test_nothing_ends_the_watch_over_disks(tmp_path):
    (tmp_path / "written").mkdir()
    box, watch = _Box(tmp_path / "written"), disk.LocalDiskWatch(tmp_path / "absent", every_s=0.01)
    watch.add(box, 1)
    for _ in range(3):
        await asyncio.sleep(0)  # its root is not there, and cannot be measured
    (tmp_path / "absent").mkdir()
    with (tmp_path / "written" / "fill").open("wb") as file:
        while not box.ended.is_set():
            file.write(os.urandom(2**20))
            file.flush()
            os.fsync(file.fileno())
            await asyncio.sleep(0.02)
    await watch.aclose()
    assert box.asked > 1


async def test_the_watch_over_disks_outlives_an_error(backend, tmp_path):
    """One sandbox whose files are gone does not end the watch over the others."""
    limits = ry.Resources(disk_mb=16)
    spec = ry.SandboxSpec(disk="disk", resources=limits)
    async with backend.open(spec) as first, backend.open(spec) as second:
        shutil.rmtree(first.written)
        first.written.write_text("no directory")
        job = await second.start(FILLS["files"])
        assert (await asyncio.wait_for(job.wait(), 45)).exit_code != 0
