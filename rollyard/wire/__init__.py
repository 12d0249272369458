"""Dialects: bytes <-> `Call` and `Reply`, as pure functions. Read `codec.py` first, then one dialect."""

from rollyard.wire.chat import ChatCodec
from rollyard.wire.codec import Codec
from rollyard.wire.completions import CompletionsCodec
from rollyard.wire.gemini import GeminiCodec
from rollyard.wire.messages import MessagesCodec
from rollyard.wire.responses import ResponsesCodec
from rollyard.wire.route import Route, provider_path, route

CODECS: dict[str, Codec] = {
    "chat": ChatCodec(),
    "completions": CompletionsCodec(),
    "responses": ResponsesCodec(),
    "messages": MessagesCodec(),
    "gemini": GeminiCodec(),
}

__all__ = ["CODECS", "Codec", "Route", "provider_path", "route"]
