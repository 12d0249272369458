"""Where the packages are wired together: one rollout (`rollout/`), many (`run/`), what they amount to (`report/`), what is
shown meanwhile (`display/`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollyard.lazy import attach

if TYPE_CHECKING:
    from rollyard.core.tree import Tree as Tree
    from rollyard.runs.run.config import RunConfig as RunConfig
    from rollyard.runs.run.evaluate import evaluate_task as evaluate_task
    from rollyard.runs.run.fleet_job import FleetJob as FleetJob
else:
    __getattr__, __dir__ = attach(__name__)  # hidden from type checkers, to which a misspelt name is an error
