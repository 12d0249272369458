"""Leases: who does an attempt, and for how long.

A claim raises the attempt's fencing number and closes the gate sessions of its former owner. Everything a claimant does
afterwards shows that number, so one that was presumed dead and wakes up changes nothing: no call, no event, no rollout.

Workers on many machines share no clock, so on PostgreSQL the server's decides (`moment`), unless the caller brought one.
`concurrency` and pauses are kept here rather than in a worker: they bound a policy over all machines together.

A worker that says which images its machine has is given attempts that need them first, and of the others rather those that no
other worker is at, so that an image goes to few machines. That is a preference within the next `AHEAD` places: nothing waits
for ever because something else is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, and_, func, or_, select, text, tuple_, update

from rollyard.core.errors import LeaseLost
from rollyard.core.lease import Attempt, AttemptState, Lease
from rollyard.store.database import Put
from rollyard.store.runs import as_attempt
from rollyard.store.schema import attempts, pauses, sessions

GracePeriod = float | Callable[[], float]  # a function is asked when the transaction runs, maybe long after the call
AHEAD = 2000  # by how many later attempts one that is owed may be overtaken
_AT_ONCE = 500  # leases in one statement
_put_pauses = Put(pauses, ("run_id", "policy", "until"), there="replace")


def moment(connection: Connection, now: float | None) -> float:
    """The caller's time, or the database server's."""
    if now is not None:
        return now
    return float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())


def claim(
    connection: Connection,
    now: float | None,
    run_id: str,
    *,
    owner: str,
    ttl_s: float,
    concurrency: Mapping[str, int] | None = None,
    images: Sequence[str] | None = None,
    gpus: int | None = None,
    grace_s: GracePeriod = 0.0,
) -> Lease | None:
    """The first attempt that is owed or, when there is none, one of another owner whose lease ran out `grace_s` ago, with a
    new fencing number; None if all are out or done. No policy named in `concurrency` gets more than that many at
    a time, whichever workers claim them. `images` are those that the worker's machine has, and are preferred; `gpus` is the
    most that an attempt may need (None: any number)."""
    now = moment(connection, now)
    of_run = and_(
        attempts.c.run_id == run_id, attempts.c.policy.not_in(_find_barred(connection, run_id, now, concurrency or {}))
    )
    if gpus is not None:
        of_run = and_(of_run, attempts.c.gpus <= gpus)
    owed = and_(attempts.c.state == "owed", or_(attempts.c.expires_at.is_(None), attempts.c.expires_at <= now))
    run_out = and_(
        attempts.c.state == "leased", attempts.c.expires_at <= now - _ask(grace_s), attempts.c.owner != owner
    )
    wanted = [owed, run_out]
    if images is not None:
        wanted[:0] = _preferences(connection, run_id, now, and_(of_run, owed), owed, images, gpus)
    for free in wanted:
        query = select(attempts).where(of_run, free).order_by(attempts.c.position).limit(1)
        row = connection.execute(query.with_for_update(skip_locked=True)).mappings().first()
        if row is not None:
            return _take(connection, row, owner, now, ttl_s)
    return None


def _preferences(
    connection: Connection, run_id: str, now: float, to_claim: Any, owed: Any, images: Sequence[str], gpus: int | None
) -> list[Any]:
    """Of what is owed: on a machine with GPUs what needs some, then what the worker's machine has, then what no worker is at."""
    query = select(attempts.c.position).where(to_claim).order_by(attempts.c.position).limit(1)
    first = connection.execute(query).scalar()
    if first is None:
        return []
    near = and_(owed, attempts.c.position <= first + AHEAD)
    out = attempts.alias()
    at_work = select(out.c.image).where(out.c.run_id == run_id, out.c.state == "leased", out.c.expires_at > now)
    for_gpus = [and_(near, attempts.c.gpus > 0)] if gpus else []
    return [*for_gpus, and_(near, attempts.c.image.in_(["", *images])), and_(near, attempts.c.image.not_in(at_work))]


def _take(connection: Connection, row: Mapping[Any, Any], owner: str, now: float, ttl_s: float) -> Lease:
    changed = {"state": "leased", "owner": owner, "expires_at": now + ttl_s}
    changed |= {"fence": row["fence"] + 1, "tries": row["tries"] + 1}
    connection.execute(update(attempts).where(attempts.c.id == row["id"]).values(**changed))
    if row["fence"]:  # the worker that had it before records no call any more
        of_before = and_(sessions.c.attempt_id == row["id"], sessions.c.closed_at.is_(None))
        connection.execute(update(sessions).where(of_before).values(closed_at=now))
    return _lease({**row, **changed})


def _find_barred(connection: Connection, run_id: str, now: float, concurrency: Mapping[str, int]) -> set[str]:
    """Policies that take no further rollout now: at their bound, or paused."""
    paused = select(pauses.c.policy).where(pauses.c.run_id == run_id, pauses.c.until > now)
    barred = set(connection.execute(paused).scalars())
    if concurrency:
        if connection.dialect.name == "postgresql":  # two claims at the same moment must not both see the last place
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:run))"), {"run": run_id})
        out = (
            select(attempts.c.policy, func.count())
            .where(attempts.c.run_id == run_id, attempts.c.state == "leased", attempts.c.expires_at > now)
            .group_by(attempts.c.policy)
        )
        in_flight = {policy: count for policy, count in connection.execute(out)}
        barred |= {policy for policy, most in concurrency.items() if in_flight.get(policy, 0) >= most}
    return barred


def pause(connection: Connection, now: float | None, run_id: str, policy: str, for_s: float) -> None:
    """Hand out nothing that this policy answers for a while, on any machine: its server is overloaded or away. A longer
    pause that is set already stays."""
    until = moment(connection, now) + for_s
    query = select(pauses.c.until).where(pauses.c.run_id == run_id, pauses.c.policy == policy)
    if (connection.execute(query).scalar() or 0.0) < until:
        _put_pauses.rows(connection, [(run_id, policy, until)])


def renew(connection: Connection, now: float | None, lease: Lease, *, ttl_s: float) -> Lease:
    """Keep a claim for another `ttl_s`. A lease that ran out but was not claimed since is still its owner's;
    `LeaseLost` once another worker has claimed the attempt."""
    until = moment(connection, now) + ttl_s
    changed = connection.execute(update(attempts).where(_own_claim(lease)).values(expires_at=until))
    if not changed.rowcount:
        raise lease_error(lease)
    return msgspec.structs.replace(lease, expires_at=until)


def renew_all(connection: Connection, now: float | None, held: Sequence[Lease], *, ttl_s: float) -> set[str]:
    """`heartbeat` for all leases of a worker in one statement; gives the attempts whose leases were lost."""
    until = moment(connection, now) + ttl_s
    kept: set[str] = set()
    for start in range(0, len(held), _AT_ONCE):
        own = tuple_(attempts.c.id, attempts.c.fence).in_(_pairs(held[start : start + _AT_ONCE]))
        query = update(attempts).where(own, attempts.c.state == "leased").values(expires_at=until)
        kept |= set(connection.execute(query.returning(attempts.c.id)).scalars())
    return {lease.attempt.id for lease in held} - kept


def reclaim(connection: Connection, now: float | None, run_id: str, *, grace_s: GracePeriod = 0.0) -> int:
    """Attempts whose leases ran out `grace_s` ago are owed again, each in its old place; gives how many."""
    run_out = and_(attempts.c.run_id == run_id, attempts.c.state == "leased")
    run_out = and_(run_out, attempts.c.expires_at <= moment(connection, now) - _ask(grace_s))
    changed = connection.execute(update(attempts).where(run_out).values(state="owed", owner=None, expires_at=None))
    return changed.rowcount


def give_back(connection: Connection, now: float | None, lease: Lease, *, after_s: float = 0.0) -> bool:
    """Give an attempt back undone; it is owed again, though not before `after_s`. False, and nothing changes, when the
    lease was lost."""
    due = moment(connection, now) + after_s if after_s else None
    changed = connection.execute(
        update(attempts).where(_own_claim(lease)).values(state="owed", owner=None, expires_at=due)
    )
    return bool(changed.rowcount)


def withdraw(connection: Connection, attempt_ids: Sequence[str]) -> list[str]:
    """Cancels attempts; gives those that were not done. One that is under way cannot be committed."""
    gone: list[str] = []
    for start in range(0, len(attempt_ids), _AT_ONCE):
        which = and_(attempts.c.id.in_(attempt_ids[start : start + _AT_ONCE]), attempts.c.state.in_(("owed", "leased")))
        query = update(attempts).where(which).values(state="cancelled", owner=None, expires_at=None)
        gone += connection.execute(query.returning(attempts.c.id)).scalars()
    return gone


def settle(connection: Connection, lease: Lease, state: AttemptState, rollout_id: str) -> bool:
    """False when this very rollout was committed before: an answer that was lost on its way is asked for again."""
    values = {"state": state, "owner": None, "expires_at": None, "rollout_id": rollout_id}
    if connection.execute(update(attempts).where(_own_claim(lease)).values(**values)).rowcount:
        return True
    query = select(attempts.c.rollout_id).where(attempts.c.id == lease.attempt.id, attempts.c.fence == lease.fence)
    if connection.execute(query).scalar() == rollout_id:
        return False
    raise lease_error(lease)


def hold(connection: Connection, attempt_id: str, fence: int) -> bool:
    """Whether the claim is still good; it cannot be taken before this transaction ends."""
    query = select(attempts.c.id).where(attempts.c.id == attempt_id, attempts.c.fence == fence)
    query = query.where(attempts.c.state == "leased").with_for_update(read=True)
    return connection.execute(query).first() is not None


def still_held(connection: Connection, held: Iterable[Lease]) -> set[tuple[str, int]]:
    """The claims that are still good, as attempt and fence."""
    pairs, good = _pairs(held), set[tuple[str, int]]()
    for start in range(0, len(pairs), _AT_ONCE):
        own = tuple_(attempts.c.id, attempts.c.fence).in_(pairs[start : start + _AT_ONCE])
        query = select(attempts.c.id, attempts.c.fence).where(own, attempts.c.state == "leased")
        good |= {(row.id, row.fence) for row in connection.execute(query)}
    return good


def lease_error(lease: Lease) -> LeaseLost:
    return LeaseLost(f"the claim on attempt {lease.attempt.id} is no longer {lease.owner}'s (fence {lease.fence})")


def list_leases(connection: Connection, run_id: str) -> list[Lease]:
    """Claims that are out, whether their time is up or not."""
    query = select(attempts).where(attempts.c.run_id == run_id, attempts.c.state == "leased")
    return [_lease(row) for row in connection.execute(query.order_by(attempts.c.position)).mappings()]


def find_live(connection: Connection, rollout_id: str) -> Attempt | None:
    """The attempt that a rollout under way works on: its session is open, under the claim that is out."""
    claim = and_(attempts.c.id == sessions.c.attempt_id, attempts.c.fence == sessions.c.fence)
    query = select(attempts).join(sessions, claim)
    query = query.where(
        sessions.c.rollout_id == rollout_id, sessions.c.closed_at.is_(None), attempts.c.state == "leased"
    )
    row = connection.execute(query).mappings().first()
    return None if row is None else as_attempt(row)


def _ask(grace_s: GracePeriod) -> float:
    return grace_s() if callable(grace_s) else grace_s


def _pairs(held: Iterable[Lease]) -> list[tuple[str, int]]:
    return sorted({(lease.attempt.id, lease.fence) for lease in held})


def _own_claim(lease: Lease) -> Any:
    return and_(attempts.c.id == lease.attempt.id, attempts.c.fence == lease.fence, attempts.c.state == "leased")


def _lease(row: Mapping[Any, Any]) -> Lease:
    return Lease(attempt=as_attempt(row), owner=row["owner"], fence=row["fence"], expires_at=row["expires_at"])
