"""Removes what dead sandboxes left. Most left little: one process takes those one after the other, since to fork another for
each costs more than the removal. A large one, or one with ids of its own on disk, has a process to itself.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from typing import Any, NoReturn

from rollyard.images import tree_pipe
from rollyard.sandbox.local.inner import protocol, remains, syscalls


class Janitor:
    """The zygote's: `fileno` is to be polled, and `receive` called when it is readable. `pids` are those of large processes."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self._sock: socket.socket | None = None
        self._left: deque[tuple[str, list[str], dict[str, Any]]] = deque()  # in the order in which they are done

    @property
    def busy(self) -> bool:
        return bool(self.pids) or bool(self._left)

    def remove(self, home: str, groups: list[str], id_map: dict[str, Any]) -> int | None:
        """Begin to. Gives the descriptor to poll from now on where that is new."""
        if id_map["kind"] == "helper" or not _is_small(home):
            self.pids.add(remains.start_removal(home, groups, id_map))
            return None
        started = self._sock is None
        sock = self._sock or self._start()
        try:
            protocol.send(sock, {"home": home, "groups": groups})
            self._left.append((home, groups, id_map))
        except OSError:  # it is far behind, or was killed: then `receive` takes care of the others
            self.pids.add(remains.start_removal(home, groups, id_map))
        return sock.fileno() if started else None

    def receive(self) -> bool:
        """One removal is done; False when the process is gone, and what it left undone is begun again without it."""
        assert self._sock is not None
        try:
            done = self._sock.recv(1)
        except OSError:
            done = b""
        if done:
            self._left.popleft()
            return True
        self._sock.close()
        self._sock = None
        while self._left:
            self.pids.add(remains.start_removal(*self._left.popleft()))
        return False

    @property
    def fileno(self) -> int:
        return -1 if self._sock is None else self._sock.fileno()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            try:
                _serve(theirs)
            finally:
                os._exit(70)
        theirs.close()
        self._sock = ours
        return ours


def _serve(sock: socket.socket) -> NoReturn:
    syscalls.close_all_but({sock.fileno()})
    while True:
        got = protocol.receive(sock)
        if got is None:
            os._exit(0)
        remains.try_remove(got[0]["home"], got[0]["groups"])
        sock.send(b".")


def _is_small(home: str) -> bool:
    try:
        return tree_pipe.is_small(home)
    except OSError:
        return False
