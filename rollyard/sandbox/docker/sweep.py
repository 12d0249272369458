"""Deleting many containers: in batches, and also when there is no event loop any more.

`delete_now` is for the last moments of a process (an exit handler, a signal, a test's end): plain sockets, no loop, a bound on
all of it, and a list of what it could not delete.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
BATCH = 100
_AT_ONCE = 8
_ONE_S = 30.0


def batches(things: Sequence[T], size: int = BATCH) -> Iterator[Sequence[T]]:
    for at in range(0, len(things), size):
        yield things[at : at + size]


def delete_now(host: str, containers: Sequence[str], timeout: float = 120.0) -> list[str]:
    """Delete them; the ones that may still be there are returned."""
    deadline, left = time.monotonic() + timeout, list[str]()
    for batch in batches(containers):
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            done = pool.map(_delete, repeat(host), batch, repeat(deadline))
            left += [name for name, gone in zip(batch, done, strict=True) if not gone]
    return left


def _delete(host: str, name: str, deadline: float) -> bool:
    if time.monotonic() > deadline:
        return False
    connection = _connection(host, min(_ONE_S, deadline - time.monotonic()))
    try:
        connection.request("DELETE", f"/containers/{name}?force=1&v=1", headers={"Host": "engine"})
        return connection.getresponse().status in (200, 204, 404)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("engine", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(host: str, timeout: float) -> http.client.HTTPConnection:
    if host.startswith("unix://"):
        return _Unix(host.removeprefix("unix://"), timeout)
    parts = urlsplit(host)
    return http.client.HTTPConnection(parts.hostname or "", parts.port or 2375, timeout=timeout)
