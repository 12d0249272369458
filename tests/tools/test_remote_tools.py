"""Tools of several MCP servers as one list: union, collisions, discovery, servers that are down, retries, what results mean."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import socket
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from rollyard.core.errors import ConfigError, EnvError, EnvUnavailable, UnknownTool
from rollyard.core.message import Image
from rollyard.testing.serve import serve_app
from rollyard.tools import RemoteTools, ToolError, Toolset, openai_tool, tool
from rollyard.tools.answers import NO_IMAGE, read

pytestmark = pytest.mark.anyio
FAST = {"pauses_s": (0.0,), "timeout_s": 20.0}


class Server:
    """A toolset at a path; `down` answers that many requests with 503 first, `seen` are the methods that were asked for."""

    def __init__(self, *tools, at="/mcp", down=0, status=503):
        self.toolset = Toolset(tools)
        self.at, self.down, self.status, self.seen, self.keys = at, down, status, [], []

    async def __call__(self, scope, receive, send):
        if scope["path"] != self.at:
            await Response(status_code=404)(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.seen.append(json.loads(body)["method"] if body else scope["method"])
        self.keys.append(dict(scope["headers"]).get(b"authorization"))
        if self.down > 0:
            self.down -= 1
            await Response(status_code=self.status)(scope, receive, send)
            return

        given = [body]

        async def again():
            if given:
                return {"type": "http.request", "body": given.pop(), "more_body": False}
            return await receive()

        await self.toolset(scope, again, send)


def speaking(name, said):
    @tool(name=name)
    async def say() -> str:
        """Says who it is."""
        return said

    return say


@asynccontextmanager
async def two(first, second):
    async with serve_app(first) as one, serve_app(second) as other:
        yield one + "/mcp", other + "/mcp"


@pytest.fixture
def closed_url():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    return f"http://127.0.0.1:{port}/mcp"


async def test_tools_are_the_union_in_openai_format_and_each_call_goes_to_its_owner():
    """E3"""

    @tool
    async def add(a: int, b: int = 1) -> int:
        """Adds."""
        return a + b

    left, right = Server(add), Server(speaking("who", "right"))
    async with two(left, right) as urls, RemoteTools(urls, "the-key", **FAST) as tools:
        listed = await tools.openai()
        assert [t["function"]["name"] for t in listed] == ["add", "who"]
        assert listed[0]["type"] == "function"
        assert listed[0]["function"]["description"] == "Adds."
        assert listed[0]["function"]["parameters"]["required"] == ["a"]
        assert await tools.call("add", {"a": 2}) == "3"
        assert await tools.call("who", {}) == "right"
        assert left.seen.count("tools/call") == 1 and right.seen.count("tools/call") == 1
        assert left.seen.count("tools/list") == 1, "calls go by the list at hand"
        assert set(left.keys) == {b"Bearer the-key"}


async def test_a_name_at_two_servers_is_decided_by_the_stated_policy():
    """E3"""
    async with two(Server(speaking("who", "left")), Server(speaking("who", "right"))) as (one, other):
        async with RemoteTools([one, other], **FAST) as tools:
            assert [t.name for t in await tools.list()] == ["who"]
            assert await tools.call("who", {}) == "left"
        async with RemoteTools({"crm": one, "mail": other}, collisions="prefix", **FAST) as tools:
            assert [t.name for t in await tools.list()] == ["crm_who", "mail_who"]
            assert await tools.call("mail_who", {}) == "right"
        async with RemoteTools([one, other], collisions="error", **FAST) as tools:
            with pytest.raises(EnvError, match="'who' is at"):
                await tools.list()
    with pytest.raises(ConfigError, match="last"):
        RemoteTools(["http://x/mcp"], collisions="last")


async def test_a_root_is_searched_for_both_known_places():
    """E3: discovery of `mcp` and `api/v1/mcp`"""
    standard, api = Server(speaking("who", "mcp")), Server(speaking("what", "api"), at="/api/v1/mcp")
    for app, names in ((standard, ["who"]), (api, ["what"])):
        async with serve_app(app) as url, RemoteTools(url + "/", **FAST) as tools:
            assert [t.name for t in await tools.list()] == names
            assert tools.warnings == ()

    async def both(scope, receive, send):
        await (standard if scope["path"] == "/mcp" else api)(scope, receive, send)

    async with serve_app(both) as url, RemoteTools(url + "/", **FAST) as tools:
        assert [t.name for t in await tools.list()] == ["who", "what"]


async def test_each_endpoint_of_a_root_is_tried_by_itself_and_named_when_it_is_dead(caplog):
    """E3: a root whose `api/v1/mcp` answers 503 has lost its tools, and says so"""
    standard, api = Server(speaking("who", "mcp")), Server(speaking("what", "api"), at="/api/v1/mcp")

    async def both(scope, receive, send):
        await (standard if scope["path"] == "/mcp" else api)(scope, receive, send)

    async with serve_app(both) as url:
        api.down = 99
        async with RemoteTools(url + "/", **FAST) as tools:
            with caplog.at_level(logging.WARNING, "rollyard.tools"):
                assert [t.name for t in await tools.list()] == ["who"]
            assert tools.warnings == (f"{url}/api/v1/mcp: HTTP 503",) and tools.warnings[0] in caplog.text
            assert len(api.seen) == 6 and standard.seen.count("tools/list") == 1
        api.down = 2
        async with RemoteTools(url + "/", **FAST) as tools:
            assert {t.name for t in await tools.list()} == {"who", "what"}
            assert tools.warnings == ()


@pytest.mark.parametrize("how", ["broken", 502, 504])
async def test_a_call_whose_connection_broke_never_runs_twice(how):
    ran = []

    @tool
    async def pay() -> str:
        """Pays."""
        ran.append("paid")
        return "paid"

    server = Server(pay)

    async def breaks(scope, receive, send):
        """Runs the tool, and then its answer gets lost."""
        if scope["type"] != "http":
            return

        async def lossy(message):
            if server.seen[-1:] != ["tools/call"]:
                await send(message)
            elif message["type"] == "http.response.body" and b"paid" in message.get("body", b""):
                if how == "broken":
                    raise ConnectionResetError("cut")
                await Response(status_code=how)(scope, receive, send)
            elif how == "broken":
                await send(message)

        await server(scope, receive, lossy)

    async with serve_app(breaks) as url, RemoteTools(url + "/mcp", pauses_s=(0.0,), timeout_s=5.0) as tools:
        await tools.list()
        with pytest.raises(EnvError):
            await tools.ask("pay", {})
    assert ran == ["paid"]


async def test_a_call_whose_answer_was_lost_is_asked_for_again_by_its_key_and_runs_once():
    ran, lost = [], []

    @tool
    async def pay() -> str:
        """Pays."""
        ran.append("paid")
        return f"paid {len(ran)}"

    server = Server(pay)

    async def breaks(scope, receive, send):
        """The first answer gets lost on its way."""
        if scope["type"] != "http":
            return

        async def lossy(message):
            if not lost and message["type"] == "http.response.body" and b"paid" in message.get("body", b""):
                lost.append(message)
                raise ConnectionResetError("cut")
            await send(message)

        await server(scope, receive, lossy)

    async with serve_app(breaks) as url, RemoteTools(url + "/mcp", pauses_s=(0.0,), timeout_s=30.0) as tools:
        await tools.list()
        assert (await tools.ask("pay", {})).text == "paid 1" and lost
        assert (await tools.ask("pay", {})).text == "paid 2", "another call has another key"
    assert ran == ["paid", "paid"]


async def test_one_server_down_costs_its_own_tools_and_leaves_a_warning_that_names_it(closed_url, caplog):
    """E3"""
    async with serve_app(Server(speaking("who", "alive"))) as url:
        async with RemoteTools([closed_url, url + "/mcp"], **FAST) as tools:
            with caplog.at_level(logging.WARNING, "rollyard.tools"):
                assert [t.name for t in await tools.list()] == ["who"]
            assert len(tools.warnings) == 1 and closed_url in tools.warnings[0]
            assert closed_url in caplog.text
            assert await tools.call("who", {}) == "alive"


async def test_all_servers_down_is_an_error_that_lists_each_cause(closed_url):
    """E3"""
    async with serve_app(Server(down=99)) as url:
        async with RemoteTools([closed_url, url + "/mcp"], **FAST) as tools:
            with pytest.raises(EnvUnavailable) as caught:
                await tools.list()
            assert closed_url in str(caught.value) and "ConnectError" in str(caught.value)
            assert f"{url}/mcp: HTTP 503" in str(caught.value)


async def test_three_attempts_and_the_pauses_between_them():
    """E3"""
    defaults = inspect.signature(RemoteTools).parameters
    assert defaults["attempts"].default == 3
    assert defaults["pauses_s"].default == (1.0, 2.0, 4.0)
    # connecting takes two requests of the client: its probe, and the older handshake when that fails
    flaky = Server(speaking("who", "at last"), down=4)
    async with serve_app(flaky) as url, RemoteTools(url + "/mcp", **FAST) as tools:
        assert [t.name for t in await tools.list()] == ["who"]
        flaky.down = 1
        assert await tools.call("who", {}) == "at last", "a call that was not served is tried again"
    hopeless = Server(speaking("who", "never"), down=6)
    async with serve_app(hopeless) as url, RemoteTools(url + "/mcp", **FAST) as tools:
        with pytest.raises(EnvUnavailable):
            await tools.list()
        assert len(hopeless.seen) == 6


async def test_a_refusal_and_an_unknown_tool_are_never_asked_again():
    """E3"""
    refusing = Server(speaking("who", "no"), down=99, status=401)
    async with serve_app(refusing) as url, RemoteTools(url + "/mcp", **FAST) as tools:
        with pytest.raises(EnvError, match="HTTP 401"):
            await tools.list()
        assert len(refusing.seen) == 2
    server = Server(speaking("who", "yes"))
    async with serve_app(server) as url, RemoteTools(url + "/mcp", **FAST) as tools:
        await tools.list()
        asked = len(server.seen)
        with pytest.raises(UnknownTool, match="known: who"):
            await tools.ask("whom", {})
        assert len(server.seen) == asked


async def test_a_server_that_came_back_is_used_again_and_a_slow_one_is_given_up():
    @tool
    async def wait() -> str:
        """Waits."""
        await asyncio.sleep(30)
        return "never"

    server = Server(speaking("who", "back"), wait)
    async with RemoteTools("http://127.0.0.1:1/mcp", **FAST) as tools:
        with pytest.raises(EnvUnavailable):
            await tools.list()
    async with serve_app(server) as url, RemoteTools(url + "/mcp", pauses_s=(0.0,), timeout_s=3) as tools:
        assert await tools.call("who", {}) == "back"
        with pytest.raises(EnvError, match="within 3 s"):
            await tools.ask("wait", {})
        assert server.seen.count("tools/call") == 2, "what may be running is not started twice"
        assert await tools.call("who", {}) == "back"


async def test_results_of_real_tools_are_read_for_what_they_mean():
    """E4"""

    @tool
    async def text() -> str:
        """Text."""
        return "just words"

    @tool
    async def number() -> str:
        """JSON text."""
        return '{"rows": [1, 2]}'

    @tool
    async def record() -> dict:
        """Structured content."""
        return {"a": 1}

    @tool
    async def picture() -> Image:
        """An image."""
        return Image(media_type="image/png", data="aGk=")

    @tool
    async def fails() -> str:
        """Fails."""
        raise ToolError("no such row")

    server = Server(text, number, record, picture, fails)
    async with serve_app(server) as url, RemoteTools(url + "/mcp", **FAST) as tools:
        assert (await tools.ask("text", {})).value == "just words"
        answer = await tools.ask("number", {})
        assert answer.value == {"rows": [1, 2]} and answer.text == '{"rows": [1, 2]}'
        assert (await tools.ask("record", {})).value == {"a": 1}
        seen = await tools.ask("picture", {})
        assert seen.images == ("data:image/png;base64,aGk=",)
        assert seen.content == [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]
        failed = await tools.ask("fails", {})
        assert failed.is_error and failed.value == {"error": "no such row"} and failed.content == "no such row"


def blunt(result, *, schema=None, seen=None):
    """A server of the older protocol that answers every tool call with `result`, valid or not."""

    async def answer(request):
        asked = await request.json()
        if seen is not None:
            seen.append(asked["method"])
        if "id" not in asked:
            return Response(status_code=202)
        if asked["method"] == "initialize":
            body = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "x", "version": "1"},
            }
        elif asked["method"] == "tools/list":
            listed = {"name": "look", "inputSchema": {"type": "object"}}
            if schema is not None:
                listed["outputSchema"] = schema
            body = {"tools": [listed]}
        elif asked["method"] == "tools/call":
            body = result
        else:
            error = {"code": -32601, "message": "no such method"}
            return JSONResponse({"jsonrpc": "2.0", "id": asked["id"], "error": error})
        return JSONResponse({"jsonrpc": "2.0", "id": asked["id"], "result": body})

    async def no(request):
        return Response(status_code=405)

    return Starlette(
        routes=[Mount("/", routes=[Route("/mcp", answer, methods=["POST"]), Route("/mcp", no, methods=["GET"])])]
    )


@pytest.mark.parametrize(
    ("result", "value", "is_error"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb", False),
        ({"content": []}, "", False),
        ({"content": [], "isError": True}, {"error": "the tool failed and said nothing"}, True),
        ({"content": [{"type": "image", "data": None, "mimeType": "image/png"}]}, {"error": NO_IMAGE}, True),
        ({"content": [{"type": "image", "data": "", "mimeType": "image/png"}]}, {"error": NO_IMAGE}, True),
        ({"content": [], "structuredContent": {"rows": 3}}, {"rows": 3}, False),
        ({"content": [{"type": "text", "text": "5"}], "structuredContent": {"result": 5}}, 5, False),
        ({"content": [], "structuredContent": {"result": None}}, None, False),
        (
            {"content": [{"type": "text", "text": '{"result": 5}'}], "structuredContent": {"result": 5}},
            {"result": 5},
            False,
        ),
        ({"content": [{"type": "audio", "data": "aGk=", "mimeType": "audio/wav"}]}, "[audio audio/wav]", False),
        (
            {"content": [{"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}]},
            "inside",
            False,
        ),
    ],
)
async def test_odd_results_become_values_or_words_and_never_a_repr(result, value, is_error):
    """E4"""
    async with serve_app(blunt(result)) as url, RemoteTools(url + "/mcp", **FAST) as tools:
        answer = await tools.ask("look", {})
        assert answer.value == value and answer.is_error is is_error
        assert "Content(" not in str(answer.value) and "Content(" not in answer.text


async def test_a_result_that_is_not_mcp_is_an_error_the_model_can_read():
    """E4"""
    async with serve_app(blunt({"content": "just a string"})) as url, RemoteTools(url + "/mcp", **FAST) as tools:
        answer = await tools.ask("look", {})
        assert answer.is_error and "not valid" in answer.text


async def test_a_result_that_breaks_the_tools_own_schema_is_an_error_and_the_tool_ran_once():
    """E4"""
    schema, seen = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}, []
    broken = {"content": [{"type": "text", "text": "n is seven"}], "structuredContent": {"n": "seven"}}
    async with serve_app(blunt(broken, schema=schema, seen=seen)) as url, RemoteTools(url + "/mcp", **FAST) as tools:
        answer = await tools.ask("look", {})
        assert answer.is_error and "not valid" in answer.text
        assert seen.count("tools/call") == 1


def test_text_beside_an_image_without_data_is_kept():
    """E4"""
    answer = read([{"type": "text", "text": "the page"}, {"type": "image", "data": None}])
    assert answer.is_error and answer.text == f"the page\n{NO_IMAGE}"


def test_openai_format_keeps_the_schema():
    spec = speaking("who", "x")
    from rollyard.core.message import ToolSpec

    made = openai_tool(ToolSpec(spec.name, spec.description, json.dumps(dict(spec.schema))))
    assert made["function"]["parameters"]["type"] == "object"
