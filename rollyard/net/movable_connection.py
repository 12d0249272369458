"""An HTTP connection that another process of this machine can go on with.

When the headers of a request are read, its socket can go to the other process together with what was read of that request
(`send_connection`, `receive_connections`). The other process serves it as if it had accepted it; the client notices nothing. A
connection that stays costs nothing more than any other.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rollyard.net.exchange import Exchange
from rollyard.net.http_server import HttpConnection, HttpService

AGAIN_S = 0.01  # between two attempts, where the last answer is not out yet or the other process is behind
_LABEL = 16  # bytes of a label at most


class MovableConnection(HttpConnection):
    """`first` is what another process had read of it. Within `HttpService.begin` it may be moved (`move`)."""

    __slots__ = ("_first", "_leaving", "_raw", "_send")

    def __init__(self, service: HttpService, now: Callable[[], float], first: bytes = b"") -> None:
        super().__init__(service, now)
        self._first = first
        self._raw: list[bytes] | None = None  # a request as it came, until its headers were judged
        self._leaving: Exchange | None = None
        self._send: Callable[[int, bytes], bool] | None = None

    def move(self, exchange: Exchange, send: Callable[[int, bytes], bool]) -> bool:
        """Let `send` give the socket's descriptor and the bytes of this request to another process, when this read is over.
        False where the request cannot be told from the one before it: both came in one read."""
        if self._raw is None:
            return False
        self._leaving, self._send = exchange, send
        self._incoming = None
        exchange.answered = True  # nothing more of it is for this process
        return True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._first:
            first, self._first = self._first, b""
            self.data_received(first)

    def data_received(self, data: bytes) -> None:
        if self._leaving is not None and self._raw is not None:
            self._raw.append(data)
        else:
            super().data_received(data)

    def on_message_begin(self) -> None:
        if self._leaving is None:
            super().on_message_begin()

    def _feed(self, data: bytes) -> None:
        if self._incoming is None:
            self._raw = [data]
        elif self._raw is not None:
            self._raw.append(data)
        super()._feed(data)
        if self._leaving is not None:
            self._deadline = self._now() + self.service.limits.write_s
            self._transport.pause_reading()
            self._leave()

    def _admit(self, exchange: Exchange) -> None:
        super()._admit(exchange)
        if self._leaving is None:
            self._raw = None

    def _refuse(self, status: int, why: str) -> None:
        if self._leaving is None:
            self._raw = None  # it stays here, and what still comes of it is dropped
            super()._refuse(status, why)

    def _leave(self) -> None:
        """Once all that was answered before is out."""
        transport, exchange, send = self._transport, self._leaving, self._send
        if transport.is_closing() or exchange is None or send is None or self._raw is None:
            return
        if not transport.get_write_buffer_size():
            if send(transport.get_extra_info("socket").fileno(), b"".join(self._raw)):
                transport.abort()  # this process's end of it: the connection lives on in the other
                return
            if self._now() > self._deadline:
                self._stay_here(exchange)
                return
        asyncio.get_running_loop().call_later(AGAIN_S, self._leave)

    def _stay_here(self, exchange: Exchange) -> None:
        self._leaving = self._send = None
        self._incoming = exchange
        exchange.answered = False
        self._transport.resume_reading()
        self._refuse(503, "the process of the gate that serves this rollout takes nothing now; try again")


class Received(NamedTuple):
    """`first` was read of it before it came here."""

    label: bytes
    sock: socket.socket
    first: bytes


def send_connection(channel: socket.socket, label: bytes, connection: int, first: bytes) -> bool:
    """False where the channel takes nothing for now: it is full, or this user has no more descriptors or no more of them on
    their way. What was read may be larger than a message, so it goes in memory of its own."""
    try:
        with os.fdopen(os.memfd_create("rollyard-connection"), "wb") as memory:
            memory.write(first)
            memory.flush()
            socket.send_fds(channel, [label], [connection, memory.fileno()])
    except OSError:
        return False
    return True


def receive_connections(channel: socket.socket) -> Iterator[Received]:
    """All that wait."""
    while True:
        try:
            label, descriptors, _, _ = socket.recv_fds(channel, _LABEL, 2, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        if len(descriptors) != 2:  # a message without its connection: this process has no descriptors left
            for number in descriptors:
                os.close(number)
            continue
        connection, memory = descriptors
        with os.fdopen(memory, "rb") as file:
            first = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
        yield Received(label, socket.socket(fileno=connection), first)


async def adopt_connection(received: Received, make: Callable[[], asyncio.BaseProtocol]) -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(make, received.sock)
    except OSError:  # its client is gone
        received.sock.close()
