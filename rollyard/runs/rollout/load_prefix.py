"""What a rollout that branches off another one begins with, read from the store."""

from __future__ import annotations

from rollyard.core.branch_point import BranchPoint
from rollyard.core.call import CallRecord
from rollyard.core.delta import Blob
from rollyard.core.errors import StoreError
from rollyard.core.rollout import Rollout
from rollyard.policy.prefix import RecordedPrefix, ResumedPrefix, calls_before, find_at, open_prefix, read_answer
from rollyard.store import Store


async def load_prefix(
    store: Store, parent: Rollout, point: BranchPoint, said: str | None = None, *, resumed: bool = False
) -> RecordedPrefix | ResumedPrefix:
    """A fresh one for each rollout: it counts what it has given. `said` is the answer at the branch point, where the caller
    wrote one; `resumed` says that the agent goes on from its own session."""
    recorded, bodies = parent.captured, dict[str, bytes]()
    if not parent.pinned:  # what a pinned rollout's agent sent is not what its policy saw
        wanted = calls_before(recorded, point.call)
        if not point.is_behind:
            wanted.append(find_at(recorded, point.call))
        own = await _load_own_bodies(store, parent.id)
        for record in wanted:
            bodies[record.id] = await _load_body(store, record, own)
    return open_prefix(recorded, point, bodies, None if said is None else read_answer(said), resumed=resumed)


async def _load_own_bodies(store: Store, rollout_id: str) -> dict[bytes, Blob]:
    try:
        return await store.load_own_bodies(rollout_id)
    except StoreError:  # as below
        return {}


async def _load_body(store: Store, record: CallRecord, own: dict[bytes, Blob]) -> bytes:
    try:
        return await store.load_blob(record.raw_request, record.rollout_id, own) if record.raw_request else b""
    except StoreError:  # bodies may be cleaned away; the trajectory has the messages
        return b""
