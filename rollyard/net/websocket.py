"""A WebSocket connection over asyncio, for both ends: the `websockets` package decides what bytes mean, this moves them.

A step of an environment is one small frame each way, so a message goes from the transport to its reader without a queue or a task
between them. Extensions are not offered: compressing a small frame costs more than sending it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, State

_MESSAGE = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)


class WebSocketMessages:
    """Whole messages out of frames; of a message in fragments the first is kept until the last is here."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

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
        protocol.receive_data(data)
        for event in protocol.events_received():
            if not isinstance(event, Frame):
                self._opening(event)
            elif (message := self._joined.add(event)) is not None:
                self._take(message)
        if protocol.writes:
            self._flush()
        if protocol.close_rcvd is not None or protocol.parser_exc is not None:
            self._end()
        elif protocol.state is State.CONNECTING:
            self._wake()

    # the application's side

    def send(self, text: bytes) -> None:
        if not self._gone and self._protocol.state is State.OPEN:
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
        if not self._gone and self._transport is not None:
            self._transport.write(data[0] if len(data) == 1 else b"".join(data))

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

    def _ping(self, every_s: float, patience_s: float) -> None:
        """Every so often, where nothing was heard. A peer that is silent for longer than it has to answer is gone."""
        idle = time.monotonic() - self._last
        if idle > every_s + patience_s:
            self.abort()
            self._end()
            return
        if idle >= every_s / 2 and self._protocol.state is State.OPEN:
            self._protocol.send_ping(b"")
            self._flush()
        self._pinging = asyncio.get_running_loop().call_later(every_s, self._ping, every_s, patience_s)
