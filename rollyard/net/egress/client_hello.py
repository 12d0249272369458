"""The first message of TLS, as far as it says which name is asked for."""

from __future__ import annotations

from typing import NamedTuple

HANDSHAKE = 0x16
ACCESS_DENIED = bytes.fromhex("15030300020231")  # a fatal alert, in words that clients know
MAX_HELLO = 32 * 1024
_CLIENT_HELLO, _SERVER_NAME, _ENCRYPTED_HELLO = 1, 0, 0xFE0D


class ClientHello(NamedTuple):
    """`name` is None where none is sent. `hidden`: the real name is encrypted, and `name` only stands before it."""

    name: str | None
    hidden: bool


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise ValueError("a field runs past the message")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width))

    def field(self, width: int) -> _Bytes:
        return _Bytes(self.take(self.number(width)))

    def __bool__(self) -> bool:
        return self.at < len(self.data)


def read_hello(data: bytes) -> ClientHello | None:
    """None while it is not all there; ValueError for what is no such message."""
    message = bytearray()
    at = 0
    while len(message) < 4 or len(message) < 4 + int.from_bytes(message[1:4]):
        if len(data) < at + 5:
            return None
        length = int.from_bytes(data[at + 3 : at + 5])
        if data[at] != HANDSHAKE or data[at + 1] != 3 or not 0 < length <= 2**14 + 256:
            raise ValueError("not a TLS handshake")
        if len(data) < at + 5 + length:
            return None
        message += data[at + 5 : at + 5 + length]
        at += 5 + length
        if message[0] != _CLIENT_HELLO or len(message) > MAX_HELLO:
            raise ValueError("not a ClientHello")
    return _read_body(_Bytes(bytes(message[4 : 4 + int.from_bytes(message[1:4])])))


def _read_body(body: _Bytes) -> ClientHello:
    body.take(2 + 32)
    for width in (1, 2, 1):  # session, cipher suites, compression
        body.field(width)
    names: list[str] = []
    hidden = False
    extensions = body.field(2) if body else _Bytes(b"")
    while extensions:
        kind, content = extensions.number(2), extensions.field(2)
        hidden = hidden or kind == _ENCRYPTED_HELLO
        if kind == _SERVER_NAME:
            entries = content.field(2)
            while entries:
                entry_kind, name = entries.number(1), entries.field(2)
                if entry_kind == 0:
                    names.append(name.data.decode("ascii"))
    if len(names) > 1:
        raise ValueError("several names")
    return ClientHello(names[0] if names else None, hidden)
