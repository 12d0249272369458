"""The Chrome DevTools protocol over any byte stream: calls with answers, nothing else.

A sandbox without a network has no address to connect to, only streams that its backend dials; so the WebSocket is spoken
here over such a stream. Events without a subscriber are dropped as they arrive.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from websockets.client import ClientProtocol
from websockets.exceptions import WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from rollyard.core.errors import EnvError, EnvUnavailable
from rollyard.core.protocols import ByteStream

_MESSAGE = 64 * 2**20  # a screenshot of a large screen is a few megabytes


class Cdp:
    """One connection. `session` is the target that calls go to; it is set once, when a page is attached to."""

    def __init__(self, stream: ByteStream, url: str) -> None:
        self.session: str | None = None
        self._stream = stream
        self._wire = ClientProtocol(parse_uri(url), max_size=_MESSAGE)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._reader: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()

    async def open(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wire.send_request(self._wire.connect())
        self._reader = asyncio.get_running_loop().create_task(self._read(ready))
        await self._flush()
        await ready

    async def aclose(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._stream.aclose()

    async def call(self, method: str, timeout_s: float, **params: Any) -> dict[str, Any]:
        """The result; an error of the browser's, a lost connection or no answer in time is an `EnvError`."""
        if self._reader is None or self._reader.done():
            raise EnvUnavailable("the browser is gone", hint="take another lease")
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                self._wire.send_text(msgspec.json.encode(message))
                await self._flush()
                reply = await answer
        except TimeoutError:
            raise EnvError(f"the browser did not answer {method} within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(number, None)
        if "error" in reply:
            raise EnvError(f"{method}: {reply['error'].get('message', 'refused')}")
        return reply.get("result", {})

    async def _flush(self) -> None:
        async with self._sending:
            for data in self._wire.data_to_send():
                if data:
                    await self._stream.send(data)

    async def _read(self, ready: asyncio.Future[None]) -> None:
        parts: list[bytes] = []
        failure = "the browser closed the connection"
        try:
            while data := await self._stream.receive():
                self._wire.receive_data(data)
                if self._wire.handshake_exc is not None:
                    raise self._wire.handshake_exc
                for event in self._wire.events_received():
                    if isinstance(event, Response):
                        ready.set_result(None)
                    elif isinstance(event, Frame) and event.opcode in (Opcode.TEXT, Opcode.CONT):
                        parts.append(bytes(event.data))
                        if event.fin:
                            self._take(b"".join(parts))
                            parts.clear()
                await self._flush()
        except (OSError, WebSocketException) as error:
            failure = f"the connection to the browser broke: {error}"
        finally:
            for answer in (ready, *self._waiting.values()):
                if not answer.done():
                    answer.set_exception(EnvUnavailable(failure, hint="take another lease"))

    def _take(self, text: bytes) -> None:
        reply = msgspec.json.decode(text, type=dict[str, Any])
        answer = self._waiting.get(reply.get("id", 0))
        if answer is not None and not answer.done():
            answer.set_result(reply)
