"""The control plane, from the bottom up: `storage/` (databases), `engines/` (what makes instances), `service/` (what the plane
does, for every API), `http/` (requests and answers), `gateway/` (the way into an instance), `parts.py` (these put together),
`api/` (the native API), `compat/` (APIs of other systems), `server/`. `client/` is for callers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollyard.plane.client.plane import Plane


def connect(url: str, key: str, *, data_plane: bool = True, timeout_s: float = 60.0) -> Plane:
    """A client of the plane at `url`; enter it, or close it with `aclose`. Without the data plane nothing but the control
    API is touched: tools, functions, reward and health raise, presigned URLs work."""
    from rollyard.plane.client.plane import Plane

    return Plane(url, key, data_plane=data_plane, timeout_s=timeout_s)


__all__ = ["connect"]
