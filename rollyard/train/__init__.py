"""Training: rows for trainers, and a small model server. Everything that needs torch or Ray imports it on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollyard.lazy import attach

if TYPE_CHECKING:
    from rollyard.train.ray_rollouts import RayOptions as RayOptions
    from rollyard.train.ray_rollouts import RayRollouts as RayRollouts
else:
    __getattr__, __dir__ = attach(__name__)  # hidden from type checkers, to which a misspelt name is an error
