"""A sandbox backend from its name, for rollouts with these options."""

from __future__ import annotations

from rollyard.core.protocols import Backend
from rollyard.runs.rollout.options import RolloutOptions
from rollyard.sandbox import backend


def open_named(name: str, options: RolloutOptions) -> Backend:
    """A backend shows only directories that it was opened with; those that the operator mounts are."""
    if not options.mounts:
        return backend(name)
    return backend(name, mounts=[mount.remote_dir for mount in options.mounts])
