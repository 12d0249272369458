"""The E2B-compatible server, driven by the real SDK in its published versions, with local sandboxes underneath."""

import asyncio
import base64
import hashlib
import time
from pathlib import Path
from urllib.parse import urlencode

import aiohttp
import pytest

import rollyard as ry
from rollyard.plane.compat.e2b import e2b_app
from rollyard.plane.parts import ephemeral_plane
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.testing.serve import serve_app
from tests.plane.conftest import ADMIN
from tests.plane.e2b_server import list_ids, serving
from tests.plane.venvs import interpreter, told, unless_there

pytestmark = pytest.mark.anyio
CLIENT = Path(__file__).with_name("e2b_client.py")
NEWEST = "2.63.0"
VERSIONS = [pytest.param(NEWEST, marks=unless_there("e2b", NEWEST))] + [
    pytest.param(version, marks=pytest.mark.slow) for version in ("2.20.0", "2.50.0", "2.51.0")
]


@pytest.fixture
async def backend(tmp_path):
    async with LocalBackend(root=tmp_path / "home") as made:
        yield made


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_real_sdk_is_served(backend, version):
    python = await asyncio.to_thread(interpreter, "e2b", version)
    async with serving(backend) as url:
        holds(await told(python, CLIENT, url))


def holds(seen):
    """What every version of the SDK must see."""
    assert seen.pop("many", ["1", "2"]) == ["1", "2"]
    assert seen.pop("stdin", "over the wire\n") == "over the wire\n"
    # both ends give up at the same moment; 2.20 does not translate its own
    assert seen.pop("timeout") in ("TimeoutException", "ReadTimeout")
    missing = seen.pop("missing")
    assert missing in ("FileNotFoundException", "NotFoundException")
    assert seen == {
        "run": [0, "out\nblue round\n", "err\n"],
        "failed": "CommandExitException",
        "bad_cwd": "InvalidArgumentException",
        "listed": True,
        "rejoined": 5,
        "killed": [True, False, False],
        "killed_as": "CommandExitException",
        "bytes": True,
        "text": "grüße",
        "big": str(256 * 12000),
        "exists": [True, False],
        "made": [True, False],
        "moved": [False, "grüße", "dir"],
        "removed": False,
        "info": [True, {"who": "a b&c"}, "running"],
        "running": True,
        "connected": str(256 * 1000),
        "by_metadata": True,
        "more": True,
        "paged": True,
        "kill": [True, False],
        "running_after": False,
        "use_after": True,
    }


async def test_a_repeated_create_with_one_key_makes_one_sandbox(backend):
    async with serving(backend) as url, aiohttp.ClientSession(url) as client:

        async def create(key):
            async with client.post("/v2/sandboxes", json={"templateID": "base"}, headers={"Idempotency-Key": key}) as r:
                assert r.status == 201
                return (await r.json())["sandboxID"]

        first, again = await asyncio.gather(create("one"), create("one"))
        other = await create("two")
        assert first == again != other
        assert set(await list_ids(backend)) == {first, other}


async def test_a_rollout_leads_to_the_sandbox_that_it_asked_for_through_this_api(backend):
    """By what it writes on every sandbox; nobody links them by hand."""
    async with ephemeral_plane(backend) as plane, serve_app(e2b_app(plane, anonymous=True)) as url:
        labels = {"rollyard.rollout": "ro_1", "rollyard.run": "run_1"}
        async with aiohttp.ClientSession(url) as client:
            async with client.post("/sandboxes", json={"templateID": "base", "metadata": labels}) as reply:
                made = (await reply.json())["sandboxID"]
        chain = await plane.traces.chain("ro_1", ADMIN)
        assert (chain["instance"]["id"], chain["instance"]["run_id"], chain["rollout_id"]) == (made, "run_1", "ro_1")


async def test_nobody_enters_without_the_key_or_the_sandboxes_token(backend):
    async with serving(backend, key="right") as url, aiohttp.ClientSession(url) as client:

        async def status(method, path, **headers):
            async with client.request(method, path, headers=headers) as reply:
                return reply.status

        assert await status("GET", "/sandboxes") == 401
        assert await status("GET", "/sandboxes", **{"X-API-KEY": "wrong"}) == 401
        async with client.post("/sandboxes", json={"templateID": "base"}, headers={"X-API-KEY": "right"}) as reply:
            made = await reply.json()
        box = {"E2b-Sandbox-Id": made["sandboxID"]}
        path = "/files?path=/etc/hostname"
        assert await status("GET", path, **box) == 401
        assert await status("GET", path, **box, **{"X-Access-Token": "right"}) == 401
        assert await status("GET", path, **box, **{"X-Access-Token": made["envdAccessToken"]}) == 200
        assert await status("POST", "/process.Process/List", **box) == 401
        words = f"/etc/hostname:read::{made['envdAccessToken']}:{int(time.time()) + 60}"
        digest = base64.b64encode(hashlib.sha256(words.encode()).digest()).decode().rstrip("=")
        signed = {"path": "/etc/hostname", "signature": f"v1_{digest}", "signature_expiration": words.split(":")[-1]}
        assert await status("GET", f"/files?{urlencode(signed)}", **box) == 200
        assert await status("GET", f"/files?{urlencode({**signed, 'path': '/etc/passwd'})}", **box) == 401
        assert await status("GET", f"/files?{urlencode({**signed, 'signature_expiration': '1'})}", **box) == 401


async def test_sandboxes_of_others_are_neither_shown_nor_ended(backend):
    async with backend.open(ry.SandboxSpec()) as mine:
        async with serving(backend) as url, aiohttp.ClientSession(url) as client:
            async with client.get("/v2/sandboxes") as reply:
                assert await reply.json() == []
            async with client.delete(f"/sandboxes/{mine.id}") as reply:
                assert reply.status == 404
            assert await mine.alive()


async def test_what_is_not_served_is_refused_by_name(backend):
    async with serving(backend) as url, aiohttp.ClientSession(url) as client:
        for query in ("limit=many", "nextToken=abc"):
            async with client.get(f"/v2/sandboxes?{query}") as reply:
                assert reply.status == 400
        async with client.get("/sandboxes/x/logs") as reply:
            assert reply.status == 501 and "logs" in (await reply.json())["message"]
        async with client.post("/sandboxes", json={"templateID": "base", "mcp": {"a": 1}}) as reply:
            assert reply.status == 400 and "mcp" in (await reply.json())["message"]
