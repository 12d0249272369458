"""The sweep's part in the database: who sweeps, what is due, and that a sweeper presumed dead changes nothing.

A lease names the sweeper and carries a fencing number. Claiming and ending check that number in the transaction that
changes the rows (on PostgreSQL under a lock on the lease), so two replicas never both act on one.
"""

from __future__ import annotations

from sqlalchemy import Connection, and_, or_, select, update

from rollyard.core.errors import LeaseLost
from rollyard.core.plane import Instance, InstanceState
from rollyard.plane.storage.sql import instances as rows
from rollyard.plane.storage.sql.insert import insert_new
from rollyard.store.schema import plane_instances as instances
from rollyard.store.schema import plane_leases as leases

_SWEEP = "sweep"


def agree(connection: Connection, name: str, proposed: str) -> str:
    """What all replicas on this database share under a name; the first one's proposal stays."""
    insert_new(connection, leases, {"name": name, "holder": proposed, "fence": 0, "expires_at": 0.0})
    return connection.execute(select(leases.c.holder).where(leases.c.name == name)).scalar_one()


def take(connection: Connection, holder: str, *, now: float, ttl_s: float) -> int | None:
    """A new fencing number, or None while another holds the lease."""
    insert_new(connection, leases, {"name": _SWEEP, "holder": holder, "fence": 0, "expires_at": 0.0})
    free = or_(leases.c.holder == holder, leases.c.expires_at <= now)
    return connection.execute(
        update(leases)
        .where(leases.c.name == _SWEEP, free)
        .values(holder=holder, fence=leases.c.fence + 1, expires_at=now + ttl_s)
        .returning(leases.c.fence)
    ).scalar()


def claim(connection: Connection, fence: int, *, now: float, settle_s: float, limit: int) -> list[Instance]:
    """Mark what is due as being deleted: expired, idle for too long, or left in the middle of a step. What does not end with its
    time is given as it is."""
    _check_fence(connection, fence)
    idle = and_(instances.c.idle_ttl_s.is_not(None), instances.c.last_seen_at + instances.c.idle_ttl_s <= now)
    over = and_(instances.c.state.in_(("running", "paused")), or_(instances.c.expires_at <= now, idle))
    left = and_(instances.c.state.in_(("creating", "deleting")), instances.c.settle_by <= now)
    due = (
        select(instances)
        .where(instances.c.live.is_(True), or_(over, left))
        .order_by(instances.c.expires_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    found = [rows.record(row) for row in connection.execute(due).mappings()]
    ending = [instance.id for instance in found if instance.ends_with_its_time]
    if ending:
        connection.execute(
            update(instances)
            .where(instances.c.id.in_(ending))
            .values(state="deleting", updated_at=now, settle_by=now + settle_s)
        )
    return found


def finish(connection: Connection, fence: int, ended: list[tuple[str, InstanceState, str]], *, now: float) -> int:
    """All that ended the same way are ended by one statement, and each owner is given back by one."""
    _check_fence(connection, fence)
    ways: dict[tuple[InstanceState, str], list[str]] = {}
    for instance_id, state, reason in ended:
        ways.setdefault((state, reason), []).append(instance_id)
    return sum(rows.end_many(connection, ids, state, now, reason) for (state, reason), ids in ways.items())


def _check_fence(connection: Connection, fence: int) -> None:
    holding = select(leases.c.fence).where(leases.c.name == _SWEEP).with_for_update()
    if connection.execute(holding).scalar() != fence:
        raise LeaseLost("another replica sweeps now")
