"""The rollout that others branch off: as the store keeps it, or, while it still runs, as far as it has come."""

from __future__ import annotations

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.lease import Attempt
from rollyard.core.rollout import CallSnapshot, Rollout
from rollyard.core.task import Task
from rollyard.store import Store

_EVENTS = 10_000


async def load_parent(store: Store, rollout_id: str, task: Task) -> Rollout:
    """`task` is what it works on: the store has that of one that has ended."""
    attempt = await store.live_attempt(rollout_id)
    return await store.get_rollout(rollout_id) if attempt is None else await load_live(store, rollout_id, attempt, task)


async def load_live(store: Store, rollout_id: str, attempt: Attempt, task: Task) -> Rollout:
    """A rollout that is under way: every call that was answered so far is durable."""
    config = (await store.get_run(attempt.run_id)).config
    if config.get("branch") or config.get("tree"):
        raise ConfigError(
            f"rollout {rollout_id} is of a run that branches, and still runs", hint="branch off it when it has ended"
        )
    if task.digest != attempt.task_digest:
        raise ConfigError(f"rollout {rollout_id} works on task {attempt.task_id!r}, and not on this {task.id!r}")
    return Rollout(
        id=rollout_id,
        task=task,
        attempt=attempt.number,
        run_id=attempt.run_id,
        agent=attempt.agent,
        sandbox=str(config.get("sandbox") or ""),
        seed=attempt.seed,
        labels={"policy": attempt.policy} if attempt.policy else {},
        snapshots=await _find_snapshots(store, rollout_id),
        trajectory=await store.trajectory(rollout_id),
    )


async def _find_snapshots(store: Store, rollout_id: str) -> dict[str, CallSnapshot]:
    stored = await store.events(rollout_id=rollout_id, limit=_EVENTS)
    taken = [one.event.fields for one in stored if one.event.name == "snapshot.taken"]
    return {
        str(fields["call"]): msgspec.convert({k: v for k, v in fields.items() if k != "call"}, CallSnapshot)
        for fields in taken
    }
