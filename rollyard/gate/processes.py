"""A gate in several processes on one port: which of them a session belongs to, and how the others reach it.

The listening socket is one that all of them accept from, so a connection is never refused because one of them is gone. Each
request says whose it is, by the session's id or by the number in its key; where that is another process, the connection
moves there. Each process has an inbox that its supervisor keeps open: what is sent to one that was killed waits there for
the next one in its place. A process asks another with an ordinary request, on a pair of sockets of which it sends one end.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from rollyard.core.errors import GateError, Unauthorized
from rollyard.core.ids import new_id
from rollyard.gate.keys import key_of, key_place, rollout_place
from rollyard.net.exchange import Exchange
from rollyard.net.movable_connection import MovableConnection, Received, receive_connections, send_connection

MOST = 64
CLIENT, UNIX_CLIENT, SIBLING = b"client", b"unix client", b"sibling"  # whose connection it is
ANSWER_S = 15.0  # for a sibling to answer, being started again included
_TRAINER = ("calls", "policy_version", "pause", "resume")  # what one process has to keep in order
MISDIRECTED = "another process of the gate serves this rollout: send this request on a connection of its own"


class SiblingSilent(GateError):
    """A process of the gate does not answer another one."""

    status = 503

    def __init__(self, index: int) -> None:
        super().__init__(f"process {index} of the gate does not answer now; ask again")


class SiblingAnswer(NamedTuple):
    """What another process of the gate answered."""

    status: int
    body: bytes


class GateProcess:
    """One of `count` processes. `again` says that it replaces one that died. `outboxes` lead to the inboxes of all."""

    def __init__(
        self,
        index: int,
        *,
        listener: socket.socket,
        unix_listener: socket.socket | None,
        inbox: socket.socket,
        outboxes: tuple[socket.socket, ...],
        again: bool,
    ) -> None:
        self.index, self.count, self.again = index, len(outboxes), again
        self.listener, self.unix_listener = listener, unix_listener
        self._inbox, self._outboxes = inbox, outboxes
        self._next = index  # where the next session goes whose caller chose no id

    # -- whose it is

    def owner(self, rollout_id: str) -> int:
        return rollout_place(rollout_id) % self.count

    def owner_of(self, exchange: Exchange) -> int:
        """Which process a request is for; this one where any may answer, and where none will."""
        head, _, rest = exchange.path[1:].partition("/")
        if head in _TRAINER:
            return 0
        if head == "sessions" and rest:
            return self.owner(rest.partition("/")[0])
        if head in ("sessions", "metrics", "health", ""):
            return self.index
        try:
            place = key_place(key_of(exchange.headers, exchange.query))
        except Unauthorized:
            return self.index
        return self.index if place is None else place % self.count

    def new_rollout_id(self) -> str:
        """An id that belongs to the next process in turn, so that sessions are spread evenly."""
        self._next = (self._next + 1) % self.count
        while True:
            rollout_id = new_id("ro")
            if self.owner(rollout_id) == self._next:
                return rollout_id

    # -- how it gets there

    def move(self, exchange: Exchange, owner: int, label: bytes) -> bool:
        """False where the connection cannot go."""
        connection = exchange.connection
        if not isinstance(connection, MovableConnection):
            return False
        return connection.move(exchange, partial(send_connection, self._outboxes[owner], label))

    def listen(self, adopt: Callable[[Received], None]) -> None:
        def receive() -> None:
            for received in receive_connections(self._inbox):
                adopt(received)

        asyncio.get_running_loop().add_reader(self._inbox.fileno(), receive)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._inbox.fileno())

    async def ask(self, index: int, request: bytes, limit_s: float = ANSWER_S) -> SiblingAnswer:
        """Ask one process, which may be this one, for its own answer."""
        try:
            ours, theirs = socket.socketpair()
        except OSError:  # no descriptors left
            raise SiblingSilent(index) from None
        with theirs:
            if not send_connection(self._outboxes[index], SIBLING, theirs.fileno(), request):
                ours.close()
                raise SiblingSilent(index)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            async with asyncio.timeout(limit_s):
                answer = await reader.read()
        except (TimeoutError, OSError):
            raise SiblingSilent(index) from None
        finally:
            writer.close()
        if not answer:  # it ended in between
            raise SiblingSilent(index)
        head, _, body = answer.partition(b"\r\n\r\n")
        return SiblingAnswer(int(head.split(b" ", 2)[1]), body)

    async def ask_all(self, request: bytes, limit_s: float = ANSWER_S) -> list[SiblingAnswer]:
        """Of every process, or not at all: an answer for some of them would pass for one of the gate."""
        return list(await asyncio.gather(*(self.ask(index, request, limit_s) for index in range(self.count))))


def write_request(method: str, target: str, key: str | None, body: bytes = b"", *, host: str = "gate") -> bytes:
    """A request of one process to another."""
    head = f"{method} {target} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body
