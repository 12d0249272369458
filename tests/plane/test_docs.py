"""Every command and program of docs/control-plane.md, run in order against the server it starts."""

import asyncio
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.plane.api.routes import ROUTES
from tests.plane.test_operations import MAIN, process

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "control-plane.md").read_text()
BLOCKS = {name: body for _, name, body in re.findall(r"```(sh|python) (\w+)\n(.*?)```", TEXT, re.S)}


async def test_the_commands_and_programs_do_what_is_said(tmp_path):
    (serve,) = BLOCKS["serve"].strip().splitlines()
    words = shlex.split(serve)[3:]
    assert words[words.index("--engine") + 1] == "local,noop"
    async with process(tmp_path, engine="local,noop") as (_, _, env):
        named = {**os.environ, **{name: env[name] for name in ("ROLLYARD_URL", "ROLLYARD_KEY")}}

        async def run(*command):
            done = await asyncio.to_thread(
                subprocess.run, command, env=named, cwd=ROOT, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            return done.stdout.split()

        assert await run(sys.executable, "-c", BLOCKS["first"]) == ["Oslo", "running"]
        assert await run(sys.executable, "-c", BLOCKS["inside"]) == ["True", "ryi-"]
        for line in (BLOCKS["push"] + BLOCKS["backup"]).strip().splitlines():
            told = line.replace("plane-copy.db", str(tmp_path / "copy.db")).replace(
                "plane-again.db", str(tmp_path / "b.db")
            )
            told = told.replace("--store plane.db", f"--store {tmp_path / 'p.db'}")
            program, *rest = shlex.split(told)
            assert program == "rollyard"
            assert await run(sys.executable, "-c", MAIN, *rest)
        assert (tmp_path / "b.db").exists()


def test_every_path_in_the_text_is_a_route():
    known = {entry.path for entry in ROUTES} | {"/health", "/ready", "/metrics", "/openapi.json", "/page"}
    gateway = {
        "/v1/instances/{id}/data/...",
        "/v1/instances/{id}/mcp",
        "/v1/instances/{id}/port/{port}/...",
        "/at/{signed}/...",
    }
    named = set(re.findall(r"`(?:GET |PUT |POST )?(/[a-z{][^`\s]*)", TEXT))
    unknown = {path.partition("?")[0] for path in named} - known - gateway - {"/history"}
    assert not unknown
