"""`RemoteTools` against a server of the older `mcp` package: sessions, event streams, images, structured results, progress."""

from __future__ import annotations

import asyncio
import socket
import subprocess

import pytest

from rollyard.tools import RemoteTools
from tests.plane.venvs import interpreter, unless_there

VERSION = "1.30.0"
SERVER = """
import asyncio, sys
from pydantic import BaseModel
from mcp.server.fastmcp import Context, FastMCP, Image

server = FastMCP("old", host="127.0.0.1", port=int(sys.argv[1]))
visits = {}

class Point(BaseModel):
    x: int
    y: int

@server.tool()
def add(a: int, b: int) -> int:
    "Adds."
    return a + b

@server.tool()
def point() -> Point:
    "A structured result."
    return Point(x=1, y=2)

@server.tool()
def picture() -> Image:
    "An image of 2 MB: more than one event usually holds."
    return Image(data=bytes(1_500_000), format="png")

@server.tool()
def several() -> list[str]:
    "Several texts."
    return ["a", "b"]

@server.tool()
def nothing() -> None:
    "No result."

@server.tool()
def broken() -> str:
    "Fails."
    raise ValueError("no such thing")

@server.tool()
async def slow(ctx: Context) -> str:
    "Says how far it is."
    for n in range(3):
        await ctx.report_progress(n, 3)
        await asyncio.sleep(0.05)
    return "done"

@server.tool()
def again(ctx: Context) -> int:
    "How often this session came."
    key = id(ctx.session)
    visits[key] = visits.get(key, 0) + 1
    return visits[key]

server.run(transport="streamable-http")
"""
pytestmark = [pytest.mark.anyio, *([mark] if (mark := unless_there("mcp", VERSION)) else [])]


@pytest.fixture
async def url(tmp_path):
    python = await asyncio.to_thread(interpreter, "mcp", VERSION)
    (tmp_path / "server.py").write_text(SERVER)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running = subprocess.Popen([python, str(tmp_path / "server.py"), str(port)], stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        running.terminate()
        running.wait(30)


async def test_every_kind_of_result_of_an_older_server_is_understood(url):
    """E3, E4"""
    async with RemoteTools(url, timeout_s=60, pauses_s=(1.0,)) as tools:
        names = [tool.name for tool in await tools.list(attempts=60)]
        assert names == ["add", "point", "picture", "several", "nothing", "broken", "slow", "again"]
        assert (await tools.ask("add", {"a": 2, "b": 3})).value == 5
        assert (await tools.ask("point", {})).value == {"x": 1, "y": 2}
        seen = await tools.ask("picture", {})
        assert (
            len(seen.images) == 1
            and seen.images[0].startswith("data:image/png;base64,AAAA")
            and len(seen.images[0]) > 2_000_000
        )
        assert (await tools.ask("several", {})).text == "a\nb"
        assert (await tools.ask("nothing", {})).value is None
        failed = await tools.ask("broken", {})
        assert failed.is_error and "no such thing" in failed.text
        assert (await tools.ask("slow", {})).value == "done"
        assert [(await tools.ask("again", {})).value for _ in range(3)] == [1, 2, 3], "one session for all calls"
