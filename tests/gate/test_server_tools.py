"""What a provider would do itself for a rollout without the public network: refused in every dialect, in every mode."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

import rollyard as ry
from rollyard.core.agent import Addition, Agent
from rollyard.core.errors import BadRequest
from rollyard.core.events import Event
from rollyard.core.task import Task
from rollyard.gate import Session
from rollyard.policy import passthrough, upstream
from rollyard.wire.server_tools import find_server_tools
from tests.gate.conftest import ask, open_gate
from tests.policy.conftest import serving

pytestmark = pytest.mark.anyio
__all__ = ["serving"]
URL = "https://example.com/x.png"
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "gemini": "/v1beta/models/m:generateContent",
}


def said(dialect: str, *parts: object, **members: object) -> dict:
    content = list(parts) or [{"type": "input_text" if dialect == "responses" else "text", "text": "hi"}]
    if dialect == "gemini":
        return {"contents": [{"role": "user", "parts": list(parts) or [{"text": "hi"}]}], **members}
    if dialect == "responses":
        return {"model": "m", "input": [{"role": "user", "content": content}], **members}
    limit = {"max_tokens": 5} if dialect == "messages" else {}
    return {"model": "m", **limit, "messages": [{"role": "user", "content": content}], **members}


def tool(dialect: str, kind: str, **fields: object) -> dict:
    return said(dialect, tools=[{kind: fields}] if dialect == "gemini" else [{"type": kind, **fields}])


RESULT = {
    "type": "tool_result",
    "tool_use_id": "t",
    "content": [{"type": "image", "source": {"type": "url", "url": URL}}],
}
REFUSED = [
    *(("responses", tool("responses", kind)) for kind in (
        "web_search", "web_search_preview_2025_03_11", "file_search", "code_interpreter", "mcp", "computer_use_preview",
        "image_generation", "a_tool_of_next_year",
    )),
    ("responses", tool("responses", "shell", environment={"type": "container_auto"})),
    ("responses", tool("responses", "namespace", name="n", tools=[{"type": "web_search"}])),
    ("responses", said("responses", {"type": "input_image", "image_url": URL})),
    ("responses", said("responses", {"type": "input_file", "file_url": URL})),
    *(("messages", tool("messages", kind, name="x")) for kind in (
        "web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "mcp_toolset", "computer_20250124",
    )),
    ("messages", said("messages", {"type": "image", "source": {"type": "url", "url": URL}})),
    ("messages", said("messages", {"type": "document", "source": {"type": "url", "url": URL}})),
    ("messages", said("messages", RESULT)),
    *(("gemini", tool("gemini", kind)) for kind in (
        "googleSearch", "google_search", "googleSearchRetrieval", "urlContext", "codeExecution", "fileSearch", "computerUse",
        "googleMaps",
    )),
    ("gemini", said("gemini", tools=[{"functionDeclarations": [{"name": "f"}], "googleSearch": {}}])),
    *(("chat", tool("chat", kind)) for kind in ("web_search", "mcp", "code_interpreter")),
    ("chat", said("chat", {"type": "image_url", "image_url": {"url": URL}})),
    ("chat", said("chat", {"type": "video_url", "video_url": {"url": URL}})),
]  # fmt: skip
ONLY_UNREAD = [  # refused as members in the modes that read calls
    ("chat", said("chat", web_search_options={"search_context_size": "low"})),
    ("messages", said("messages", mcp_servers=[{"type": "url", "url": URL, "name": "x"}])),
    ("gemini", said("gemini", {"fileData": {"fileUri": URL, "mimeType": "image/png"}})),
]
PASSED = [
    ("chat", said("chat", tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])),
    ("chat", said("chat", {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})),
    ("responses", tool("responses", "local_shell")),
    ("responses", tool("responses", "custom", name="apply_patch", format={"type": "text"})),
    (
        "messages",
        said("messages", tools=[{"name": "f", "input_schema": {"properties": {"image_url": {"type": "string"}}}}]),
    ),
    ("messages", tool("messages", "bash_20250124", name="bash")),
    ("gemini", said("gemini", tools=[{"functionDeclarations": [{"name": "f"}]}])),
]
ARGUMENTS = [
    ("messages", {"messages": [{"role": "assistant", "content": [
        {"type": "tool_use", "id": "t", "name": "fetch", "input": {"type": "url", "url": URL, "image_url": URL}}]}]}),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": [
        {"id": "t", "type": "function", "function": {"name": "f", "arguments": json.dumps({"image_url": URL})}}]}]}),
    ("gemini", {"contents": [{"parts": [{"functionCall": {"name": "f", "args": {"fileUri": URL}}}]}]}),
]  # fmt: skip


def ids(cases: list[tuple[str, dict]]) -> list[str]:
    return [f"{number}-{dialect}" for number, (dialect, _) in enumerate(cases)]


async def send(serving, mode: str, dialect: str, body: dict) -> tuple[int, str, list[str], Session]:
    """The status and answer of a request of a closed rollout, and what its provider was asked."""
    reached: list[str] = []

    async def provider(request: web.Request) -> web.Response:
        if request.method == "POST":
            reached.append(request.path)
        return web.json_response({})

    url = await serving(provider)
    policy = passthrough(url, key="k") if mode == "black_box" else upstream(url, "m", dialect=dialect)
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1", server_tools=False)
        answer = await ask(gate, "POST", PATHS[dialect], key=session.key, body=body)
        return answer.status, str(answer.json), reached, session


@pytest.mark.adversarial
@pytest.mark.parametrize("mode", ["black_box", "transparent_proxy"])
@pytest.mark.parametrize(("dialect", "body"), REFUSED, ids=ids(REFUSED))
async def test_a_closed_rollout_has_nothing_done_for_it_at_its_provider(serving, dialect, body, mode):
    status, answer, reached, session = await send(serving, mode, dialect, body)
    assert (status, reached) == (400, []), answer
    assert "no public network" in answer and len(session.refused_tools) == 1


@pytest.mark.adversarial
@pytest.mark.parametrize(("dialect", "body"), ONLY_UNREAD, ids=ids(ONLY_UNREAD))
async def test_what_passes_unread_is_looked_through_for_them_too(serving, dialect, body):
    assert (await send(serving, "black_box", dialect, body))[0::2][:2] == (400, [])


@pytest.mark.parametrize(("dialect", "body"), [*PASSED, *ARGUMENTS], ids=ids([*PASSED, *ARGUMENTS]))
def test_an_agents_own_tools_and_data_are_let_through(dialect, body):
    assert find_server_tools(dialect, json.dumps(body).encode()) == []


@pytest.mark.adversarial
@pytest.mark.parametrize(
    "body",
    [
        b'{"tools": [{"type": "web_search"}], "tools": []}',
        b'{"tools": "web_search"}',
        b'{"Tools": [{"type": "web_search"}]}',
        b'{"tools": [',
        b"\x1f\x8b\x08\x00",
        b'{"input": [{"content": [{"image_url": "data:", "image_url": "https://example.com"}]}]}',
    ],
)
def test_a_body_that_two_servers_could_read_differently_is_refused(body):
    with pytest.raises(BadRequest):
        find_server_tools("responses", body)


@pytest.mark.adversarial
def test_a_name_written_in_numbers_is_the_same_name():
    body = rb'{"input": [{"content": [{"image\u005furl": "https://example.com/"}]}], "t\u006fols": [{"type": "mcp"}]}'
    assert find_server_tools("responses", body) == ["mcp", "the URL of image_url"]
    assert find_server_tools("chat", b'{"messages": [{"content": [{"Image_URL": "https://a"}]}]}') == [
        "the URL of Image_URL"
    ]


async def test_a_rollout_says_what_was_refused_and_one_with_the_public_network_is_not_asked():
    searching = {"steps": [{"text": "done"}]}
    events: list[Event] = []

    async def sink(event) -> None:
        events.append(event)

    code = (
        "import json, os, urllib.request as r, urllib.error\n"
        "body = json.dumps({'model': 'm', 'messages': [{'role': 'user', 'content': 'x'}], 'tools': [{'type': 'web_search'}]})\n"
        "url = os.environ['URL'] + '/v1/chat/completions'\n"
        "headers = {'authorization': 'Bearer ' + os.environ['KEY'], 'content-type': 'application/json'}\n"
        "try: print(r.urlopen(r.Request(url, body.encode(), headers)).status)\n"
        "except urllib.error.HTTPError as error: print(error.code)\n"
    )
    variables = {"URL": "{root_url}", "KEY": "{key}"}
    agent = Agent(name="asker", argv=("python3", "-c", code), env=variables, wires={"chat": Addition()})
    async with ry.sandbox.backend("local") as backend:
        for network, refused in (("task", True), ("public", False)):
            events.clear()
            done = await ry.run_rollout(
                Task(id="t", instruction="x"), agent=agent, policy=ry.policy.scripted(searching), sandbox=backend,
                network=network, sink=sink,
            )  # fmt: skip
            assert done.log_tail.split()[-1:] == (["400"] if refused else ["200"]), done.log_tail
            told = [event.fields for event in events if event.name == "model.server_tool_refused"]
            assert told == ([{"what": "web_search", "times": 1}] if refused else [])
