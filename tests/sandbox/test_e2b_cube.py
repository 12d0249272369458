"""The extra `cube`: an SDK before 2.51, in an environment of its own, on a server that has only the old paths."""

import asyncio
import json
import os
import tomllib
from pathlib import Path

import pytest
from starlette.responses import JSONResponse

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.sandbox.providers.e2b import E2BBackend
from tests.plane.e2b_server import serving
from tests.plane.venvs import venv_or_skip

pytest.importorskip("e2b", reason="the e2b SDK is not installed")
pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
KEY = "e2b_" + "2" * 40
CASES = {
    "C1",
    "C2",
    "C6",
    "C7",
    "C16",
    "E1",
    "E4",
    "E9",
    "E10",
    "E13",
    "E14",
    "B1",
    "B3",
    "B8",
    "B9",
    "B14",
    "F2",
    "F5",
    "F10",
}
CASES |= {"N3", "N5", "S1", "S2", "X5"}
CLIENT = """
import asyncio, importlib.metadata, json, sys
from rollyard.sandbox.providers.e2b import E2BBackend
from rollyard.testing.sandbox import SandboxFixture, cases, missing
from rollyard.testing.suite import run_case

async def main():
    async with E2BBackend(key=sys.argv[1], url=sys.argv[2], isolation="namespace") as backend:
        fixture = SandboxFixture(backend=backend, parallel=4)
        for case in cases():
            if case.id in sys.argv[3:]:
                outcome = await run_case(case, fixture, missing=missing(fixture), slow=True)
                print(json.dumps([case.id, outcome.result, outcome.why]), flush=True)
    print(json.dumps(importlib.metadata.version("e2b")))

asyncio.run(main())
"""


def old(app):
    """The server without its second version, as CubeSandbox answers."""

    async def served(scope, receive, send):
        if scope["type"] == "http" and scope["path"].startswith("/v2/") and scope["method"] == "POST":
            await JSONResponse({"code": 405, "message": "Method Not Allowed"}, 405)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return served


def interpreter():
    """A Python with what this project needs and the extra `cube`, made on first use."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = [*wanted["dependencies"], *wanted["optional-dependencies"]["cube"]]
    return venv_or_skip("cube", packages)


async def test_a_newer_sdk_is_told_which_version_such_a_server_needs(backend):
    async with (
        serving(backend, wrap=old) as url,
        E2BBackend(key=KEY, url=url, isolation="namespace") as remote,
    ):
        with pytest.raises(ConfigError, match=r"pip install 'e2b>=2\.21,<2\.51' \(the extra `cube`\)"):
            await remote.open(ry.SandboxSpec())
        assert await backend.list() == []


@pytest.mark.slow
async def test_the_older_sdk_drives_a_server_that_has_only_the_old_paths(backend):
    python = await asyncio.to_thread(interpreter)
    async with serving(backend, key=KEY, wrap=old) as url:
        program = await asyncio.create_subprocess_exec(
            python, "-c", CLIENT, KEY, url, *CASES, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(program.communicate(), 500)
    assert program.returncode == 0, err.decode()[-3000:]
    *found, version = [json.loads(line) for line in out.splitlines()]
    assert version.startswith("2.50.")
    assert [one for one in found if one[1] != "passed"] == []
    assert {one[0] for one in found} == CASES
