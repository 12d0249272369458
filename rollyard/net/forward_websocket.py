"""A WebSocket passed on over a byte stream: the instance's handshake first, then messages both ways until one side ends.

The caller is let in only when the instance lets it in, with the subprotocol the instance chose; a refusal is passed on as it
is. Messages are passed whole, up to a limit; pings are answered on each side by that side.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send
from websockets.client import ClientProtocol
from websockets.exceptions import WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from rollyard.core.errors import PlaneUnavailable
from rollyard.core.protocols import ByteStream
from rollyard.net.forward import ForwardLimits, Target, pass_headers
from rollyard.net.websocket import WebSocketMessages

_LIBRARY = ("host", "content-type")
_NO_CODE = 1005


async def forward_ws(
    scope: Scope, receive: Receive, send: Send, stream: ByteStream, target: Target, limits: ForwardLimits
) -> None:
    """`websocket.connect` has been received. Raises before the caller was let in."""
    side = _Inside(scope, stream, target, limits)
    refused = await side.handshake()
    if refused is not None:
        await _refuse(scope, send, refused)
        return
    await send({"type": "websocket.accept", "subprotocol": side.subprotocol})
    tasks = {asyncio.create_task(side.outward(send)), asyncio.create_task(side.inward(receive))}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _refuse(scope: Scope, send: Send, refused: Response) -> None:
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    kind = refused.headers.get("content-type", "text/plain").encode("latin-1")
    status = refused.status_code if refused.status_code >= 400 else 502
    await send({"type": "websocket.http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    await send({"type": "websocket.http.response.body", "body": bytes(refused.body or b"")})


class _Inside:
    """The instance's side."""

    def __init__(self, scope: Scope, stream: ByteStream, target: Target, limits: ForwardLimits) -> None:
        self._scope, self._stream, self._target, self._limits = scope, stream, target, limits
        offered = [Subprotocol(name) for name in scope.get("subprotocols", [])]
        uri = parse_uri(f"ws://127.0.0.1:{target.port}{target.path.decode('ascii')}")
        self._protocol = ClientProtocol(uri, subprotocols=offered or None, max_size=limits.max_message)
        self._messages = WebSocketMessages()
        self._text = False
        self._sending = asyncio.Lock()  # both directions write: messages one way, pongs the other

    @property
    def subprotocol(self) -> str | None:
        return self._protocol.subprotocol

    async def handshake(self) -> Response | None:
        """None once it is up; the instance's answer where that is a refusal."""
        request = self._protocol.connect()
        for name, value in pass_headers(self._scope["headers"], self._target):
            shown = name.decode("latin-1")
            if shown not in _LIBRARY and not shown.startswith("sec-websocket-"):
                request.headers[shown] = value.decode("latin-1")
        self._protocol.send_request(request)
        await self._flush()
        async with asyncio.timeout(self._limits.head_s):
            while True:
                for event in await self._receive():
                    if isinstance(event, Response):
                        failed = self._protocol.handshake_exc is not None
                        if failed and event.status_code == 101:
                            raise PlaneUnavailable("the instance's WebSocket handshake is wrong")
                        return event if failed else None
                if self._protocol.handshake_exc is not None:
                    raise PlaneUnavailable("the instance does not speak WebSocket here")

    async def outward(self, send: Send) -> None:
        """Forward messages of the instance to the caller until the instance ends the connection."""
        while True:
            for event in await self._receive():
                if not isinstance(event, Frame):
                    continue
                if event.opcode is Opcode.CLOSE:
                    said = self._protocol.close_rcvd
                    code = 1000 if said is None or said.code == _NO_CODE else said.code
                    await send({"type": "websocket.close", "code": code})
                    return
                message = self._assemble(event)
                if message is not None:
                    await send(message)
            if self._protocol.close_expected() or self._protocol.parser_exc is not None:
                await send({"type": "websocket.close", "code": 1011})
                return

    async def inward(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                self._protocol.send_close(1000)
                await self._flush()
                return
            if message.get("text") is not None:
                self._protocol.send_text(message["text"].encode())
            else:
                self._protocol.send_binary(message.get("bytes") or b"")
            await self._flush()

    def _assemble(self, frame: Frame) -> dict[str, Any] | None:
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._text = frame.opcode is Opcode.TEXT
        data = self._messages.add(frame)
        if data is None:
            return None
        return (
            {"type": "websocket.send", "text": data.decode()}
            if self._text
            else {"type": "websocket.send", "bytes": data}
        )

    async def _receive(self) -> list[Any]:
        async with asyncio.timeout(self._limits.idle_s):
            data = await self._stream.receive()
        try:
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
        except (WebSocketException, EOFError) as error:
            raise PlaneUnavailable("the instance broke off its WebSocket") from error
        await self._flush()
        return self._protocol.events_received()

    async def _flush(self) -> None:
        async with self._sending:
            data = b"".join(self._protocol.data_to_send())
            if data:
                await self._stream.send(data)
