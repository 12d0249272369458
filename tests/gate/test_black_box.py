"""`black_box`: bytes pass through as they come; that a call happened is recorded, nothing of what was in it."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from rollyard.core.errors import UpstreamError
from rollyard.core.protocols import RawResponse
from rollyard.gate import Budget
from rollyard.policy import passthrough
from tests.gate.conftest import Answers, ask, chat, open_gate, port_of, request
from tests.waiting import until

pytestmark = pytest.mark.anyio


class Through(Answers):
    """A passthrough policy made of chunks."""

    def __init__(self, chunks=(b"one", b"two"), status=200, headers=None, error=None) -> None:
        super().__init__()
        self.requests = []
        self.chunks, self.status, self.error = chunks, status, error
        self.headers = headers or {"content-type": "text/plain", "content-encoding": "identity", "connection": "x"}
        self.closed_bodies = 0

    async def relay(self, raw):
        self.requests.append(raw)
        if self.error is not None:
            raise self.error
        return RawResponse(status=self.status, headers=self.headers, body=self._body())

    async def _body(self):
        try:
            for chunk in self.chunks:
                if isinstance(chunk, Exception):
                    raise chunk
                if callable(chunk):
                    await chunk()
                else:
                    yield chunk
        finally:
            self.closed_bodies += 1


async def test_bytes_and_status_pass_untouched_and_the_call_is_recorded_without_content(log):
    policy = Through(status=207)
    async with open_gate(policy, log=log) as gate:
        session = await gate.open_session("r1")
        body = b'{"anything": [not even json'
        answer = await ask(gate, "POST", "/v1/messages?x=1", key=session.key, body=body)
        assert (answer.status, answer.body) == (207, b"onetwo")
        assert answer.headers["content-encoding"] == "identity"
        (raw,) = policy.requests
        assert (raw.path, raw.body, raw.rollout_id) == ("/v1/messages?x=1", body, "r1")
        assert session.calls == 1
        assert session.trajectory.records == ()
        (record,) = log.records
        assert (record.capture, record.leaf, record.raw_request, record.trainable) == ("none", None, b"", False)
        assert log.nodes == {} and log.blobs == {}


async def test_bytes_pass_as_they_come():
    go = asyncio.Event()
    async with open_gate(Through((b"early", go.wait, b"late"))) as gate:
        session = await gate.open_session("r1")
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gate))
        writer.write(request("POST", "/v1/messages", key=session.key, body=chat()))
        seen = await asyncio.wait_for(reader.readuntil(b"early"), 5)
        assert b"late" not in seen
        go.set()
        assert b"late" in await reader.read()
        writer.close()


async def test_a_broken_upstream_is_an_error_before_and_a_cut_after_the_first_byte():
    async with open_gate(Through(error=UpstreamError("http://10.0.0.1 refused", status=502))) as gate:
        session = await gate.open_session("r1")
        answer = await ask(gate, "POST", "/v1/messages", key=session.key, body=chat())
        assert answer.status == 502 and b"10.0.0.1" not in answer.body
    async with open_gate(Through((b"half", UpstreamError("gone", status=502)))) as gate:
        session = await gate.open_session("r1")
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gate))
        writer.write(request("POST", "/v1/messages", key=session.key, body=chat()))
        got = b""
        try:
            got = await reader.read()
        except ConnectionResetError:
            pass
        assert not got.endswith(b"0\r\n\r\n"), "a cut answer must not look whole"
        writer.close()


async def test_a_reader_that_leaves_ends_the_relay():
    policy = Through((b"early", asyncio.Event().wait))
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gate))
        writer.write(request("POST", "/v1/messages", key=session.key, body=chat()))
        await reader.readuntil(b"early")
        writer.close()
        await until(lambda: policy.closed_bodies == 1)
        await until(lambda: not session.tasks)
        assert gate.calls.fair_queue.active == 0


async def test_the_budget_counts_here_too():
    async with open_gate(Through()) as gate:
        session = await gate.open_session("r1", budget=Budget(calls=1))
        assert (await ask(gate, "POST", "/v1/chat/completions", key=session.key, body=chat())).body == b"onetwo"
        stopped = await ask(gate, "POST", "/v1/chat/completions", key=session.key, body=chat())
        assert "budget" in stopped.json["choices"][0]["message"]["content"]
        assert session.exhausted == "calls"
        assert len(gate.policy.requests) == 1


@pytest.mark.adversarial
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/v1/files/file-1"),
        ("GET", "/v1/files"),
        ("POST", "/v1/files"),
        ("GET", "/v1/organization/admin_api_keys"),
        ("POST", "/v1/embeddings"),
        ("TRACE", "/v1/messages"),
        ("PUT", "/v1/messages"),
        ("DELETE", "/v1/messages"),
        ("OPTIONS", "/v1/chat/completions"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("POST", "/v1/messages/../files"),
        ("POST", "/v1/messages/batches"),
        ("POST", "/v1/files/../messages"),
        ("POST", "/v1/%2e%2e/v1/messages"),
        ("POST", "/v1beta/models/m:embedContent"),
        ("POST", "/v1beta/models/..%2f..%2ffiles:generateContent"),
        ("POST", "/v1beta/models/%252e%252e%252ffiles:generateContent"),
        ("POST", "/v1beta/models/a/../../files:generateContent"),
        ("POST", "/v1beta/cachedContents"),
    ],
)
async def test_only_calls_of_a_dialect_are_relayed(method, path):
    policy = Through()
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        for prefix in ("", "/r/r1"):
            answer = await ask(gate, method, prefix + path, key=session.key, body=b"{}")
            assert answer.status in (400, 404)
        assert policy.requests == [] and session.calls == 0


async def test_models_are_listed_by_the_gate_and_paths_are_written_anew():
    policy = Through()
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1", settings={"model": "the-model"})
        listed = await ask(gate, "GET", "/v1/models", key=session.key)
        assert listed.json["data"][0]["id"] == "the-model"
        assert policy.requests == []
        for path in ("/v1beta/models/a%3Fb:generateContent", "/v1//chat///completions", "/r/r1/v1/messages?beta=true"):
            await ask(gate, "POST", path, key=session.key, body=chat())
        assert [r.path for r in policy.requests] == [
            "/v1beta/models/a%3Fb:generateContent",
            "/v1/chat/completions",
            "/v1/messages?beta=true",
        ]


@pytest.mark.adversarial
@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_a_key_that_the_provider_echoes_does_not_reach_the_agent(encoding):
    """A provider that sends back what it was sent, in headers and body, whole and in pieces; and the rollout's own key does not
    go out in any part of a request."""
    key, seen = "provider-secret-0123456789", []

    async def provider(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head + await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r")[0])))
        body = b"you sent " + head + b" and " + head
        if encoding == "gzip":
            body = gzip.compress(body)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-encoding: %b\r\n" % encoding.encode())
        writer.write(b"x-echo: %b\r\ncontent-length: %d\r\n\r\n" % (key.encode(), len(body)))
        for start in range(0, len(body), 7):
            writer.write(body[start : start + 7])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(provider, "127.0.0.1", 0)
    policy = passthrough(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", key=key)
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        headers = {"x-note": f"my key is {session.key}", "cookie": "a=b", "x-http-method-override": "DELETE"}
        path = f"/v1/messages?note={session.key}"
        answer = await ask(gate, "POST", path, key=session.key, body=chat(f"my key: {session.key}"), headers=headers)
        assert answer.status == 200 and answer.body.startswith(b"you sent ")
        assert answer.body.count(b"[key]") > 1 and answer.headers["x-echo"] == "[key]"
        assert key.encode() not in answer.body
        (request_sent,) = seen
        assert key.encode() in request_sent and session.key.encode() not in request_sent
        assert b"cookie" not in request_sent.lower() and b"override" not in request_sent.lower()
    await policy.aclose()
    server.close()


async def test_the_providers_key_stays_on_the_host():
    """The real policy: the rollout's key never leaves, the provider's never enters."""
    seen = {}

    async def provider(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        seen["head"] = head.decode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfine")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(provider, "127.0.0.1", 0)
    policy = passthrough(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", key="provider-secret")
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        answer = await ask(gate, "POST", "/r/r1/v1/chat/completions", key=session.key, body=chat())
        assert answer.body == b"fine"
        assert "provider-secret" in seen["head"] and session.key not in seen["head"]
        assert seen["head"].startswith("POST /v1/chat/completions ")
    await policy.aclose()
    server.close()


SSE = {"content-type": "text/event-stream"}
JSON = {"content-type": "application/json"}
ENDED = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
OVERLOADED = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"busy"}}\n\n'
TOO_LONG = b'data: {"error":{"message":"This model\'s maximum context length is 8192 tokens."}}\n\n'


@pytest.mark.parametrize(
    ("chunks", "headers", "answered", "reason"),
    [
        ((b'data: {"choices"', b":[]}\n\n", ENDED, b"data: [DONE]\n\n"), SSE, True, None),
        ((b'data: {"choices":[]}\n\n', b"data: [DO", b"NE]\n\n"), SSE, True, None),
        ((b'event: message_stop\ndata: {"type":"message_stop"}\n\n',), SSE, True, None),
        ((b'data: {"choices":[]}\n\n',), SSE, False, None),  # it ends before its end
        ((b'data: {"choices":[]}\n\n', OVERLOADED), SSE, False, None),
        ((TOO_LONG,), SSE, False, "context"),
        ((b'{"choices": [', b"]}"), JSON, True, None),
        ((b"<html>busy</html>",), JSON, False, None),
        ((b"\x1f\x8b", b"packed"), {**JSON, "content-encoding": "gzip"}, True, None),  # nobody can tell
    ],
)
async def test_whether_a_call_was_answered_is_seen_as_it_passes(log, chunks, headers, answered, reason):
    async with open_gate(Through(chunks, headers=headers), log=log) as gate:
        session = await gate.open_session("r1")
        answer = await ask(gate, "POST", "/v1/chat/completions", key=session.key, body=chat())
        assert (answer.status, answer.body) == (200, b"".join(chunks))
        assert session.answered == answered and (session.refused is None) == answered
        assert (session.refused.reason if session.refused else None) == reason
        assert [(record.status, record.error) for record in log.records] == [(200, None)]
        assert log.records[0].finished_at >= log.records[0].received_at > 0


async def test_the_status_of_every_call_is_kept_and_nothing_of_its_content(log):
    policy = Through((b'{"error":{"message":"the words of the server"}}',), status=503, headers=JSON)
    async with open_gate(policy, log=log) as gate:
        session = await gate.open_session("r1")
        await ask(gate, "POST", "/v1/chat/completions", key=session.key, body=chat())
        policy.error = UpstreamError("no answer from http://x (refused)", status=502)
        await ask(gate, "POST", "/v1/chat/completions", key=session.key, body=chat())
        await ask(gate, "GET", "/v1/models", key=session.key)
        assert [record.status for record in log.records] == [503, 502]
        assert log.records[0].error == "the model server answered 503"
        assert (session.answered, session.refused.status) == (0, 502)  # a list of models is no answer
        assert session.in_flight == 0 and session.unanswered_s == 0


async def test_an_agent_that_leaves_after_the_last_event_was_answered():
    stays = asyncio.Event()
    async with open_gate(Through((ENDED, stays.wait), headers=SSE)) as gate:
        session = await gate.open_session("r1")
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gate))
        writer.write(request("POST", "/v1/chat/completions", key=session.key, body=chat()))
        await asyncio.wait_for(reader.readuntil(b"finish_reason"), 5)
        assert session.in_flight == 1
        writer.close()
        await until(lambda: session.in_flight == 0)
        assert (session.answered, session.refused) == (1, None)


async def test_an_agent_that_leaves_before_its_answer_has_left_by_itself():
    stays = asyncio.Event()
    async with open_gate(Through((b"data: {}\n\n", stays.wait), headers=SSE)) as gate:
        session = await gate.open_session("r1")
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gate))
        writer.write(request("POST", "/v1/chat/completions", key=session.key, body=chat()))
        await asyncio.wait_for(reader.readuntil(b"data:"), 5)
        writer.close()
        await until(lambda: session.in_flight == 0)
        assert (session.answered, session.refused.status) == (0, 499)


async def test_a_key_that_a_server_quotes_when_it_refuses_it_does_not_reach_the_agent():
    secret = "sk-operator-secret-0123456789"

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = f'{{"error":{{"message":"Incorrect API key provided: {secret}"}}}}'.encode()
        writer.write(
            b"HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    policy = passthrough(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", key=secret)
    async with server, open_gate(policy) as gate:
        session = await gate.open_session("r1")
        answer = await ask(gate, "POST", "/v1/chat/completions", key=session.key, body=chat())
        assert answer.status == 401 and secret.encode() not in answer.body and b"[key]" in answer.body
        assert "Incorrect API key provided: [key]" in session.refused.cause and session.refused.status == 401
    await policy.aclose()
