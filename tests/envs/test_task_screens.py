"""Modalities: which tools a task offers, the first screenshot, and a browser that is leased and always given back."""

from __future__ import annotations

import asyncio
import base64
import shutil
import struct
import zlib
from contextlib import asynccontextmanager

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, EnvError, EnvUnavailable
from rollyard.core.message import Image, ToolSpec
from rollyard.core.remote_task import TaskConfig
from rollyard.envs.fleet.sdk import FleetProvider
from rollyard.envs.fleet.task_env import RemoteTaskEnv
from rollyard.envs.fleet.task_instance import offer_tools
from rollyard.envs.fleet.verifier_code import Checked
from rollyard.plane.compat.fleet import World, load_world
from rollyard.testing.serve import serve_app
from rollyard.tools import Toolset, tool
from tests.fleet_server import KEY, WORLDS, serving

pytest.importorskip("fleet", reason="the extra `fleet` (fleet-python) is not installed")
pytestmark = pytest.mark.anyio
WEBAPP = WORLDS.parent / "webapp"
SCREEN = """
import base64, sys
from plain_mcp import Picture, Tools

tools = Tools("screen")
clicks = []

@tools.tool
def computer(action: str, coordinate: list = []) -> object:
    "Looks at the screen, or clicks on it."
    if action == "click":
        clicks.append(coordinate)
    return Picture(base64.b64decode(sys.argv[1])) if sys.argv[1] else "no screen is attached"

@tools.tool
def shell(command: str) -> str:
    "Not for those who only see a screen."
    return "ran"

tools.serve(8700)
"""


def png():
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 2, 2, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0\0\0" * 2))
        + chunk(b"IEND", b"")
    )


PICTURE = base64.b64encode(png()).decode()


def screen(picture):
    return World(key="screen", version="1", command=("python3", "-c", SCREEN, picture), port=8700)


def task(server, modality, env_key="screen", **options):
    config = {"env_key": env_key, "task_key": "t", "prompt": "Look.", "task_modality": modality}
    return ry.TaskEnv(config, provider=FleetProvider(KEY, server.url, sdk_retries=0), sandbox=server.backend, **options)


async def test_tool_use_has_every_tool_but_the_computer_and_computer_use_nothing_else():
    """E11"""
    async with serving(worlds=[screen(PICTURE)]) as server:
        async with task(server, "tool_use") as env:
            first = await env.reset()
            assert [tool["function"]["name"] for tool in first.observation["tools"]] == ["shell"]
            assert "initial_screenshot" not in first.observation
            assert "no tool named 'computer'" in (await env.step({"tool": "computer"})).info["tool_error"]
        async with task(server, "computer_use") as env:
            first = await env.reset()
            assert [tool["function"]["name"] for tool in first.observation["tools"]] == ["computer"]
            assert first.observation["initial_screenshot"] == f"data:image/png;base64,{PICTURE}"
            clicked = await env.step({"tool": "computer", "params": {"action": "click", "coordinate": [1, 1]}})
            assert clicked.observation["observation"][0]["image_url"]["url"].endswith(PICTURE)
            assert "no tool named 'shell'" in (await env.step({"tool": "shell"})).info["tool_error"]
            made = (await server.places.find(env.state["instance_id"])).make
            assert made.image_type == "mcp", "E2"


async def test_computer_use_without_a_screenshot_or_without_the_tool_is_an_error():
    """E11"""
    async with serving(worlds=[screen(""), load_world(WORLDS / "tickets")]) as server:
        env = task(server, "computer_use")
        with pytest.raises(EnvError, match="no first screenshot: no screen is attached"):
            await env.reset()
        assert await server.left() == []
        env = task(server, "computer_use", "tickets")
        with pytest.raises(EnvError, match="tickets has no tools for computer_use; it has: list_tickets"):
            await env.reset()
        assert await server.left() == []


def test_an_environment_with_nothing_but_a_computer_has_nothing_for_tool_use():
    """E11"""
    with pytest.raises(EnvError, match="no tools for tool_use"):
        offer_tools(TaskConfig.read({"env_key": "x"}), [ToolSpec("computer")])


def test_browser_use_needs_the_lease_servers_credential_at_construction(monkeypatch):
    """E11: own credential from env or argument, absent = error at construction"""
    config = {"env_key": "orders", "task_modality": "browser_use"}
    monkeypatch.setenv("FLEET_API_KEY", "k")
    monkeypatch.delenv("ROLLYARD_BROWSER_KEY", raising=False)
    monkeypatch.setenv("ROLLYARD_BROWSER_URL", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="ROLLYARD_BROWSER_KEY"):
        ry.TaskEnv(config)
    monkeypatch.setenv("ROLLYARD_BROWSER_KEY", "its own")
    assert ry.TaskEnv(config).config.lifetime_s == 1800
    monkeypatch.delenv("ROLLYARD_BROWSER_URL")
    with pytest.raises(ConfigError, match="ROLLYARD_BROWSER_URL"):
        ry.TaskEnv(config)
    assert ry.TaskEnv(config, leases=Borrowed()) is not None


class Borrowed:
    """Leases that say what was done with them; `failing` is the step that goes wrong."""

    def __init__(self, failing=None, mcp_url="http://127.0.0.1:9/mcp"):
        self.failing, self.url, self.done = failing, mcp_url, []

    async def _did(self, what):
        self.done.append(what)
        if self.failing == what.split()[0]:
            raise EnvUnavailable(f"{what} went wrong")

    async def create(self, ttl_s=1800.0):
        await self._did(f"create {ttl_s:g}")

        class Lease:
            id, mcp_url, key = "lease-1", self.url, "lease-key"

        return Lease()

    async def navigate(self, lease_id, url):
        await self._did(f"navigate {url}")

    async def health(self, lease_id):
        await self._did("health")

    async def delete(self, lease_id):
        await self._did("delete")


class Paged:
    """A provider whose instances have a page and no tools of their own."""

    name = "paged"
    tools_key = None

    def __init__(self):
        self.closed = 0
        self.requests = []

    async def make(self, request):
        self.requests.append(request)
        owner = self

        class Instance:
            id, tool_urls, page_url, databases = "paged-1", (), "http://127.0.0.1:9/page/", None

            async def reset(self, *, seed, timeout_s):
                return None

            async def close(self):
                owner.closed += 1

        return Instance()

    async def aclose(self):
        return None


@asynccontextmanager
async def on_a_screen(failing=None):
    @tool
    async def computer(action: str) -> Image:
        """The screen."""
        return Image(media_type="image/png", data=PICTURE)

    @tool
    async def other() -> str:
        """Not offered."""
        return ""

    async def none(check, databases):
        return Checked(score=1.0, sha256=check.sha256, seconds=0)

    toolset = Toolset([computer, other])
    async with serve_app(toolset) as url:
        leases, provider = Borrowed(failing, url + "/mcp"), Paged()
        config = TaskConfig.read({"env_key": "paged", "task_modality": "browser_use", "verifier_code": "def f(e): ..."})
        yield RemoteTaskEnv(config, provider, none, leases=leases), leases, provider
    await toolset.aclose()


async def test_browser_use_leases_navigates_checks_and_shows_the_screen():
    """E11: standard env + lease + navigate + health check, only computer, initial screenshot, TTL 1800 s, deleted on close"""
    async with on_a_screen() as (env, leases, provider):
        first = await env.reset()
        assert leases.done == ["create 1800", "navigate http://127.0.0.1:9/page/", "health"]
        assert provider.requests[0].image_type is None and provider.requests[0].ttl_s == 1800
        assert [tool["function"]["name"] for tool in first.observation["tools"]] == ["computer"]
        assert first.observation["initial_screenshot"].endswith(PICTURE)
        await env.reset()
        assert leases.done[3:] == ["navigate http://127.0.0.1:9/page/", "health"], "the lease is used again"
        await env.close()
        assert leases.done[-1] == "delete" and provider.closed == 1
        await env.close()
        assert leases.done.count("delete") == 1


@pytest.mark.parametrize("failing", ["navigate", "health"])
async def test_the_lease_is_deleted_when_navigation_or_the_health_check_fails(failing):
    """E11"""
    async with on_a_screen(failing) as (env, leases, provider):
        with pytest.raises(EnvUnavailable, match=failing):
            await env.reset()
        assert leases.done[-1] == "delete" and provider.closed == 1
        await env.close()


async def test_the_instance_is_released_when_there_is_no_browser_to_lease():
    """E11"""
    async with on_a_screen("create") as (env, leases, provider):
        with pytest.raises(EnvUnavailable, match="create"):
            await env.reset()
        assert leases.done == ["create 1800"] and provider.closed == 1


async def test_a_cancelled_reset_leaves_neither_lease_nor_instance():
    """E11"""
    async with on_a_screen() as (env, leases, provider):
        waiting = asyncio.Event()

        async def forever(lease_id, url):
            waiting.set()
            await asyncio.sleep(3600)

        leases.navigate = forever
        resetting = asyncio.create_task(env.reset())
        await asyncio.wait_for(waiting.wait(), 30)
        resetting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resetting
        assert leases.done[-1] == "delete" and provider.closed == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="Debian's chromium is not installed")
async def test_a_browser_task_is_done_with_a_real_browser():
    """E11: a leased Chromium on an instance's page, judged by the instance's database"""
    from rollyard.envs.browser import BrowserLeases, Browsers, BrowserServer
    from rollyard.envs.browser.leases import LABEL

    async with serving(worlds=[load_world(WEBAPP)]) as server:
        browsers = Browsers(server.backend)
        async with serve_app(BrowserServer(browsers, key="browser-key"), lifespan="on") as url:
            env = ry.TaskEnv.from_json_file(
                WEBAPP / "tasks.json",
                "ship-grace",
                api_key=KEY,
                base_url=server.url,
                sandbox=server.backend,
                leases=BrowserLeases(url, "browser-key"),
            )
            async with env:
                first = await env.reset()
                assert first.observation["initial_screenshot"].startswith("data:image/png;base64,")
                clicked = await env.step({"tool": "computer", "params": {"action": "click", "coordinate": [838, 172]}})
                assert clicked.info["tool_error"] is None
                done = await env.step({"done": True})
                assert done.reward == 1.0, (env.feedback, await env.query_db("SELECT id, status FROM orders"))
                again = await env.reset()
                assert again.observation["initial_screenshot"] == first.observation["initial_screenshot"]
                assert (await env.step({"done": True})).reward == 0.0
            assert await server.left() == []
            assert [info for info in await server.backend.list() if LABEL in info.labels] == []
