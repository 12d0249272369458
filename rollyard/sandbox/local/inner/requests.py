"""What the supervisor is asked, and by whom."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from rollyard.sandbox.local.inner.protocol import Message


class Client:
    """One end of a control socket. The owner's lives as long as the sandbox; others attached later."""

    def __init__(self, sock: socket.socket, *, owner: bool) -> None:
        self.sock, self.owner = sock, owner
        sock.setblocking(False)


class Request:
    """A message with the descriptors that came with it, which are closed once it was answered or handed on."""

    def __init__(self, message: Message, fds: list[int], client: Client) -> None:
        self.message, self.fds, self.client = message, fds, client

    @property
    def number(self) -> int:
        return self.message.get("n", 0)


class Answer(Protocol):
    def __call__(self, client: Client, number: int, message: Message) -> None: ...


class Work(Protocol):
    """Do a task in a fork that answers the request itself."""

    def __call__(self, asked: Request, task: Callable[[], Message]) -> Message | None: ...


Operation = Callable[[Request], Message | None]  # None: the answer comes later


def operations(*parts: object) -> dict[str, Operation]:
    """Every `op_NAME` of the parts of a supervisor, by its name."""
    return {
        name.removeprefix("op_"): getattr(part, name) for part in parts for name in dir(part) if name.startswith("op_")
    }
