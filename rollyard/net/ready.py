"""The line with which every `serve` verb says that it accepts connections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class ServerReady(msgspec.Struct, frozen=True, kw_only=True):
    """A server accepts connections. `facts` are what programs read beside the URL; `variables` are what clients of other
    systems take from the environment, keys among them, so nothing prints them unasked."""

    server: str
    url: str
    details: str
    facts: Mapping[str, Any] = {}
    variables: Mapping[str, str] = {}

    @property
    def line(self) -> str:
        return f"rollyard {self.server} ready at {self.url} ({self.details})"

    @property
    def json(self) -> str:
        return msgspec.json.encode({"url": self.url, **self.facts}).decode()

    @property
    def env(self) -> str:
        return "\n".join(f"{name}={value}" for name, value in self.variables.items())
