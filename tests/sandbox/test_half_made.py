"""A sandbox whose maker was killed while it made it: it lives by its own time, and whoever finds it can end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import SandboxGone
from rollyard.sandbox.local.journal import Home

pytestmark = pytest.mark.anyio

MAKER = """
import asyncio, sys
import rollyard as ry

async def main():
    async with ry.sandbox.backend("local", root=sys.argv[1]) as backend:
        box = await backend.open(ry.SandboxSpec(lifetime="ttl", ttl_s=600, labels={"of": "test"}))
        print(box.id, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def made(tmp_path):
    """The sandbox's id, as its maker left it that died right before it noted the sandbox's first process."""
    with subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as maker:
        sandbox_id = maker.stdout.readline().strip()
        maker.kill()
    entry = tmp_path / "boxes" / sandbox_id / "box.json"
    known = json.loads(entry.read_bytes())
    pid = known["info"].pop("pid")
    known.pop("cgroups", None)
    fd = os.open(entry, os.O_WRONLY)  # in place: the lock is on this very file
    os.pwrite(fd, json.dumps(known).encode().ljust(os.fstat(fd).st_size), 0)
    os.close(fd)
    return sandbox_id, pid


async def test_a_sandbox_whose_maker_died_before_it_noted_its_process_is_found_and_ended(tmp_path, made):
    sandbox_id, pid = made
    async with ry.sandbox.backend("local", root=tmp_path) as backend:
        assert [info.id for info in await backend.list({"of": "test"})] == [sandbox_id]
        box = await backend.attach(sandbox_id)
        assert (await box.exec("echo here", timeout=60)).stdout == b"here\n"
        await box.kill()
        assert await backend.list() == []
        with pytest.raises(SandboxGone):
            await backend.attach(sandbox_id)
    assert not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text()


async def test_a_process_that_only_reads_the_entry_is_not_taken_for_the_sandboxs_own(tmp_path, made):
    sandbox_id, pid = made
    home = Home(tmp_path / "boxes" / sandbox_id)
    with (home.path / "box.json").open():
        assert home.find_holder() == pid
    async with ry.sandbox.backend("local", root=tmp_path) as backend:
        await (await backend.attach(sandbox_id)).kill()
    assert home.find_holder() is None
