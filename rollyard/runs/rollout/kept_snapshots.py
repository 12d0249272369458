"""The snapshots that rollouts keep at their calls: each is its rollout's, and goes when its owner says so."""

from __future__ import annotations

from collections.abc import Iterable

from rollyard.core.errors import Error
from rollyard.core.log import Log
from rollyard.core.protocols import Backend
from rollyard.core.rollout import Rollout
from rollyard.runs.rollout.provision import Provision

_LOG = Log("rollyard.runs.rollout.kept_snapshots")


async def remove_snapshots(rollouts: Iterable[Rollout], backend: Backend) -> list[str]:
    """Remove the snapshots that this backend still has; gives their names."""
    provision, gone = Provision.of(backend), list[str]()
    for rollout in rollouts:
        for kept in rollout.snapshots.values():
            if kept.backend != backend.name or not await provision.has(kept.image):
                continue
            try:
                await provision.forget(kept.image)
            except Error as error:
                _LOG.warning("snapshot.not_removed", image=kept.image, rollout=rollout.id, error=str(error))
            else:
                gone.append(kept.image)
    return gone
