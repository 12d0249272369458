"""The control plane and the page: servers for people and machines over the rooms below.

Reading order: `storage.py` (what is promised), `instances.py` (the order of steps), `engines.py`, `sweep.py`, `api.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollyard.plane.client import Plane


def connect(url: str, key: str, *, timeout_s: float = 60.0) -> Plane:
    """A client of the plane at `url`; enter it, or close it with `aclose`."""
    from rollyard.plane.client import Plane

    return Plane(url, key, timeout_s=timeout_s)


__all__ = ["connect"]
