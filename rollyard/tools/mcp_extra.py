"""Whether the `mcp` package is here. It is an extra: it is imported by the first tool that is served or called."""

from __future__ import annotations

from importlib.util import find_spec

from rollyard.core.errors import MissingExtra


def require_mcp(why: str) -> None:
    """Raises `MissingExtra`, which names the pip command, where the package is missing."""
    if find_spec("mcp") is None:
        raise MissingExtra("mcp", "mcp", why=why)
