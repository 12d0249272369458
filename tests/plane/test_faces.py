"""The compatible faces of `rollyard serve plane`, each driven by the real package with nothing but the printed variables."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

import rollyard as ry
from rollyard.core.errors import PlaneNotFound
from tests.plane.served import serving
from tests.plane.test_e2b import CLIENT, NEWEST, VERSIONS, holds
from tests.plane.venvs import interpreter, told, unless_there

pytestmark = pytest.mark.anyio
HERE = Path(__file__).parent
E2B = ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_API_KEY")


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_e2b_sdk_drives_the_plane(tmp_path, version):
    python = await asyncio.to_thread(interpreter, "e2b", version)
    async with serving(tmp_path) as env:
        holds(await told(python, CLIENT, env["E2B_API_URL"], env["E2B_API_KEY"]))
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            assert (await plane.usage())["used"] == 0


@pytest.mark.parametrize("version", [pytest.param(NEWEST, marks=unless_there("e2b", NEWEST))])
async def test_e2b_sandboxes_are_instances_with_the_planes_environments_quota_and_history(tmp_path, version):
    python = await asyncio.to_thread(interpreter, "e2b", version)
    async with serving(tmp_path, "--quota", "2") as env:
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            await plane.envs.create("weather", "1.0", env={"CITY": "Oslo"})
            seen = await told(python, HERE / "e2b_plane_client.py", env={name: env[name] for name in E2B})
            made = await plane.instances.get(seen["id"])
            assert (made["state"], made["labels"], made["owner"]) == ("running", {"team": "a"}, "admin")
            assert (await plane.instances.read(made["id"], "/tmp/kept")) == b"kept"
            async with aiohttp.request("GET", seen["url"], headers={"E2b-Sandbox-Id": made["id"]}) as reply:
                assert await reply.text() == "kept"
            await plane.instances.delete(made["id"])
            with pytest.raises(PlaneNotFound):
                await plane.instances.get(made["id"])
            async with aiohttp.request("GET", f"{env['E2B_API_URL']}/health") as reply:
                assert (await reply.json())["status"] == "ok"
            headers = {"E2b-Sandbox-Id": made["id"]}
            async with aiohttp.request("GET", f"{env['E2B_API_URL']}/health", headers=headers) as reply:
                assert reply.status == 502
    assert seen["template"] == "weather@1.0" and seen["city"] == ["Oslo"]
    assert seen["no_env"][0] and "nothing@1.0" in seen["no_env"][1]
    assert seen["copied"] == "kept" and seen["forked"] == ["kept", ["blue"]]
    assert seen["second"] != "Sandbox" and seen["full"][0] == "RateLimitException"
    assert seen["paused"][:2] == ["paused", False] and seen["resumed"] == "kept"
    assert seen["listed"]
