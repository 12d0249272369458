"""Calls as rows, and the gate's sessions: the hot path of the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, LargeBinary, func, literal, select, update

from rollyard.core.call import CallRecord
from rollyard.core.delta import Blob, Delta, apply
from rollyard.core.errors import ConfigError, LeaseLost, SessionClosed, StoreError
from rollyard.core.node import Node
from rollyard.core.protocols import SessionRecord
from rollyard.store import blobs, leases
from rollyard.store.blobs import encode_blobs, put_rows
from rollyard.store.call_rows import call_row, decode_record, read_bodies, read_body, read_nodes, split_bodies
from rollyard.store.database import Put
from rollyard.store.schema import calls, sessions

LARGE = 128 * 1024  # bytes of bodies
_put_calls = Put(calls, tuple(column.name for column in calls.columns), there="fail")
_put_sessions = Put(sessions, tuple(column.name for column in sessions.columns), there="replace")
_CLOSED = (
    "SELECT rollout_id FROM sessions WHERE closed_at IS NOT NULL AND rollout_id IN (SELECT value FROM json_each(?))"
)
_closed_at = select(sessions.c.rollout_id, sessions.c.closed_at)


class CallRows(NamedTuple):
    call: tuple[Any, ...]
    shared: list[tuple[Any, ...]]  # bodies


class CommitCall:
    """Keep one call with the nodes and bodies it added. Raises `SessionClosed` once its session is closed; a session whose
    claim was taken over is closed."""

    __slots__ = ("_blobs", "_nodes", "_repeated", "_rows", "record")
    shares = True

    def __init__(self, record: CallRecord, nodes: Sequence[Node], blobs: Mapping[bytes, Blob]) -> None:
        self.record, self._nodes, self._blobs = record, nodes, blobs
        self._rows: CallRows | None = None
        self._repeated = False

    def repeat(self) -> CommitCall:
        """Once more: nothing where it is kept already."""
        self._repeated = True
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SentCall, (*self.prepare(), self._repeated)

    def prepare(self) -> CallRows:
        """Packed and encoded, once."""
        if self._rows is None:
            own, shared = split_bodies(self.record, self._blobs)
            self._rows = CallRows(call_row(self.record, self._nodes, own), encode_blobs(shared) if shared else [])
        return self._rows

    @property
    def large(self) -> bool:
        """Compressing it takes a while."""
        return sum(len(body) for body in self._blobs.values() if isinstance(body, bytes)) >= LARGE

    @property
    def took_s(self) -> float:
        return max(0.0, (self.record.finished_at or 0.0) - self.record.received_at)

    def __call__(self, connection: Connection) -> None:
        (refusal,) = commit_rows(connection, [self.prepare()])
        if refusal is not None:
            raise refusal

    @staticmethod
    def together(connection: Connection, works: Sequence[CommitCall]) -> list[SessionClosed | None]:
        return commit_rows(connection, [work.prepare() for work in works])


class SentCall(NamedTuple):
    """A `CommitCall` as it reaches the process that writes."""

    call: tuple[Any, ...]
    shared: list[tuple[Any, ...]]
    repeated: bool

    def __call__(self, connection: Connection) -> None:
        (refusal,) = self.together(connection, [self])
        if refusal is not None:
            raise refusal

    @staticmethod
    def together(connection: Connection, works: Sequence[SentCall]) -> list[SessionClosed | None]:
        kept = [work.repeated and _is_kept(connection, work.call) for work in works]
        if not any(kept):
            return commit_rows(connection, works)
        new = iter(commit_rows(connection, [work for work, there in zip(works, kept, strict=True) if not there]))
        return [None if there else next(new) for there in kept]


def commit_rows(connection: Connection, new: Sequence[CallRows | SentCall]) -> list[SessionClosed | None]:
    """Several calls, with one statement for each table: a statement costs more than the row it writes. The calls of closed
    sessions are refused, each with its own error."""
    closed = _find_closed(connection, {rows.call[0] for rows in new})
    kept = [rows for rows in new if rows.call[0] not in closed] if closed else new
    put_rows(connection, [row for rows in kept for row in rows.shared])
    _put_calls.rows(connection, [rows.call for rows in kept])
    if not closed:
        return [None] * len(new)
    return [_refusal(rows.call[0]) if rows.call[0] in closed else None for rows in new]


def _is_kept(connection: Connection, call: tuple[Any, ...]) -> bool:
    """Whether the call is kept; all of its rows are written in one transaction."""
    rollout_id, seq, call_id, *_ = call
    found = select(calls.c.id).where((calls.c.rollout_id == rollout_id) & (calls.c.seq == seq))
    return connection.execute(found).scalar() == call_id


def _refusal(rollout_id: str) -> SessionClosed:
    return SessionClosed(f"rollout {rollout_id} is closed", rollout_id=rollout_id)


def load(connection: Connection, rollout_id: str) -> tuple[list[CallRecord], list[Node]]:
    return load_several(connection, [rollout_id])[0]


def load_several(connection: Connection, rollout_ids: Sequence[str]) -> list[tuple[list[CallRecord], list[Node]]]:
    """The calls of a few rollouts, with one statement."""
    query = select(calls.c.rollout_id, calls.c.record, calls.c.nodes).where(calls.c.rollout_id.in_(rollout_ids))
    rows: dict[str, list[Any]] = {rollout_id: [] for rollout_id in rollout_ids}
    for row in connection.execute(query.order_by(calls.c.rollout_id, calls.c.seq)):
        rows[row.rollout_id].append(row)
    return [_read_calls(rollout_id, of_one) for rollout_id, of_one in rows.items()]


def _read_calls(rollout_id: str, rows: Sequence[Any]) -> tuple[list[CallRecord], list[Node]]:
    try:
        return [decode_record(row.record) for row in rows], read_nodes(row.nodes for row in rows)
    except (msgspec.MsgspecError, KeyError) as error:
        raise StoreError(f"the calls of rollout {rollout_id} are damaged: {error}") from error


def load_own_bodies(connection: Connection, rollout_id: str) -> dict[bytes, Blob]:
    """Those that the calls of a rollout do not share, as they are kept: each as the first call that brought it has it, since a
    later one may be a difference from what builds on it."""
    query = select(calls.c.bodies).where(calls.c.rollout_id == rollout_id, calls.c.bodies.is_not(None))
    own = dict[bytes, Blob]()
    try:
        for packed in connection.execute(query.order_by(calls.c.seq)).scalars():
            own = read_bodies(packed) | own
    except msgspec.MsgspecError as error:
        raise StoreError(f"the bodies of rollout {rollout_id} are damaged: {error}") from error
    return own


def load_body(connection: Connection, digest: bytes, rollout_id: str) -> bytes:
    """One that calls of this rollout name, whole; the chain of differences behind it is bounded by its writer."""
    differences: list[Delta] = []
    at = digest
    while (whole := blobs.find(connection, at)) is None:
        body = _find_own(connection, at, rollout_id)
        if body is None:
            raise StoreError(f"no body of rollout {rollout_id} is kept under {at.hex()}")
        if not isinstance(body, Delta):
            whole = body
            break
        differences.append(body)
        at = body.base
    for delta in reversed(differences):
        whole = apply(delta, whole)
    return whole


def _find_own(connection: Connection, digest: bytes, rollout_id: str) -> Blob | None:
    """As the first call that brought it has it: a later one may be a difference from what builds on it."""
    sought = literal(digest, LargeBinary)
    if connection.dialect.name == "sqlite":
        holds = func.instr(calls.c.bodies, sought) > 0
    else:
        holds = func.position(sought.op("IN")(calls.c.bodies)) > 0
    query = select(calls.c.bodies).where(calls.c.rollout_id == rollout_id, holds).order_by(calls.c.seq)
    try:
        bodies = (read_body(packed, digest) for packed in connection.execute(query).scalars())
        return next((body for body in bodies if body is not None), None)
    except msgspec.MsgspecError as error:
        raise StoreError(f"the bodies of rollout {rollout_id} are damaged: {error}") from error


def save_session(connection: Connection, session: SessionRecord) -> None:
    if session.attempt_id is not None and not leases.hold(connection, session.attempt_id, session.fence or 0):
        raise LeaseLost(f"the claim of rollout {session.rollout_id} is lost", rollout_id=session.rollout_id)
    _refuse_another(connection, session)
    settings = msgspec.json.encode(session.settings).decode()
    row = (session.rollout_id, session.key_hash, session.created_at, session.closed_at, settings)
    row += (session.attempt_id, session.fence)
    _put_sessions.rows(connection, [row])


def _refuse_another(connection: Connection, session: SessionRecord) -> None:
    """A session that is closed stays closed, and the calls of one are not another's, of this gate or of one beside it."""
    columns = (sessions.c.created_at, sessions.c.closed_at)
    found = connection.execute(select(*columns).where(sessions.c.rollout_id == session.rollout_id)).first()
    if found is None or (found.closed_at is None and found.created_at == session.created_at):
        return
    if found.closed_at is not None:
        raise _refusal(session.rollout_id)
    if connection.execute(select(calls.c.id).where(calls.c.rollout_id == session.rollout_id).limit(1)).first():
        raise ConfigError(
            f"rollout {session.rollout_id} has a session and calls in this store already", hint="choose another id"
        )


def close_session(connection: Connection, rollout_id: str, at: float) -> None:
    """From here on `commit` refuses calls of this rollout. The first close counts."""
    where = (sessions.c.rollout_id == rollout_id) & sessions.c.closed_at.is_(None)
    connection.execute(update(sessions).where(where).values(closed_at=at))


def session(connection: Connection, rollout_id: str) -> SessionRecord | None:
    row = connection.execute(select(sessions).where(sessions.c.rollout_id == rollout_id)).first()
    return None if row is None else _session(row)


def all_sessions(connection: Connection) -> list[SessionRecord]:
    """Those that a gate may go on with. A session under a claim is not: the next claim starts over."""
    query = select(sessions).where(sessions.c.attempt_id.is_(None)).order_by(sessions.c.created_at)
    return [_session(row) for row in connection.execute(query)]


def _session(row: Any) -> SessionRecord:
    return SessionRecord(
        rollout_id=row.rollout_id,
        key_hash=bytes(row.key_hash),
        created_at=row.created_at,
        closed_at=row.closed_at,
        settings=msgspec.json.decode(row.settings),
    )


def _find_closed(connection: Connection, rollout_ids: set[str]) -> set[str]:
    """The sessions of these rollouts that are closed."""
    if connection.dialect.name == "sqlite":  # straight to the driver: this runs for every call
        driver: Any = connection.connection.driver_connection
        return {row[0] for row in driver.execute(_CLOSED, (msgspec.json.encode(list(rollout_ids)).decode(),))}
    found = connection.execute(_closed_at.where(sessions.c.rollout_id.in_(rollout_ids)).with_for_update(read=True))
    return {row.rollout_id for row in found if row.closed_at is not None}  # the others stay open until these are kept
