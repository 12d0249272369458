"""The programs of docs/compatible-apis.md, and the example it ends with, run as they are against the server it starts."""

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.plane.served import serving
from tests.plane.test_aenv import VERSION as AENV
from tests.plane.test_e2b import NEWEST as E2B
from tests.plane.venvs import interpreter, there

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
BLOCKS = dict(
    re.findall(r"```(?:sh|python) (\w+)\n(.*?)```", (ROOT / "docs" / "compatible-apis.md").read_text(), re.DOTALL)
)
NAMES = [
    "E2B_API_URL",
    "E2B_SANDBOX_URL",
    "E2B_API_KEY",
    "FLEET_BASE_URL",
    "FLEET_API_KEY",
    "AENV_SYSTEM_URL",
    "ROCK_BASE_URL",
]
quick = () if there("e2b", E2B) and there("aenvironment", AENV) else pytest.mark.slow


async def said(python, program, env, cwd):
    running = await asyncio.create_subprocess_exec(
        python,
        *program,
        cwd=cwd,
        env={**os.environ, **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(running.communicate(), 240)
    assert running.returncode == 0, err.decode()[-3000:]
    return out.decode()


@pytest.mark.parametrize("page", [pytest.param("compatible-apis", marks=quick)])
async def test_the_page_does_what_it_says(tmp_path, page):
    pytest.importorskip("fleet", reason="the extra `fleet` (fleet-python) is not installed")
    (command,) = BLOCKS["serve"].strip().splitlines()
    words = shlex.split(command)
    assert words[:3] == ["rollyard", "serve", "plane"] and words[-1] == "--print-env"
    given = dict(zip(words[3:-1:2], words[4:-1:2], strict=True))
    more = [part for name in ("--worlds", "--fleet-tasks") for part in (name, str(ROOT / given[name]))]
    e2b = await asyncio.to_thread(interpreter, "e2b", E2B)
    aenv = await asyncio.to_thread(interpreter, "aenvironment", AENV)
    async with serving(tmp_path, *more, engine=given["--engine"]) as env:
        del env["process"]
        assert list(env) == [*NAMES, "ROLLYARD_URL", "ROLLYARD_KEY"]
        (tmp_path / "project.py").write_text(BLOCKS["project"])
        assert (await said(e2b, ["-c", BLOCKS["e2b"]], env, tmp_path)).split() == ["kept", "kept"]
        await said(sys.executable, ["-c", BLOCKS["make"]], env, tmp_path)
        told = await said(aenv, ["-c", BLOCKS["aenv"]], env, tmp_path)
        assert "get_weather" in told and '"temperature": 20' in told and "'score': 1.0" in told
        told = await said(sys.executable, ["-c", BLOCKS["fleet"]], env, tmp_path)
        assert told.splitlines()[0] == "[[5]]" and "close-printer 0.0" in told
        told = await said(sys.executable, [str(ROOT / "examples" / "plane_presign.py")], env, tmp_path)
        assert [line.split()[0] for line in told.splitlines()] == ["created", "called", "deleted"]
