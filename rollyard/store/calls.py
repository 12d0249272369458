"""Calls and nodes as rows, and the gate's sessions: the hot path of the store."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, select, update

from rollyard.core.call import CallRecord, VersionSpan
from rollyard.core.delta import Blob
from rollyard.core.errors import LeaseLost, SessionClosed, StoreError
from rollyard.core.experts import RoutedExperts
from rollyard.core.message import Message
from rollyard.core.node import Node
from rollyard.core.protocols import SessionRecord
from rollyard.store import leases
from rollyard.store.blobs import encode_blobs, put_rows
from rollyard.store.database import Put
from rollyard.store.schema import calls, nodes, sessions

GATHER_SHARE, MOST_GATHER_S = 0.05, 0.03  # of a call's own time, and in seconds
LARGE = 128 * 1024  # bytes of bodies
_CALL_COLUMNS = tuple(column.name for column in calls.columns)
_NODE_COLUMNS = tuple(column.name for column in nodes.columns)
_put_calls = Put(calls, _CALL_COLUMNS, there="fail")
_put_nodes = Put(nodes, _NODE_COLUMNS, there="replace")  # a node whose parent came late is placed anew
_put_sessions = Put(sessions, tuple(column.name for column in sessions.columns), there="replace")
_encode = msgspec.msgpack.Encoder().encode
_record = msgspec.msgpack.Decoder(CallRecord)
_message = msgspec.msgpack.Decoder(Message)


_NO_TEXTS = msgspec.Raw(b"\x90")  # a list of none


class NodeRest(msgspec.Struct, frozen=True, array_like=True):
    """What few nodes have. Rows of older versions end before the last."""

    inserted: tuple[tuple[int, int], ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    trainable: bool = True
    texts: msgspec.Raw = _NO_TEXTS
    experts: RoutedExperts | None = None


_PLAIN = NodeRest()
_rest = msgspec.msgpack.Decoder(NodeRest)
_CLOSED = (
    "SELECT rollout_id FROM sessions WHERE closed_at IS NOT NULL AND rollout_id IN (SELECT value FROM json_each(?))"
)
_closed_at = select(sessions.c.rollout_id, sessions.c.closed_at)


class CallRows(NamedTuple):
    call: tuple[Any, ...]
    nodes: list[tuple[Any, ...]]
    blobs: list[tuple[Any, ...]]


class CommitCall:
    """Keep one call with the nodes and bodies it added. Raises `SessionClosed` once its session is closed; a session whose
    claim was taken over is closed."""

    __slots__ = ("_blobs", "_nodes", "_repeated", "_rows", "record")

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
            nodes = [_node_row(self.record.rollout_id, node) for node in self._nodes]
            self._rows = CallRows(_call_row(self.record), nodes, encode_blobs(self._blobs))
        return self._rows

    @property
    def large(self) -> bool:
        """Compressing it takes a while."""
        return sum(len(body) for body in self._blobs.values() if isinstance(body, bytes)) >= LARGE

    @property
    def gather_s(self) -> float:
        """A small part of what the call took anyway."""
        took = (self.record.finished_at or 0.0) - self.record.received_at
        return min(GATHER_SHARE * took, MOST_GATHER_S)

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
    nodes: list[tuple[Any, ...]]
    blobs: list[tuple[Any, ...]]
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
    put_rows(connection, [row for rows in kept for row in rows.blobs])
    _put_nodes.rows(connection, [row for rows in kept for row in rows.nodes])
    _put_calls.rows(connection, [rows.call for rows in kept])
    if not closed:
        return [None] * len(new)
    return [_refusal(rows.call[0]) if rows.call[0] in closed else None for rows in new]


def _is_kept(connection: Connection, call: tuple[Any, ...]) -> bool:
    """With all of its rows, which are written in one transaction."""
    rollout_id, seq, call_id, *_ = call
    found = select(calls.c.id).where((calls.c.rollout_id == rollout_id) & (calls.c.seq == seq))
    return connection.execute(found).scalar() == call_id


def _refusal(rollout_id: str) -> SessionClosed:
    return SessionClosed(f"rollout {rollout_id} is closed", rollout_id=rollout_id)


def load(connection: Connection, rollout_id: str) -> tuple[list[CallRecord], list[Node]]:
    found = connection.execute(select(calls.c.record).where(calls.c.rollout_id == rollout_id).order_by(calls.c.seq))
    rows = connection.execute(select(nodes).where(nodes.c.rollout_id == rollout_id).order_by(nodes.c.id))
    messages: dict[int, Message] = {}
    try:
        return [_record.decode(row.record) for row in found], [_node(row, messages) for row in rows]
    except (msgspec.MsgspecError, KeyError) as error:
        raise StoreError(f"the calls of rollout {rollout_id} are damaged: {error}") from error


def save_session(connection: Connection, session: SessionRecord) -> None:
    if session.attempt_id is not None and not leases.hold(connection, session.attempt_id, session.fence or 0):
        raise LeaseLost(f"the claim of rollout {session.rollout_id} is lost", rollout_id=session.rollout_id)
    settings = msgspec.json.encode(session.settings).decode()
    row = (session.rollout_id, session.key_hash, session.created_at, session.closed_at, settings)
    row += (session.attempt_id, session.fence)
    _put_sessions.rows(connection, [row])


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
    """Those of the sessions that are closed."""
    if connection.dialect.name == "sqlite":  # straight to the driver: this runs for every call
        driver: Any = connection.connection.driver_connection
        return {row[0] for row in driver.execute(_CLOSED, (msgspec.json.encode(list(rollout_ids)).decode(),))}
    found = connection.execute(_closed_at.where(sessions.c.rollout_id.in_(rollout_ids)).with_for_update(read=True))
    return {row.rollout_id for row in found if row.closed_at is not None}  # the others stay open until these are kept


# Rows hold bytearrays: the driver looks for an adapter of every `bytes` and `bool`, and finding none costs more than the copy.


def _call_row(record: CallRecord) -> tuple[Any, ...]:
    return (
        record.rollout_id,
        record.seq,
        record.id,
        record.kind,
        record.edge,
        record.parent_call_id,
        record.break_reason,
        record.model_served or record.model_requested,
        record.capture,
        record.finish,
        record.error.replace("\0", "\ufffd") if record.error else record.error,
        record.usage.prompt_tokens,
        record.usage.completion_tokens,
        record.received_at,
        record.finished_at,
        bytearray(_encode(record)),
    )


def _node_row(rollout_id: str, node: Node) -> tuple[Any, ...]:
    plain = node.trainable and node.experts is None and not (node.inserted or node.spans or node.packed_texts)
    return (
        rollout_id,
        node.id,
        node.parent,
        node.call_id,
        node.message.role,
        int(node.sampled),
        node.same_as,
        bytearray(_encode(node.message)) if node.same_as is None else None,
        _pack(node.ids),
        _pack(node.logprobs),
        None if plain else bytearray(_encode(_rest_of(node))),
    )


def _rest_of(node: Node) -> NodeRest:
    texts = msgspec.Raw(node.packed_texts) if node.packed_texts else _NO_TEXTS
    return NodeRest(node.inserted, node.spans, node.trainable, texts, node.experts)


def _node(row: Any, messages: dict[int, Message]) -> Node:
    message = messages[row.same_as] if row.same_as is not None else _message.decode(row.message)
    messages[row.id] = message
    rest = _PLAIN if row.rest is None else _rest.decode(row.rest)
    return Node(
        id=row.id,
        parent=row.parent,
        message=message,
        sampled=row.sampled,
        call_id=row.call_id,
        ids=_unpack("i", row.ids),
        logprobs=_unpack("d", row.logprobs),
        inserted=rest.inserted,
        spans=rest.spans,
        packed_texts=b"" if rest.texts == _NO_TEXTS else bytes(rest.texts),
        trainable=rest.trainable,
        experts=rest.experts,
        same_as=row.same_as,
    )


def _pack(values: array[Any] | None) -> bytearray | None:
    if values is None:
        return None
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return bytearray(values)


def _unpack(typecode: str, packed: bytes | None) -> array[Any] | None:
    if packed is None:
        return None
    values = array(typecode, bytes(packed))
    if sys.byteorder == "big":
        values.byteswap()
    return values
