"""Isolation levels: every level this machine reaches still runs programs, and says what it cannot do."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

import rollyard as ry
from rollyard.core.errors import IsolationTooWeak, PathError, Unsupported
from rollyard.sandbox.local import cgroups, probe
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.sandbox.local.inner import files
from rollyard.sandbox.local.inner.users import User

pytestmark = pytest.mark.anyio
CONNECT = """
import socket, sys
for port in sys.argv[1:]:
    try: socket.create_connection(('127.0.0.1', int(port)), 5); print('yes')
    except OSError as e: print(e.errno)
"""
UNSAFE = ry.SandboxSpec(min_isolation="none", allow_unsafe=True)


def at(tmp_path: Path, level: probe.Level) -> LocalBackend:
    try:
        return LocalBackend(root=tmp_path, level=level)
    except IsolationTooWeak as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("level", probe.LEVELS)
async def test_every_level_runs_programs_keeps_jobs_and_moves_files(tmp_path, level):
    async with at(tmp_path, level) as backend, backend.open(UNSAFE) as box:
        assert (box.info.level, box.info.isolation) == (level, probe.ISOLATION[level])
        done = await box.exec("echo out; echo err >&2; exit 5", timeout=10)
        assert (done.exit_code, done.stdout, done.stderr) == (5, b"out\n", b"err\n")
        await box.write("file", b"\x00\xff")
        assert await box.read("file") == b"\x00\xff" and await box.exists("file")
        assert [entry.path.rsplit("/", 1)[1] for entry in await box.list_dir(".")] == ["file"]
        await box.remove("file")
        job = await box.start("echo $$; sleep 300")
        with pytest.raises(TimeoutError):
            await job.wait(0.1)
        await job.kill()
        assert (await box.exec("sleep 300", timeout=0.2)).timed_out
        await box.upload_dir(str(Path(__file__).parent), "in")
        await box.download_dir("in", str(tmp_path / "out"))
        assert (tmp_path / "out" / Path(__file__).name).read_bytes() == Path(__file__).read_bytes()
    assert list((tmp_path / "boxes").iterdir()) == []


@pytest.mark.adversarial
@pytest.mark.parametrize("level", ["landlock", "none"])
async def test_without_namespaces_nothing_survives_the_sandbox_either(tmp_path, level):
    async with at(tmp_path, level) as backend:
        box = await backend.open(UNSAFE)
        long = f"4242.{uuid.uuid4().int}"  # of this test alone
        job = await box.start(
            f"setsid sleep {long} & (setsid sh -c 'sleep {long}' &); sleep 0.2; echo up; sleep {long}"
        )
        async for _ in job.stream():
            break
        pids = [path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if long.encode() in _read(path)]
        assert len(pids) >= 3
        await box.kill()
        async with asyncio.timeout(10):
            while any(long.encode() in _read(pid / "cmdline") for pid in pids):
                await asyncio.sleep(0.02)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.adversarial
async def test_landlock_confines_files_and_connections_of_programs_and_of_the_host_side(tmp_path):
    (tmp_path / "secret").write_text("host")
    async with at(tmp_path, "landlock") as backend:
        with socket.create_server(("127.0.0.1", 0)) as allowed, socket.create_server(("127.0.0.1", 0)) as other:
            spec = ry.SandboxSpec(options={"ports": str(allowed.getsockname()[1])}, allow_unsafe=True)
            async with backend.open(spec) as box:
                done = await box.exec(["cat", str(tmp_path / "secret"), "/etc/shadow"], timeout=10)
                assert done.stdout == b"" and done.exit_code == 1
                assert (
                    await box.exec("echo x > mine && cat mine && cat /etc/passwd | wc -l", timeout=10)
                ).exit_code == 0
                with pytest.raises(PathError):
                    await box.read(str(tmp_path / "secret"))
                await box.write(str(tmp_path / "new"), "x")  # in its own root
                ports = [str(server.getsockname()[1]) for server in (allowed, other)]
                if backend.trial.landlock >= 4:
                    assert (await box.exec(["python3", "-c", CONNECT, *ports], timeout=20)).stdout == b"yes\n13\n"
    assert not (tmp_path / "new").exists()


async def test_lower_levels_refuse_by_name_what_they_lack(tmp_path):
    async with at(tmp_path, "landlock") as backend:
        with pytest.raises(IsolationTooWeak):
            backend.open(ry.SandboxSpec(min_isolation="namespace"))
        with pytest.raises(Unsupported, match="allow-list needs namespaces"):
            backend.open(ry.SandboxSpec(network="allowlist", allowed_hosts=("example.com",)))
        async with backend.open(ry.SandboxSpec(allow_unsafe=True)) as box:
            for call in (box.dial(1), box.pause()):
                with pytest.raises(Unsupported):
                    await call
            with pytest.raises(Unsupported):
                await box.exec(["id"], user="agent", timeout=5)
    async with at(tmp_path, "none") as backend:
        with pytest.raises(IsolationTooWeak):
            backend.open(ry.SandboxSpec())
        with pytest.raises(IsolationTooWeak):
            backend.open(ry.SandboxSpec(min_isolation="none"))


async def test_without_a_fresh_proc_nothing_of_the_hosts_is_shown(tmp_path):
    async with at(tmp_path, "no_proc") as backend, backend.open(ry.SandboxSpec()) as box:
        assert (await box.exec("ls /proc | wc -l", timeout=10)).stdout == b"0\n"
        assert not box.capabilities.tree_kill
        await box.kill_processes()
        assert await box.alive()


def test_the_trial_is_remembered_until_the_next_boot(tmp_path):
    backend = LocalBackend(root=tmp_path)
    saved = json.loads((next(tmp_path.glob("trial-*.json"))).read_bytes())
    saved["trial"]["error"] = "remembered"
    (next(tmp_path.glob("trial-*.json"))).write_text(json.dumps(saved))
    assert LocalBackend(root=tmp_path).trial.error == "remembered"
    saved["key"] = "another boot"
    (next(tmp_path.glob("trial-*.json"))).write_text(json.dumps(saved))
    assert LocalBackend(root=tmp_path).trial == backend.trial


def test_the_level_follows_from_what_was_found():
    every = cgroups.Cgroups((cgroups.Hierarchy("/x", 2, ("memory", "pids", "cpu")),))
    cases = {
        "full": (probe.Trial(True, True, None, 7), every),
        "no_cgroups": (probe.Trial(True, True, None, 7), cgroups.Cgroups()),
        "no_proc": (probe.Trial(True, False, "proc", 7), every),
        "landlock": (probe.Trial(False, False, "clone", 4), every),
        "none": (probe.Trial(False, False, "clone", 0), every),
    }
    assert {level: probe.reach_level(*found) for level, found in cases.items()} == {
        level: level for level in probe.LEVELS
    }


def test_writers_that_start_together_share_the_directories_they_make(tmp_path):
    """The race of two writers to make the same new directory is lost by nobody."""
    owner = User(os.getuid(), os.getgid(), [], "me", str(tmp_path))

    def make(path):
        together.wait()
        files.make_dirs(path, 0o755, owner)

    with ThreadPoolExecutor(4) as pool:
        for turn in range(300):
            together = Barrier(4)
            list(pool.map(make, [f"{tmp_path}/{turn}/a/b/{n}" for n in range(4)]))
    assert len(list(tmp_path.glob("*/a/b/*"))) == 1200
