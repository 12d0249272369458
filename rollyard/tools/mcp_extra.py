"""Whether the `mcp` package is here. It is an extra: it is imported by the first tool that is served or called."""

from __future__ import annotations

from importlib.util import find_spec

from rollyard.core.errors import MissingExtra

NEEDS = ("mcp", "mcp_types")  # others, OpenEnv among them, ask for `mcp` 1, which has no `mcp_types`


def require_mcp(why: str, needs: tuple[str, ...] = NEEDS) -> None:
    """Raises `MissingExtra`, which names the pip command, where the package is missing or too old."""
    if any(find_spec(name) is None for name in needs):
        raise MissingExtra("mcp>=2", "mcp", why=why)
