"""The checks of drills can fail: a sandbox that is left behind is found, and a link that is cut carries nothing."""

import argparse
import asyncio
import os
import subprocess
from pathlib import Path

import anyio
import pytest

import rollyard as ry
from bench.drills.__main__ import run_beside
from bench.drills.breakable_link import BreakableLink
from bench.drills.leftovers import Leftovers, sandbox_pids
from bench.in_flight import find_limits
from rollyard.sandbox.local import cgroups

pytestmark = pytest.mark.anyio


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups of our own need root")
async def test_what_runs_in_a_sandbox_is_found_and_gone_with_it(tmp_path):
    async with Leftovers(str(tmp_path)) as left:
        async with ry.sandbox.backend("local", root=tmp_path) as backend, backend.open(ry.SandboxSpec()) as box:
            await box.start("sleep 600")
            maker, *others = await asyncio.to_thread(sandbox_pids, str(tmp_path))
            found = await left.wait_until_none(0)
            assert maker and others and found["processes"] >= 2 and found["sandboxes"]
        assert not any((await left.wait_until_none()).values())


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups of our own need root")
async def test_a_group_of_a_dead_maker_is_found_with_what_lives_in_it(tmp_path):
    async with Leftovers(str(tmp_path)) as left:
        maker = subprocess.Popen(["sleep", "600"], stderr=(tmp_path / "launcher.log").open("wb"))
        while not left.makers:
            await anyio.sleep(0.05)
        group = Path(cgroups.find().hierarchies[0].root, f"{maker.pid}-1")
        orphan = subprocess.Popen(["sleep", "600"])
        group.mkdir()
        try:
            (group / "cgroup.procs").write_text(str(orphan.pid))
            assert not (await left.wait_until_none(0))["cgroups"]
            maker.kill()
            maker.wait()
            found = await left.wait_until_none(0)
            assert (found["cgroups"], found["processes"]) == (1, 1)
        finally:
            maker.kill()
            orphan.kill()
            orphan.wait()
        assert not any((await left.wait_until_none()).values())


async def test_a_cut_link_carries_nothing_until_it_is_restored():
    async def echo(reader, writer):
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = await BreakableLink.open("127.0.0.1", server.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    link.cut()
    writer.write(b"two")
    answer = asyncio.create_task(reader.readexactly(3))
    done, _ = await asyncio.wait([answer], timeout=0.2)
    assert not done
    link.restore()
    assert await answer == b"two"
    writer.close()
    link.close()
    server.close()


def test_a_drill_beside_others_that_leaves_no_result_is_broken_with_what_its_process_said():
    with run_beside(["no_such_drill"], argparse.Namespace(size=1, seed=1, fault_s=1.0, limit_s=120.0)) as wait:
        (result,) = wait()
    assert not result.ok and "no_such_drill" in result.problem and "ended with 2" in result.problem


def test_rollouts_in_flight_that_the_machine_does_not_allow_are_refused_by_what_is_missing():
    assert find_limits(1, 1) == []
    wrong = " ".join(find_limits(10**9, 1))
    assert "pid_max" in wrong and "memory" in wrong
