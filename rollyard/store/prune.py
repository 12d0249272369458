"""Retention: finished runs that are older than a time go, with all that is theirs.

Rollouts go in transactions of a few hundred, so that servers and other runs go on between two of them; what was removed when
something fails stays removed, and the next pruning goes on from there. Bodies go last (`sweep`), and only while nothing writes.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, select

from rollyard.core.errors import StoreError
from rollyard.store.schema import attempts, runs
from rollyard.store.store import Store

OPEN = ("owed", "leased")  # states of attempts that a run still has to do


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """`bodies` is None where they were left, for the reason in `left`; `unfinished` are old runs that were kept because they
    owe attempts."""

    runs: tuple[str, ...]
    rollouts: int = 0
    bodies: int | None = None
    left: str | None = None
    unfinished: tuple[str, ...] = ()


async def prune(
    store: Store, *, before: float, keep: int = 0, unfinished: bool = False, dry_run: bool = False
) -> Pruned:
    """Remove runs that were created before a time (seconds since 1970), except the `keep` newest of the store. Runs that owe
    attempts go with `unfinished` only. With `dry_run` nothing is removed, and `runs` are those that would be."""
    old, owing = await store.database.read(lambda connection: _find_old(connection, before, keep))
    going = tuple(run for run in old if unfinished or run not in owing)
    kept = () if unfinished else tuple(run for run in old if run in owing)
    if dry_run:
        return Pruned(runs=going, unfinished=kept)
    rollouts = sum([await store.delete_run(run) for run in going])
    try:
        return Pruned(runs=going, rollouts=rollouts, bodies=await store.sweep(), unfinished=kept)
    except StoreError as error:  # something runs: its bodies may be there before what refers to them
        return Pruned(runs=going, rollouts=rollouts, left=str(error), unfinished=kept)


def _find_old(connection: Connection, before: float, keep: int) -> tuple[list[str], set[str]]:
    """Oldest first, and those of all runs that owe attempts."""
    newest = select(runs.c.id).order_by(runs.c.created_at.desc(), runs.c.id.desc()).limit(keep)
    spared = set(connection.execute(newest).scalars()) if keep else set[str]()
    query = select(runs.c.id).where(runs.c.created_at < before).order_by(runs.c.created_at, runs.c.id)
    owing = select(attempts.c.run_id).where(attempts.c.state.in_(OPEN)).distinct()
    old = [run for run in connection.execute(query).scalars() if run not in spared]
    return old, set(connection.execute(owing).scalars())
