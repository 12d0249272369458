"""Sockets made in a container's network namespace and used from here: the shortest way in and out of one without a network.

A thread enters the namespace, makes the socket and ends: it is never reused, because its namespace is not ours any more. A
socket belongs to the namespace it was made in for good, so the event loop can use it like any other.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
_BACKLOG = 1024


def may_enter() -> bool:
    """Whether this process may enter network namespaces at all: tried on its own."""
    try:
        _run_inside(os.getpid(), lambda: None)
    except OSError:
        return False
    return True


def is_ours(pid: int, container: str) -> bool:
    """Whether this pid is, on this machine, the first process of that container."""
    try:
        return container[:12] in Path(f"/proc/{pid}/cgroup").read_text() and (
            Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
        )
    except OSError:
        return False


def bind_datagrams(pid: int, address: str, port: int) -> socket.socket:
    """A socket for datagrams that are sent to this address of its loopback."""

    def make() -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            sock.bind((address, port))
            sock.setblocking(False)
        except BaseException:  # however it ends, the socket is closed
            sock.close()
            raise
        return sock

    return _run_inside(pid, make)


def open_listener(pid: int, port: int, address: str = "127.0.0.1") -> socket.socket:
    """A socket that listens on `port` of its loopback there; 0 is any port."""

    def make() -> socket.socket:
        sock = socket.socket()
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except BaseException:  # however it ends, the socket is closed
            sock.close()
            raise
        return sock

    return _run_inside(pid, make)


def open_socket(pid: int) -> socket.socket:
    """A socket that connects from there."""
    return _run_inside(pid, socket.socket)


def _run_inside(pid: int, make: Callable[[], T]) -> T:
    found: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(namespace, _CLONE_NEWNET) != 0:
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number))
            finally:
                os.close(namespace)
            found.append(make())
        except BaseException as error:  # noqa: BLE001 - carried over to the caller's thread, which raises it
            failed.append(error)

    thread = threading.Thread(target=work, name="rollyard-setns")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
