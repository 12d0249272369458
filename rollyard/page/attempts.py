"""What lies beside a rollout: the attempts before and after it, and what the run's other agents did with the same task."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollyard.store import Store
from rollyard.store.values import RolloutQuery, RolloutRow, line_name

_MOST = 1000


class Neighbours(msgspec.Struct, frozen=True, kw_only=True):
    """`others` has one rollout for each other agent (and policy) of the run: its attempt of the same number, or its first."""

    before: RolloutRow | None = None
    after: RolloutRow | None = None
    others: tuple[tuple[str, RolloutRow], ...] = ()


async def find_neighbours(store: Store, row: RolloutRow) -> Neighbours:
    if row.run_id is None:
        return Neighbours()
    query = RolloutQuery(run_id=row.run_id, task_id=row.task_id, sort="attempt", limit=_MOST)
    return arrange_neighbours(row, (await store.list_rollouts(query)).rows)


def arrange_neighbours(row: RolloutRow, attempts: Sequence[RolloutRow]) -> Neighbours:
    """`attempts` are all those at the same task, in the order of their numbers."""
    lines: dict[str, list[RolloutRow]] = {}
    for one in attempts:
        lines.setdefault(line_name(one), []).append(one)
    own = lines.pop(line_name(row), [row])
    place = next((index for index, one in enumerate(own) if one.id == row.id), 0)
    others = [
        (name, next((one for one in rows if one.attempt == row.attempt), rows[0]))
        for name, rows in sorted(lines.items())
    ]
    return Neighbours(
        before=own[place - 1] if place > 0 else None,
        after=own[place + 1] if place + 1 < len(own) else None,
        others=tuple(others),
    )
