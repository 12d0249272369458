"""Messages on the control sockets: one JSON object per SEQPACKET datagram, with descriptors beside it.

A message too large for one datagram travels in a memfd that comes as the last descriptor, so there is no framing to get
wrong and no limit worth knowing. Both sides use this file; neither trusts the other to be fast: a send never blocks.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

INLINE = 48 * 1024
MAX_FDS = 250
MAX_BODY = 64 * 2**20
_FD = array.array("i").itemsize
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

Message = dict[str, Any]


def memory_file(data: bytes = b"") -> int:
    """An anonymous file in memory, closed on exec."""
    fd = os.memfd_create("rollyard", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    if data:
        os.lseek(fd, 0, os.SEEK_SET)
    return fd


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    body = json.dumps(message).encode()
    blob = memory_file(body) if len(body) > INLINE else None
    try:
        every = [*fds, blob] if blob is not None else list(fds)
        data = b"B" if blob is not None else b"I" + body
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", every))] if every else []
        sock.sendmsg([data], rights, _SEND_FLAGS)
    finally:
        if blob is not None:
            os.close(blob)


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """One message and its descriptors; None when the other side is gone. Raises BlockingIOError as `recvmsg` does."""
    data, ancillary, _flags, _address = sock.recvmsg(
        INLINE + 1, socket.CMSG_SPACE(MAX_FDS * _FD), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, value in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(value[: len(value) - len(value) % _FD])
    got = list(fds)
    if not data:
        close_fds(got)
        return None
    if data[:1] == b"I":
        return json.loads(data[1:]), got
    blob = got.pop()
    try:
        size = min(os.fstat(blob).st_size, MAX_BODY)
        return json.loads(read_at(blob, size)), got
    finally:
        os.close(blob)


def read_at(fd: int, size: int, offset: int = 0) -> bytes:
    """Up to `size` bytes from `offset`; short only at the end of the file."""
    parts: list[bytes] = []
    while size > 0:
        part = os.pread(fd, min(size, 2**20), offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)


def wake_on_children() -> tuple[int, int]:
    """A descriptor that becomes readable when a child ends, for a poll loop; and the one Python writes to."""
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _ignore_signal)
    return wake, woken


def _ignore_signal(_number: int, _frame: object) -> None:
    """Python only writes to the wake-up descriptor for signals that have a handler."""


def close_fds(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
