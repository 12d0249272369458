"""Training: rows for trainers, and a small model server. Everything that needs torch or Ray imports it on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard.train.ray_rollouts import RayRollouts as RayRollouts

__all__ = ["RayRollouts"]


def __getattr__(name: str) -> Any:
    if name == "RayRollouts":
        from rollyard.train.ray_rollouts import RayRollouts

        return RayRollouts
    raise AttributeError(f"module 'rollyard.train' has no attribute {name!r}")
