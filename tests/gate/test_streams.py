"""Streams: the real status is held back, then keepalives that agents accept, then the answer or an error of the dialect."""

from __future__ import annotations

import asyncio
import json

import pytest

from rollyard.core.errors import UpstreamError
from rollyard.gate import GateLimits
from tests.gate.conftest import Answers, ask, chat, open_gate, said

pytestmark = pytest.mark.anyio
SOON = GateLimits(tick_s=0.02, status_s=0.1, keepalive_s=0.05)
USER = [{"role": "user", "content": "hi"}]
DIALECTS = {
    "chat": ("/v1/chat/completions", chat(stream=True)),
    "responses": ("/v1/responses", {"model": "m", "stream": True, "input": "hi"}),
    "messages": ("/v1/messages", {"model": "m", "stream": True, "max_tokens": 9, "messages": USER}),
    "gemini": (
        "/v1beta/models/m:streamGenerateContent?alt=sse",
        {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    ),
}


def slowly(seconds: float, outcome) -> Answers:
    async def answer(call):
        await asyncio.sleep(seconds)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return Answers(answer)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_quick_answer_has_its_length_and_no_keepalive(dialect):
    path, body = DIALECTS[dialect]
    async with open_gate(limits=SOON) as gate:
        session = await gate.open_session("r1")
        answer = await ask(gate, "POST", path, key=session.key, body=body)
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert int(answer.headers["content-length"]) == len(answer.body)
        assert b"hello" in answer.body


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_slow_answer_is_kept_alive_in_its_dialect(dialect):
    path, body = DIALECTS[dialect]
    async with open_gate(slowly(0.4, said("hello")), limits=SOON) as gate:
        session = await gate.open_session("r1")
        answer = await ask(gate, "POST", path, key=session.key, body=body)
        assert answer.status == 200
        text = answer.body.decode()
        waiting, _, rest = text.partition("hello")
        assert rest is not None and "hello" in text
        if dialect == "chat":
            assert "\n:" in waiting or waiting.startswith(":")
        if dialect == "responses":
            assert waiting.count("response.in_progress") > 1
            assert text.count("event: response.created") == 1
        if dialect == "messages":
            assert "event: ping" in waiting
            assert text.count("event: message_start") == 1
        if dialect == "gemini":
            assert not any(line.startswith(":") for line in text.splitlines())
            assert waiting.count("data:") > 1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_failure_within_the_time_has_its_real_status(dialect):
    path, body = DIALECTS[dialect]
    async with open_gate(slowly(0.01, UpstreamError("secret words", status=500)), limits=SOON) as gate:
        session = await gate.open_session("r1")
        answer = await ask(gate, "POST", path, key=session.key, body=body)
        assert answer.status == 500
        assert b"secret" not in answer.body
        assert "error" in answer.json


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_late_failure_is_an_error_inside_the_stream(dialect):
    path, body = DIALECTS[dialect]
    async with open_gate(slowly(0.3, UpstreamError("secret words", status=500)), limits=SOON) as gate:
        session = await gate.open_session("r1")
        answer = await ask(gate, "POST", path, key=session.key, body=body)
        assert answer.status == 200
        assert b"secret" not in answer.body
        assert b"error" in answer.body or b"response.failed" in answer.body
        assert session.trajectory.records[0].error


async def test_a_call_that_is_not_streamed_keeps_its_real_status_however_late():
    async with open_gate(slowly(0.3, UpstreamError("x", status=503)), limits=SOON) as gate:
        session = await gate.open_session("r1")
        answer = await ask(gate, "POST", "/v1/chat/completions", key=session.key, body=chat())
        assert answer.status == 503


async def test_an_http_1_0_reader_gets_a_stream_without_chunks():
    async with open_gate(slowly(0.3, said("hello")), limits=SOON) as gate:
        session = await gate.open_session("r1")
        body = json.dumps(chat(stream=True)).encode()
        head = f"POST /v1/chat/completions HTTP/1.0\r\nauthorization: Bearer {session.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        from tests.gate.conftest import send

        answer = await send(gate, head.encode() + body)
        assert "transfer-encoding" not in answer.headers
        assert b"hello" in answer.body
