"""Kill drills: whatever is killed, however hard, no process, cgroup or directory stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import Error, PathError
from rollyard.sandbox.local.backend import LocalBackend
from tests.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]

BUSY = """
import asyncio, sys, rollyard as ry
async def main(root, mark, count):
    async with ry.sandbox.backend("local", root=root) as backend:
        boxes = await asyncio.gather(*(backend.open(ry.SandboxSpec()) for _ in range(int(count))))
        for box in boxes:
            await box.start(f"setsid sleep {mark} & (sleep {mark} &); while :; do sleep 0.2; done")
        print("busy", flush=True)
        await asyncio.sleep(600)
asyncio.run(main(*sys.argv[1:]))
"""


def running(mark: str) -> int:
    """How many processes on this machine have `mark` in their arguments and are sleepers."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            count += path.read_bytes() == f"sleep\0{mark}\0".encode()
    return count


async def busy(root: Path, mark: str, count: int) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BUSY, str(root), mark, str(count), stdout=-1, start_new_session=True
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 120) == b"busy\n"
    return process


def mark() -> str:
    return f"{os.getpid()}{os.urandom(2).hex()}".translate(str.maketrans("abcdef", "123456"))


def zygotes(root: Path) -> list[int]:
    """Launchers that keep sandboxes under `root`, by their log file."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/fd/2"):
        with contextlib.suppress(OSError):
            if os.readlink(path) == str(root / "launcher.log"):
                found.append(int(path.parts[2]))
    return found


def boxes(root: Path) -> list[str]:
    return os.listdir(root / "boxes")


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=pytest.mark.slow)])
async def test_killing_the_runner_leaves_no_process_and_no_directory(tmp_path, count):
    name = mark()
    process = await busy(tmp_path, name, count)
    await until(lambda: running(name) == 2 * count)
    process.kill()
    await process.wait()
    await until(lambda: running(name) == 0)
    await until(lambda: boxes(tmp_path) == [] and zygotes(tmp_path) == [])


async def test_killing_the_zygote_leaves_its_sandboxes_working_and_the_next_open_too(tmp_path):
    async with LocalBackend(root=tmp_path) as backend:
        box = await backend.open(ry.SandboxSpec())
        for pid in zygotes(tmp_path):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: zygotes(tmp_path) == [])
        assert (await box.exec("echo still here", timeout=10)).stdout == b"still here\n"
        async with backend.open(ry.SandboxSpec()) as other:
            assert await other.alive()
        await box.kill()
    async with LocalBackend(root=tmp_path):
        assert boxes(tmp_path) == []


async def test_killing_runner_and_zygote_at_once_leaves_nothing_after_the_next_start(tmp_path):
    name = mark()
    process = await busy(tmp_path, name, 3)
    groups = [
        path
        for path in Path("/sys/fs/cgroup").glob("*/rollyard/*-*")
        if path.name.split("-")[0] in map(str, zygotes(tmp_path))
    ]
    assert len(boxes(tmp_path)) == 3
    for pid in [process.pid, *zygotes(tmp_path)]:
        os.kill(pid, signal.SIGKILL)
    await process.wait()
    await until(lambda: running(name) == 0)
    async with asyncio.timeout(30):
        while any(group.exists() for group in groups):  # a dying process leaves its group when the kernel gets to it
            async with LocalBackend(root=tmp_path):
                assert boxes(tmp_path) == []


@pytest.mark.parametrize("times", [1, 2])
async def test_ctrl_c_cleans_up_and_a_second_one_does_not_spoil_it(tmp_path, times):
    name = mark()
    process = await busy(tmp_path, name, 4)
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        await asyncio.sleep(0.005)
    await asyncio.wait_for(process.wait(), 30)
    await until(lambda: running(name) == 0 and boxes(tmp_path) == [])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
async def test_a_full_host_disk_is_a_typed_error_and_leaves_nothing(tmp_path):
    root = tmp_path / "small"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(root)], check=True)
    try:
        async with LocalBackend(root=root) as backend, backend.open(ry.SandboxSpec()) as box:
            with pytest.raises(PathError) as full:
                await box.write("/tmp/big", bytes(16 * 2**20))
            assert full.value.errno_name == "ENOSPC"
            await box.exec("head -c 20M /dev/zero > /tmp/big", timeout=20)
            done = await box.exec("yes | head -c 1000000", timeout=20)
            assert len(done.stdout) == 1_000_000, "what a program prints is not kept on that disk"
            job = await box.start("yes | head -c 1000000")
            assert (await job.wait(20)).truncated
            with pytest.raises(Error):
                await backend.open(ry.SandboxSpec())
        assert boxes(root) == []
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


@pytest.mark.slow
async def test_two_hundred_live_and_die_together(tmp_path):
    async with LocalBackend(root=tmp_path) as backend:
        live = await asyncio.gather(*(backend.open(ry.SandboxSpec()) for _ in range(200)))
        outputs = await asyncio.gather(*(box.exec("hostname; echo $$", timeout=120) for box in live))
        assert {done.stdout for done in outputs} == {outputs[0].stdout}
        assert len(await backend.list()) == 200
    await until(lambda: boxes(tmp_path) == [])
