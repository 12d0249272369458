"""`rollyard clean --snapshots`: what the rollouts of a run kept at their calls goes."""

from __future__ import annotations

from rollyard.core.protocols import Backend
from rollyard.runs.rollout.kept_snapshots import remove_snapshots
from rollyard.store import Store


async def clean_snapshots(where: str, target: str, backend: Backend) -> list[str]:
    """Those of a run, or of one rollout, that this backend has; their names."""
    async with Store.open(where, create=False) as store:
        kind, found = await store.resolve(target)
        if kind == "rollout":
            return await remove_snapshots([await store.get_rollout(found)], backend)
        gone: list[str] = []
        async for rollout in store.rollouts(found):
            if rollout.snapshots:
                gone += await remove_snapshots([rollout], backend)
        return gone
