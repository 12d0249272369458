"""Leased browsers: a real Chromium in a real sandbox, driven over real MCP, against the order desk of the examples."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import signal
import sqlite3
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import msgspec
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from rollyard.core.errors import ConfigError, EnvError, EnvUnavailable, EpisodeLost
from rollyard.core.python_files import import_file
from rollyard.envs.browser import BrowserLeases, Browsers, BrowserServer
from rollyard.envs.browser.keys import presses
from rollyard.envs.browser.leases import LABEL, BrowserLimits
from rollyard.sandbox import backend
from rollyard.testing.serve import serve_app

EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = "the-lease-servers-own-key"
needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="Debian's chromium is not installed")
pytestmark = pytest.mark.anyio


class Desk:
    def __init__(self, server: Any, db: Path) -> None:
        self.url, self.db = f"http://127.0.0.1:{server.server_port}/", db

    def ask(self, sql: str) -> list[Any]:
        with sqlite3.connect(self.db) as db:
            return [row[0] for row in db.execute(sql)]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    app = import_file(EXAMPLES / "webapp/app.py")
    app.seed(tmp_path / "orders.db")
    server = app.Desk(("127.0.0.1", 0), tmp_path / "orders.db")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Desk(server, tmp_path / "orders.db")
    server.shutdown()
    server.server_close()
    thread.join()


@asynccontextmanager
async def served(**limits: Any) -> AsyncGenerator[tuple[str, Browsers, Any]]:
    """A lease server on loopback: its address, its browsers, its sandbox backend."""
    async with backend("local") as sandboxes:
        browsers = Browsers(sandboxes, limits=BrowserLimits(**limits))
        app = BrowserServer(browsers, key=KEY)
        async with serve_app(app, lifespan="on", timeout_graceful_shutdown=None) as url:
            yield url, browsers, sandboxes


@asynccontextmanager
async def computer(lease: Any) -> AsyncGenerator[Any]:
    async with AsyncExitStack() as stack:
        headers = {"authorization": f"Bearer {lease.key}"}
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=60))
        client = await stack.enter_async_context(Client(streamable_http_client(lease.mcp_url, http_client=http)))

        async def act(**arguments: Any) -> Any:
            return await client.call_tool("computer", arguments)

        act.client = client  # pyright: ignore[reportFunctionMemberAccess] - for tests that list
        yield act


@needs_chromium
async def test_an_agent_that_only_sees_the_screen_ships_an_order_and_leaves_a_note(desk: Desk):
    """E11"""
    async with served() as (url, _, sandboxes):
        leases = BrowserLeases(url, KEY)
        lease = await leases.create(ttl_s=120)
        await leases.navigate(lease.id, desk.url)
        await leases.health(lease.id)
        async with computer(lease) as act:
            assert [tool.name for tool in (await act.client.list_tools()).tools] == ["computer"]
            shown = await act(action="screenshot")
            picture = base64.b64decode(shown.content[0].data)
            assert picture.startswith(b"\x89PNG")
            assert (int.from_bytes(picture[16:20]), int.from_bytes(picture[20:24])) == (1024, 768)
            await act(action="click", coordinate=[838, 172])
            assert desk.ask("SELECT status FROM orders WHERE id = 102") == ["shipped"]
            await act(action="click", coordinate=[250, 370])
            await act(action="type", text="wrong words")
            await act(action="key", text="ctrl+a")
            await act(action="type", text="moth trap's on its way: <b>&")
            await act(action="key", text="Enter")
            assert desk.ask("SELECT text FROM notes") == ["moth trap's on its way: <b>&"]
            wrong = await act(action="click", coordinate=[5000, 1])
            assert wrong.is_error
            assert "outside the screen" in wrong.content[0].text
            missing = await act(action="type")
            assert missing.is_error
        await leases.delete(lease.id)
        await leases.delete(lease.id)
        assert await sandboxes.list({LABEL: lease.id}) == []
        with pytest.raises(EpisodeLost):
            await leases.health(lease.id)


@needs_chromium
@pytest.mark.adversarial
async def test_a_browser_reaches_only_the_origins_that_its_holder_opened(desk: Desk, tmp_path: Path):
    app = import_file(EXAMPLES / "webapp/app.py")
    app.seed(tmp_path / "other.db")
    other = app.Desk(("127.0.0.1", 0), tmp_path / "other.db")
    threading.Thread(target=other.serve_forever, daemon=True).start()
    async with served() as (url, browsers, _):
        leases = BrowserLeases(url, KEY)
        lease = await leases.create(ttl_s=120)
        await leases.navigate(lease.id, desk.url)
        held = browsers.get(lease.id)
        before = held.proxy.refused
        with pytest.raises(EnvError, match="answered 403"):
            await held.browser.navigate(f"http://127.0.0.1:{other.server_port}/")
        assert held.proxy.refused > before
        with pytest.raises(EnvError):
            await held.browser.navigate("file:///etc/passwd/nothing")
        with pytest.raises(EnvError, match="not a page's address"):
            await leases.navigate(lease.id, "file:///etc/passwd")
    other.shutdown()


@needs_chromium
@pytest.mark.slow
async def test_a_page_that_fails_is_an_error_of_navigate_and_of_health(desk: Desk):
    async with served() as (url, _, _):
        leases = BrowserLeases(url, KEY)
        lease = await leases.create(ttl_s=120)
        with pytest.raises(EnvError, match="answered 404"):
            await leases.navigate(lease.id, desk.url + "nowhere")
        with pytest.raises(EnvError, match="answered 502"):
            await leases.navigate(lease.id, "http://127.0.0.1:49/")


@needs_chromium
@pytest.mark.adversarial
async def test_a_leases_key_opens_its_tools_and_nothing_else():
    async with served(capacity=1) as (url, _, _):
        leases = BrowserLeases(url, KEY)
        lease = await leases.create(ttl_s=120)
        with pytest.raises(EnvUnavailable, match="all 1 browsers are leased"):
            await leases.create()
        agent = {"authorization": f"Bearer {lease.key}"}
        async with aiohttp.ClientSession() as http:
            for method, path in (
                ("GET", "/leases"),
                ("POST", "/leases"),
                ("GET", f"/leases/{lease.id}"),
                ("DELETE", f"/leases/{lease.id}"),
                ("POST", f"/leases/{lease.id}/navigate"),
                ("GET", f"/leases/{lease.id}/health"),
                ("POST", "/leases/brw_other/mcp"),
            ):
                async with http.request(method, url + path, headers=agent) as answer:
                    assert answer.status == 403, path
                async with http.request(method, url + path) as answer:
                    assert answer.status == 401, path
        await leases.health(lease.id)


@needs_chromium
@pytest.mark.slow
async def test_a_lease_ends_with_its_time_and_its_sandbox_with_it():
    async with served() as (url, browsers, sandboxes):
        lease = await BrowserLeases(url, KEY).create(ttl_s=1)
        async with asyncio.timeout(60):
            while lease.id in browsers.held or await sandboxes.list({LABEL: lease.id}):
                await asyncio.sleep(0.1)
        with pytest.raises(EnvError, match="ttl_s must be above 0"):
            await BrowserLeases(url, KEY).create(ttl_s=10**9)


@needs_chromium
@pytest.mark.slow
async def test_no_browser_outlives_a_lease_server_that_was_killed(tmp_path: Path):
    argv = [
        sys.executable,
        "-m",
        "rollyard",
        "serve",
        "browser",
        "--json",
        "--key-file",
        str(tmp_path / "key"),
    ]
    server = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    try:
        url = msgspec.json.decode(await server.stdout.readline())["url"]
        lease = await BrowserLeases(url, (tmp_path / "key").read_text().strip()).create(ttl_s=600)
        async with backend("local") as sandboxes:
            assert len(await sandboxes.list({LABEL: lease.id})) == 1
            server.send_signal(signal.SIGKILL)
            async with asyncio.timeout(60):
                while await sandboxes.list({LABEL: lease.id}):
                    await asyncio.sleep(0.1)
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


async def test_a_missing_credential_or_server_is_said_at_construction():
    """E11"""
    for name in ("ROLLYARD_BROWSER_URL", "ROLLYARD_BROWSER_KEY"):
        os.environ.pop(name, None)
    with pytest.raises(ConfigError, match="credential") as raised:
        BrowserLeases("http://127.0.0.1:1")
    assert "ROLLYARD_BROWSER_KEY" in str(raised.value)
    with pytest.raises(ConfigError, match="no browser server"):
        BrowserLeases(key="k")
    with pytest.raises(ConfigError, match="needs a key"):
        BrowserServer(Browsers(backend("local")), key=" ")
    with pytest.raises(EnvUnavailable, match="does not answer"):
        await BrowserLeases("http://127.0.0.1:1", "k").create()


def test_chords_become_key_events_and_unknown_names_are_refused_before_any():
    assert [event["type"] for event in presses("Enter")] == ["keyDown", "keyUp"]
    held = list(presses("ctrl+shift+a"))
    assert [event["key"] for event in held] == ["Control", "Shift", "a", "a", "Shift", "Control"]
    assert all("text" not in event for event in held)
    assert next(iter(presses("+")))["text"] == "+"
    for wrong in ("hyper+a", "Entr", ""):
        with pytest.raises(ConfigError):
            list(presses(wrong))
