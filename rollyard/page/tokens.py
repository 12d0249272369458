"""A branch in tokens, as text: how sure the model was, what trains, by which policy version, what branches share.

The text of a sampled token is what the policy reported; a context token has the text that an equal token was reported with, and
those of the byte model are bytes. A token without a reported text shows its id.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollyard.core.call import CallRecord
from rollyard.core.errors import ConfigError
from rollyard.core.node import Node
from rollyard.page.markup import visible
from rollyard.page.rollouts import CHIPS, find_rollout
from rollyard.policy.renderers.bytelevel import NAMES, ByteRenderer
from rollyard.store import Store
from rollyard.trajectory.branch import Branch, Span

TOKENS = 2000
Texts = Mapping[int, str]


async def show_tokens(store: Store, rollout_id: str, *, branch: int, start: int) -> dict[str, Any]:
    found = await find_rollout(store, rollout_id)
    branches: tuple[Branch, ...] = found.captured.branches
    if not branches:
        raise ConfigError(f"rollout {rollout_id} has no recorded calls")
    chosen = branches[min(branch, len(branches) - 1)]
    records = {record.id: record for record in found.captured.records}
    texts: Texts | None = None if _speaks_bytes(chosen, records) else known_texts(branches)
    return {
        "rollout": found,
        "branch": chosen,
        "branches": branches[:CHIPS],
        "spans": _spans(chosen, branches, records, texts, start, start + TOKENS),
        "start": start,
        "total": len(chosen.ids) if chosen.ids is not None else 0,
        "window": TOKENS,
        "first_sampled": chosen.prompt_len,
    }


def _speaks_bytes(branch: Branch, records: Mapping[str, CallRecord]) -> bool:
    return all(records[call].engine.get("renderer") == ByteRenderer.name for call in branch.call_ids)


def known_texts(branches: Sequence[Branch]) -> Texts:
    """The reported text of each id, anywhere in the rollout."""
    found: dict[int, str] = {}
    for node in {node.id: node for branch in branches for node in branch.nodes}.values():
        if node.ids is not None and len(node.texts) == len(node.ids):
            found.update(zip(node.ids, node.texts, strict=True))
    return found


def byte_texts(ids: Sequence[int]) -> list[str]:
    """The text of each token of the byte model; that of a long character stands at its last byte."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(bytes((one,))) if one < 256 else NAMES.get(one, "") for one in ids]


def _spans(
    branch: Branch,
    branches: Sequence[Branch],
    records: Mapping[str, CallRecord],
    texts: Texts | None,
    start: int,
    stop: int,
) -> list[dict[str, Any]]:
    nodes = {node.id: node for node in branch.nodes}
    shown: list[dict[str, Any]] = []
    for span in branch.spans:
        low, high = max(span.start, start), min(span.end, stop)
        if low >= high or branch.ids is None:
            continue
        node = nodes[span.node]
        cells = _cells(branch, span, node, texts)[low - span.start : high - span.start]
        record = records.get(span.call_id or "")
        shown.append(
            {
                "role": span.role,
                "sampled": span.sampled,
                "start": low,
                "end": high,
                "cells": cells,
                "trained": branch.mask[low:high].count(1),
                "versions": sorted({cell["version"] for cell in cells} - {None}),
                "source": record.prompt_source if record is not None and span.sampled else None,
                "inserted": sum(cell["inserted"] for cell in cells),
                "elsewhere": _trains_in(span, branch, branches),
            }
        )
    return shown


def _cells(branch: Branch, span: Span, node: Node, texts: Texts | None) -> list[dict[str, Any]]:
    assert branch.ids is not None
    ids = branch.ids[span.start : span.end]
    inserted = {at for a, b in node.inserted for at in range(a, b)}
    if texts is None:
        said: Sequence[str] = byte_texts(ids)
    elif len(node.texts) == len(ids):
        said = node.texts
    else:
        said = [texts.get(one, "") for one in ids]
    cells: list[dict[str, Any]] = []
    for at, (one, text) in enumerate(zip(ids, said, strict=True)):
        trains = bool(branch.mask[span.start + at])
        logprob = branch.logprobs[span.start + at] if trains else None
        version = branch.versions[span.start + at]
        cells.append(
            {
                "id": one,
                "text": visible(text).replace("\n", "↵\n"),
                "logprob": logprob,
                "chance": None if logprob is None else math.exp(min(0.0, logprob)),
                "heat": heat(logprob) if logprob is not None else ("held" if span.sampled else "ctx"),
                "version": version if version >= 0 else None,
                "inserted": at in inserted,
            }
        )
    return cells


def _trains_in(span: Span, branch: Branch, branches: Sequence[Branch]) -> int | None:
    """The other branch in which an answer that several share is trained."""
    if not span.sampled or branch.mask[span.start : span.end].count(1):
        return None
    for other in branches:
        for its in other.spans:
            if other.index != branch.index and its.node == span.node and other.mask[its.start : its.end].count(1):
                return other.index
    return None


def heat(logprob: float) -> str:
    """Ten steps from certain to surprising, as a class of the style sheet."""
    return f"h{min(9, int(-logprob * 1.5))}" if logprob <= 0 else "h0"
