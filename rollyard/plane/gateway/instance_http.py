"""One HTTP request to an instance's own server, asked by the plane itself through its gateway."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from starlette.types import Message, Scope

from rollyard.plane.gateway.gateway import Gateway


class InstanceAnswer(NamedTuple):
    status: int
    body: bytes


async def ask(gateway: Gateway, instance_id: str, method: str, path: str, body: bytes = b"") -> InstanceAnswer:
    """Raises what the gateway raises. The caller has the deadline."""
    head: list[int] = []
    parts: list[bytes] = []
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        return next(messages, None) or await asyncio.Future()  # nobody hangs up

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            head.append(message["status"])
        else:
            parts.append(message.get("body", b""))

    headers = [(b"accept", b"application/json")]
    if body:
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope: Scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
    }
    await gateway.forward(scope, receive, send, instance_id)
    return InstanceAnswer(head[0], b"".join(parts))
