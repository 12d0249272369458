"""A stream of any dialect put together into the whole body it stands for, as a client would; `codec.decode_reply` reads it."""

from __future__ import annotations

from typing import Any

import msgspec


def read_events(stream: bytes) -> list[bytes]:
    """The data of each event; comments are none."""
    blocks = [block for block in stream.split(b"\n\n") if block]
    lines = [line for block in blocks for line in block.split(b"\n") if line.startswith(b"data: ")]
    return [line.removeprefix(b"data: ") for line in lines]


def read_stream(dialect: str, stream: bytes) -> bytes:
    """The body. A stream without its end is an AssertionError."""
    events = read_events(stream)
    if dialect in ("chat", "completions"):
        assert events.pop() == b"[DONE]"
    found = [msgspec.json.decode(event) for event in events]
    return msgspec.json.encode(READERS[dialect](found))


def _chat(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    message: dict[str, Any] = {"role": "assistant"}
    calls: dict[int, dict[str, Any]] = {}
    finish = None
    for chunk in chunks:
        whole |= {name: value for name, value in chunk.items() if value is not None}
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    _add_calls(calls, value)
                elif name != "role" and value is not None:
                    message[name] = message.get(name, "") + value
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    assert finish is not None
    return whole | {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def _add_calls(calls: dict[int, dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    for delta in deltas:
        mine = calls.setdefault(delta["index"], {"id": delta.get("id"), "type": delta.get("type")})
        for kind, text in (("function", "arguments"), ("custom", "input")):
            if kind in delta:
                part = mine.setdefault(kind, {"name": delta[kind].get("name"), text: ""})
                part[text] += delta[kind].get(text) or ""


def _completions(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    whole = {name: value for chunk in chunks for name, value in chunk.items() if value is not None}
    finish = [choice["finish_reason"] for choice in choices][-1]
    return whole | {"choices": [{"index": 0, "text": "".join(c["text"] for c in choices), "finish_reason": finish}]}


def _messages(events: list[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    arguments: dict[int, str] = {}
    for event in events:
        if event["type"] == "message_start":
            whole = event["message"]
        elif event["type"] == "content_block_start":
            blocks[event["index"]] = event["content_block"]
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    block[name] = (block.get(name) or "") + delta[name]
            if "partial_json" in delta:
                arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
        elif event["type"] == "message_delta":
            whole |= event["delta"]
            whole["usage"] = (whole.get("usage") or {}) | event.get("usage", {})
    assert events[-1]["type"] == "message_stop"
    for index, text in arguments.items():
        blocks[index]["input"] = msgspec.Raw(text.encode() or b"{}")
    return whole | {"content": [blocks[index] for index in sorted(blocks)]}


def _responses(events: list[dict[str, Any]]) -> dict[str, Any]:
    assert events[-1]["type"] in ("response.completed", "response.incomplete", "response.failed")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    return events[-1]["response"]


def _gemini(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    whole = {name: value for chunk in chunks for name, value in chunk.items()}
    candidates = [candidate for chunk in chunks for candidate in chunk["candidates"]]
    assert "finishReason" in candidates[-1]
    parts = [part for candidate in candidates for part in candidate.get("content", {}).get("parts", ())]
    return whole | {"candidates": [candidates[-1] | {"content": {"role": "model", "parts": parts}}]}


READERS = {
    "chat": _chat,
    "completions": _completions,
    "messages": _messages,
    "responses": _responses,
    "gemini": _gemini,
}
