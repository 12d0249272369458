"""A WebSocket connection over asyncio, for both ends: the `websockets` package decides what bytes mean, this moves them.

A step of an environment is one small frame each way, so a message goes from the transport to its reader without a queue or a
task between them, and one that is a single whole frame without the package's parser (`websocket_frame`). That is only right
where a frame begins, so what the parser was given and has not yet turned into frames is counted. Extensions are not offered:
compressing a small frame costs more than sending it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side, State

from rollyard.net.websocket_frame import SMALL, Masks, least_size, read_message, write_text

_MESSAGE = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
_HEAD_END = b"\r\n\r\n"


class WebSocketMessages:
    """Whole messages out of frames; of a message in fragments the first is kept until the last is here."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    @property
    def partial(self) -> bool:
        return bool(self._parts)

    def add(self, frame: Frame) -> bytes | None:
        if frame.opcode not in _MESSAGE:
            return None
        if frame.fin and not self._parts:
            return bytes(frame.data)
        self._parts.append(bytes(frame.data))
        if not frame.fin:
            return None
        whole, self._parts = b"".join(self._parts), []
        return whole


class WebSocketConnection(asyncio.Protocol):
    """What client and server share. A subclass takes the handshake (`_opening`)."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._joined = WebSocketMessages()
        self._masked = protocol.side is Side.SERVER  # what comes in
        self._masks = None if self._masked else Masks()  # what goes out
        self._small = min(SMALL, protocol.max_message_size or SMALL)
        self._head: bytearray | None = bytearray()  # the other end's half of the handshake, until it is whole
        self._unread = 0  # bytes at most that the parser holds of a frame
        self._between_messages = False
        self._transport: asyncio.Transport | None = None
        self._gone = False
        self._heard: Callable[[bytes], None] | None = None
        self._messages: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._last = 0.0
        self._pinging: asyncio.TimerHandle | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def eof_received(self) -> None:
        if self._protocol.state is State.CONNECTING:
            self._protocol.receive_eof()
        self._end()

    def data_received(self, data: bytes) -> None:
        self._last = time.monotonic()
        protocol = self._protocol
        if self._between_messages and len(data) <= self._small:
            message = read_message(data, masked=self._masked)
            if message is not None:
                self._take(message)
                return
        if self._head is not None:
            self._head += data
        self._unread += len(data)
        protocol.receive_data(data)
        for event in protocol.events_received():
            if not isinstance(event, Frame):
                self._end_head()
                self._opening(event)
                continue
            self._unread -= least_size(event, masked=self._masked)
            message = self._joined.add(event)
            if message is not None:
                self._take(message)
        self._between_messages = self._head is None and self._unread == 0 and not self._joined.partial
        if protocol.writes:
            self._flush()
        if protocol.close_rcvd is not None or protocol.parser_exc is not None:
            self._end()
        elif protocol.state is State.CONNECTING:
            self._wake()

    # the application's side

    def send(self, text: bytes) -> None:
        if self._gone or self._protocol.state is not State.OPEN:
            return
        if len(text) < SMALL:
            self._write(write_text(text, None if self._masks is None else self._masks.draw()))
        else:
            self._protocol.send_text(text)
            self._flush()

    def abort(self) -> None:
        """As a cut wire would: nothing is said to the other end."""
        if self._transport is not None:
            self._transport.abort()

    # inside

    def _opening(self, event: Any) -> None:
        """The other end's half of the handshake."""
        raise NotImplementedError

    def _end_head(self) -> None:
        if self._head is not None:
            self._unread = len(self._head) - self._head.index(_HEAD_END) - len(_HEAD_END)
            self._head = None

    def _take(self, message: bytes) -> None:
        if self._heard is not None:
            self._heard(message)
            return
        self._messages.append(message)
        self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _flush(self) -> None:
        data = self._protocol.data_to_send()
        self._write(data[0] if len(data) == 1 else b"".join(data))

    def _write(self, data: bytes) -> None:
        if not self._gone and self._transport is not None:
            self._transport.write(data)

    def _hang_up(self, code: int, why: str = "") -> None:
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code, why)
            self._flush()
        self._end()

    def _end(self) -> None:
        if not self._gone:
            self._gone = True
            if self._pinging is not None:
                self._pinging.cancel()
            if self._transport is not None:
                self._transport.close()
        self._wake()

    def _ping(self, every_s: float, answer_s: float) -> None:
        """Every so often, where nothing was heard. A peer that is silent for longer than it has to answer is gone."""
        idle = time.monotonic() - self._last
        if idle > every_s + answer_s:
            self.abort()
            self._end()
            return
        if idle >= every_s / 2 and self._protocol.state is State.OPEN:
            self._protocol.send_ping(b"")
            self._flush()
        self._pinging = asyncio.get_running_loop().call_later(every_s, self._ping, every_s, answer_s)
