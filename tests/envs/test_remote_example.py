"""The example of the docs, run as the docs print it."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.fleet_server import KEY, serving

pytest.importorskip("fleet", reason="the extra `fleet` (fleet-python) is not installed")
pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "remote-environments.md").read_text()


def printed():
    """The commands of the first block."""
    block = re.search(r"```sh\n(.*?)```", DOC, re.DOTALL).group(1)
    return block.splitlines()


async def ran(line, **env):
    words = shlex.split(line)
    assert words[0] == "python"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLEET_")}
    done = await asyncio.create_subprocess_exec(
        sys.executable,
        *words[1:],
        cwd=ROOT,
        env={**kept, **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(done.communicate(), 240)
    return done.returncode, out.decode(), err.decode()


async def test_the_example_runs_as_printed():
    """E2"""
    install, export, run = printed()
    assert install == "pip install 'rollyard[fleet]'" and export.startswith("export FLEET_API_KEY=")
    async with serving() as server:
        code, out, err = await ran(run, FLEET_API_KEY=KEY, FLEET_BASE_URL=server.url)
        assert code == 0, err
        lines = out.splitlines()
        assert re.fullmatch(r"inst_\w+ of tickets has 4 tools", lines[0])
        assert "  list_tickets: The tickets, all or those in one state (open, waiting, closed)." in lines
        assert "  database current: notes, tickets" in lines
        assert any(line.startswith('list_tickets() -> [{"id": 1, "title": "Printer') for line in lines)
        assert lines[-1] == "released" and await server.left() == []
        shown = re.search(r"```\n(inst_.*?)```", DOC, re.DOTALL).group(1).splitlines()
        fixed = [line for line in shown if not line.startswith("inst_") and "..." not in line]
        assert set(fixed) <= set(lines), "the docs show what it prints"


async def test_the_example_says_which_variable_is_missing():
    """E2"""
    code, out, err = await ran(printed()[-1])
    assert code == 2 and "FLEET_API_KEY" in err and "Traceback" not in err


@pytest.mark.slow
async def test_the_example_runs_on_the_server_that_the_docs_start(tmp_path):
    """E2: `serve plane` as printed, then the example with the variables that it printed"""
    (line,) = re.search(r"```sh serve\n(.*?)```", DOC, re.DOTALL).group(1).splitlines()
    words = shlex.split(line)
    assert words[:3] == ["rollyard", "serve", "plane"]
    words[words.index("plane.db")] = str(tmp_path / "plane.db")
    more = ["--port", "0", "--admin-key-file", str(tmp_path / "key")]
    serving = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *words, *more, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        env = {}
        async with asyncio.timeout(120):
            while "ROLLYARD_KEY" not in env:  # the last one
                name, _, value = (await serving.stdout.readline()).decode().strip().partition("=")
                assert name, "the server ended"
                env[name] = value
        wanted = {name: env[name] for name in ("FLEET_BASE_URL", "FLEET_API_KEY")}
        code, out, err = await ran(printed()[-1], **wanted)
        assert code == 0, err
        assert "of tickets has 4 tools" in out and out.endswith("released\n")
    finally:
        serving.terminate()
        await asyncio.wait_for(serving.wait(), 60)
