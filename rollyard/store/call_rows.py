"""A call as one row: the columns by which people filter, its record, the nodes that it added, and the bodies that are its own.

One row and one entry of one index, because that is what a call costs: rows in tables of their own, each with an index, touched
six pages where this touches two, and a page is written to the log and later to the file. An index over digests was the worst:
each digest lies on another page of it, however many come at once.

A body is the call's own when it is small, or a difference from an earlier one of the same rollout. The others are shared
(`blobs.py`): a large one that many rollouts begin with is kept once.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rollyard.core.call import CallRecord, VersionSpan
from rollyard.core.delta import Blob, Delta
from rollyard.core.experts import RoutedExperts
from rollyard.core.message import Message
from rollyard.core.node import Node

SHARED_FROM = 16 * 1024  # bytes of a whole body
_encode = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(CallRecord).decode


_NO_TEXTS = msgspec.Raw(b"\x90")  # a list of none


class RareNodeFields(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Fields that few nodes have. Rows of older versions lack the last one."""

    inserted: tuple[tuple[int, int], ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    trainable: bool = True
    texts: msgspec.Raw = _NO_TEXTS
    experts: RoutedExperts | None = None


class StoredNode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    id: int
    parent: int | None
    call_id: str | None
    sampled: bool
    same_as: int | None  # the message is that node's
    message: Message | None
    ids: bytes | None
    logprobs: bytes | None
    rest: RareNodeFields | None = None  # None when plain


class StoredBody(msgspec.Struct, frozen=True, array_like=True, gc=False):
    digest: bytes
    data: bytes | Delta


_PLAIN = RareNodeFields()
_decode_nodes = msgspec.msgpack.Decoder(tuple[StoredNode, ...]).decode
_decode_bodies = msgspec.msgpack.Decoder(tuple[StoredBody, ...]).decode


def call_row(record: CallRecord, nodes: Sequence[Node], bodies: Mapping[bytes, Blob]) -> tuple[Any, ...]:
    """In the order of the table's columns. With bytearrays: the driver looks for an adapter of every `bytes` and `bool`, and
    finding none costs more than the copy."""
    return (
        record.rollout_id,
        record.seq,
        record.id,
        record.kind,
        record.edge,
        record.parent_call_id,
        record.break_reason,
        _without_nul(record.model_served or record.model_requested),
        record.capture,
        record.finish,
        _without_nul(record.error) if record.error else record.error,
        record.usage.prompt_tokens,
        record.usage.completion_tokens,
        record.received_at,
        record.finished_at,
        bytearray(_encode(record)),
        bytearray(_encode([_stored_node(node) for node in nodes])) if nodes else None,
        bytearray(_encode([StoredBody(digest, body) for digest, body in bodies.items()])) if bodies else None,
    )


def _without_nul(text: str) -> str:
    """What agents and servers said as a text that PostgreSQL takes; the record has it as it was."""
    return text.replace("\0", "\ufffd")


def split_bodies(record: CallRecord, bodies: Mapping[bytes, Blob]) -> tuple[dict[bytes, Blob], dict[bytes, bytes]]:
    """The bodies that go into the call's row, and those that are shared."""
    own, shared = dict[bytes, Blob](), dict[bytes, bytes]()
    named = (record.raw_request, record.raw_response)
    for digest, body in bodies.items():
        if isinstance(body, Delta) or (digest in named and len(body) < SHARED_FROM):
            own[digest] = body
        else:
            shared[digest] = body
    return own, shared


def read_nodes(packed: Iterable[bytes | None]) -> list[Node]:
    """Those of a rollout's calls, which come in order: one that was placed anew counts as it was placed last."""
    stored = {node.id: node for nodes in packed if nodes is not None for node in _decode_nodes(nodes)}
    messages: dict[int, Message] = {}
    return [_node(stored[number], messages) for number in sorted(stored)]


def read_body(packed: bytes, digest: bytes) -> Blob | None:
    """One of a call's own bodies."""
    return next((body.data for body in _decode_bodies(packed) if body.digest == digest), None)


def read_bodies(packed: bytes) -> dict[bytes, Blob]:
    """A call's own bodies under their digests."""
    return {body.digest: body.data for body in _decode_bodies(packed)}


def follow_differences(own: Mapping[bytes, Blob], digest: bytes) -> tuple[bytes, list[Delta]]:
    """The body that a body is made from, as far as `own` leads, and the differences from it in the order in which they apply.
    Where they lead in a circle it is the body itself: a shared one may stand in `own` as a difference from what builds on it."""
    chain: dict[bytes, Delta] = {}
    at = digest
    while isinstance(body := own.get(at), Delta):
        if at in chain:
            return digest, []
        chain[at] = body
        at = body.base
    return at, [*reversed(chain.values())]


def find_bases(packed: bytes) -> list[bytes]:
    """Digests of what the differences among a call's own bodies are differences from."""
    return [body.data.base for body in _decode_bodies(packed) if isinstance(body.data, Delta)]


def _stored_node(node: Node) -> StoredNode:
    plain = node.trainable and node.experts is None and not (node.inserted or node.spans or node.packed_texts)
    return StoredNode(
        node.id,
        node.parent,
        node.call_id,
        node.sampled,
        node.same_as,
        node.message if node.same_as is None else None,
        _pack(node.ids),
        _pack(node.logprobs),
        None if plain else _rest_of(node),
    )


def _rest_of(node: Node) -> RareNodeFields:
    texts = msgspec.Raw(node.packed_texts) if node.packed_texts else _NO_TEXTS
    return RareNodeFields(node.inserted, node.spans, node.trainable, texts, node.experts)


def _node(stored: StoredNode, messages: dict[int, Message]) -> Node:
    message = messages[stored.same_as] if stored.same_as is not None else stored.message
    if message is None:
        raise KeyError(stored.id)
    messages[stored.id] = message
    rest = stored.rest or _PLAIN
    return Node(
        id=stored.id,
        parent=stored.parent,
        message=message,
        sampled=stored.sampled,
        call_id=stored.call_id,
        ids=_unpack("i", stored.ids),
        logprobs=_unpack("d", stored.logprobs),
        inserted=rest.inserted,
        spans=rest.spans,
        packed_texts=b"" if rest.texts == _NO_TEXTS else bytes(rest.texts),
        trainable=rest.trainable,
        experts=rest.experts,
        same_as=stored.same_as,
    )


def _pack(values: array[Any] | None) -> bytes | None:
    if values is None:
        return None
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()


def _unpack(typecode: str, packed: bytes | None) -> array[Any] | None:
    if packed is None:
        return None
    values = array(typecode, packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values
