"""The control plane and the page: servers for people and machines over the rooms below.

Reading order: `storage.py` (what is promised), `plans.py` and `instances.py` (the order of steps), `engines.py`, `sweep.py`,
`gateway.py`, `routes.py`, `api.py`; `client.py` is the other end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollyard.plane.client import Plane


def connect(url: str, key: str, *, data_plane: bool = True, timeout_s: float = 60.0) -> Plane:
    """A client of the plane at `url`; enter it, or close it with `aclose`. Without the data plane nothing but the control
    API is touched: tools, functions, reward and health raise, presigned URLs work."""
    from rollyard.plane.client import Plane

    return Plane(url, key, data_plane=data_plane, timeout_s=timeout_s)


__all__ = ["connect"]
