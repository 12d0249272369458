"""Dialects: bytes <-> `Call` and `Reply`, as pure functions. Read `codec.py` first, then one dialect."""

from rollyard.wire.chat import ChatCodec
from rollyard.wire.codec import Codec
from rollyard.wire.messages import MessagesCodec
from rollyard.wire.route import Route, route

CODECS: dict[str, Codec] = {"chat": ChatCodec(), "messages": MessagesCodec()}

__all__ = ["CODECS", "Codec", "Route", "route"]
