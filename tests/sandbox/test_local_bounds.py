"""What a program in a sandbox can make the host hold or count is bounded, and gone with it."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, PathError
from rollyard.sandbox.local import cgroups

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
    limits = [Path(group, name) for group in box._group.dirs for name in ("memory.max", "memory.limit_in_bytes")]
    (limit,) = [int(path.read_text()) for path in limits if path.exists()]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0.45 * total < limit <= 0.5 * total


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


async def test_the_watch_over_disks_outlives_an_error(backend, tmp_path):
    """One sandbox whose files are gone does not end the watch over the others."""
    limits = ry.Resources(disk_mb=16)
    spec = ry.SandboxSpec(disk="disk", resources=limits)
    async with backend.open(spec) as first, backend.open(spec) as second:
        shutil.rmtree(first.written)
        first.written.write_text("no directory")
        job = await second.start(FILLS["files"])
        assert (await asyncio.wait_for(job.wait(), 45)).exit_code != 0
