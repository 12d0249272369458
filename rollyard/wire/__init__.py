"""Dialects: bytes <-> `Call` and `Reply`, as pure functions. Read `codec.py` first, then one dialect."""

from rollyard.wire.chat import ChatCodec
from rollyard.wire.codec import Codec
from rollyard.wire.messages import MessagesCodec
from rollyard.wire.responses import ResponsesCodec
from rollyard.wire.route import Route, route

CODECS: dict[str, Codec] = {"chat": ChatCodec(), "responses": ResponsesCodec(), "messages": MessagesCodec()}

__all__ = ["CODECS", "Codec", "Route", "route"]
