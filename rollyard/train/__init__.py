"""Training: rows for trainers, and a small model server. Everything that needs torch or Ray imports it on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard.train.ray_rollouts import RayOptions as RayOptions
    from rollyard.train.ray_rollouts import RayRollouts as RayRollouts

__all__ = ["RayOptions", "RayRollouts"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rollyard.train import ray_rollouts

        return getattr(ray_rollouts, name)
    raise AttributeError(f"module 'rollyard.train' has no attribute {name!r}")
