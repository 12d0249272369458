"""Questions to DNS, answered here: an allowed name is at an address of the sandbox's own loopback, and nothing is asked onward.

So no question leaves the sandbox, whatever is written into names or types.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable

MAX_QUESTION = 512
_A, _AAAA, _IN = 1, 28, 1
_FAILED, _UNKNOWN, _NOT_DONE = 2, 3, 4
_TTL_S = 5
Place = Callable[[str], Awaitable[str | None]]  # the address of a name, None where it cannot be had


def read_name(data: bytes, at: int) -> tuple[str, int]:
    """A name in a question, and where it ends. No question has a reason to point elsewhere."""
    labels: list[str] = []
    while (length := data[at]) != 0:
        if length > 63:
            raise ValueError("a pointer or an odd label")
        labels.append(data[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    return ".".join(labels).lower(), at + 1


async def answer(
    question: bytes, allows: Callable[[str], bool], place: Place, refuse: Callable[[str, str], Awaitable[None]]
) -> bytes | None:
    """The message that answers `question`; None for what is no question. `refuse` is called with each name that is not
    allowed."""
    try:
        number, flags, count, *others = struct.unpack_from("!HHHHHH", question)
        if flags & 0x8000 or count != 1 or others[0] or others[1]:
            return None if flags & 0x8000 else _reply(question[:2], flags, b"", _NOT_DONE)
        name, end = read_name(question, 12)
        kind, group = struct.unpack_from("!HH", question, end)
    except (struct.error, IndexError, ValueError):
        await refuse("", "not a plain question")
        return None
    section = question[12 : end + 4]
    prefix = struct.pack("!H", number)
    if flags & 0x7800 or group != _IN:
        return _reply(prefix, flags, section, _NOT_DONE)
    if not allows(name):
        await refuse(name, "no rule allows this name")
        return _reply(prefix, flags, section, _UNKNOWN)
    if kind not in (_A, _AAAA):
        return _reply(prefix, flags, section, 0)
    address = await place(name)
    if address is None:
        return _reply(prefix, flags, section, _FAILED)
    if kind == _AAAA:
        return _reply(prefix, flags, section, 0)
    record = struct.pack("!HHHIH", 0xC00C, _A, _IN, _TTL_S, 4) + socket.inet_aton(address)
    return _reply(prefix, flags, section, 0, record)


def _reply(prefix: bytes, flags: int, section: bytes, code: int, record: bytes = b"") -> bytes:
    said = 0x8000 | (flags & 0x7900) | 0x0080 | code
    return prefix + struct.pack("!HHHHH", said, 1 if section else 0, 1 if record else 0, 0, 0) + section + record
