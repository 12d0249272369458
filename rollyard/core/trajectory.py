"""The trajectory: a graph of all calls of one rollout.

A node is a message with the token delta it added. A path from a root to a leaf is a branch, and a branch is one training
sequence: the concatenated deltas are exactly the ids the model saw and sampled. Pure: no I/O, no clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import msgspec

from rollyard.core.call import CallRecord, VersionSpan
from rollyard.core.message import Message


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """`ids` is the delta after the parent's end: prompt tokens of a context node, sampled tokens of a sampled one; None
    where the policy gave none. `logprobs` has one entry per sampled token. `inserted` are ranges of `ids` that no model
    sampled and no agent sent (a bridge's turn close)."""

    id: int
    parent: int | None
    message: Message
    sampled: bool = False
    call_id: str | None = None
    ids: array[int] | None = None
    logprobs: array[float] | None = None
    inserted: tuple[tuple[int, int], ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    trainable: bool = True


class Added(msgspec.Struct, frozen=True, kw_only=True):
    """What one call added: its record, the new nodes, and bodies to keep once under their digest."""

    record: CallRecord
    nodes: tuple[Node, ...]
    blobs: Mapping[bytes, bytes]
