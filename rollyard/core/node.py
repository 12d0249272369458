"""What a trajectory is made of: `Node` and the values its methods give back.

A node is a message with the token delta it added. The concatenated deltas from a root to a node are exactly the ids the
model saw and sampled up to there; where they are not known, `ids` is None and nothing below is provable.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from rollyard.core.call import CallRecord, VersionSpan
from rollyard.core.delta import Blob
from rollyard.core.experts import RoutedExperts
from rollyard.core.message import Message

BreakReason = Literal[
    "new_root",  # nothing earlier to continue
    "system_changed",
    "tools_changed",
    "history_edited",  # a user, tool or system message in the middle is another one
    "assistant_rewritten",  # an answer came back with other words or arguments
    "thinking_stripped",
    "compaction",
    "bridge_unproven",  # the same messages came back, but as other tokens
]

_texts = msgspec.msgpack.Decoder(tuple[str, ...])


class Node(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`ids` is the delta after the parent's end: prompt tokens of a context node, sampled tokens of a sampled one; None
    where the policy gave none. A prompt's whole delta lies on its last context node, since an engine does not say where a
    message begins; the ones before it then hold none. `logprobs` has one entry per sampled token. `inserted` are ranges of
    `ids` that no model sampled and no agent sent (a bridge's turn close). `packed_texts` are the sampled tokens as text, where
    the policy gave them, made by `pack_texts`: hundreds of small strings for each answer would be most of what a trajectory
    takes, and most of what the garbage collector looks at. `experts` are those that each of the `ids` was predicted through
    (computed from the token before it), so a sequence's first token has none. `same_as` names an earlier node of the rollout
    with the equal message, so that a store keeps it once."""

    id: int
    parent: int | None
    message: Message
    sampled: bool = False
    call_id: str | None = None
    ids: array[int] | None = None
    logprobs: array[float] | None = None
    inserted: tuple[tuple[int, int], ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    packed_texts: bytes = b""
    trainable: bool = True
    experts: RoutedExperts | None = None
    same_as: int | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The sampled tokens as text, read anew at each use."""
        return _texts.decode(self.packed_texts) if self.packed_texts else ()


def pack_texts(texts: Sequence[str]) -> bytes:
    return msgspec.msgpack.encode(texts) if texts else b""


class Added(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one call added: its record, the nodes that are new (or, for a sampled node whose parent came late, placed
    anew under the same id), and bodies to keep once under their digest."""

    record: CallRecord
    nodes: tuple[Node, ...]
    blobs: Mapping[bytes, Blob]
