"""Samples: a rollout as rows that a trainer takes, one per branch, and the reasons for every branch that is not a row.

A row is refused rather than repaired. The reward belongs to the rollout and is repeated on its rows; a baseline is computed
over rollouts (`rollout_id`), never over rows, and a loss is normalised the same way (`count` says how many rows share it).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from statistics import fmean, pstdev
from typing import TypeVar

import msgspec

from rollyard.core.call import REPLAYED, floats
from rollyard.core.experts import RoutedExperts
from rollyard.core.node import Node
from rollyard.core.rollout import MergeCounts, Rollout
from rollyard.trajectory.branch import Branch, BranchKind, Span, can_train
from rollyard.trajectory.trajectory import Trajectory

T = TypeVar("T", int, float)
TRAINED_KINDS: tuple[BranchKind, ...] = ("agent", "subagent", "compaction")


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """All arrays have one entry per token. `mask` is 1 on tokens that train; `logprobs` is 0.0, `versions` -1 and
    `temperatures` 1.0 on all others. `temperatures` is None where some answer's effective temperature is not known.

    The rows of a rollout are a tree: the first `shared` tokens of a row are those of the row with the index `parent`, an
    earlier one of the same rollout, so that a trainer may compute them once. `parent` is None where nothing is shared."""

    rollout_id: str
    run_id: str | None
    group_id: str | None
    task_id: str
    attempt: int
    index: int
    count: int
    kind: BranchKind
    call_ids: tuple[str, ...]
    spans: tuple[Span, ...]
    ids: array[int]
    mask: bytes
    logprobs: array[float]
    versions: array[int]
    temperatures: array[float] | None
    prompt_len: int
    truncated: bool
    reward: float | None
    parent: int | None = None
    shared: int = 0
    # That each token but the last was computed with, where the engine said it for all
    experts: RoutedExperts | None = None
    parent_rollout: str | None = None  # that the rollout branches off, at `parent_call`
    parent_call: str | None = None
    # What is before it is the parent's: on the way through the branch point, where the first own answer begins
    own_from: int = 0
    stale_call_ids: tuple[str, ...] = ()  # answers that do not train because their policy was too old (`max_staleness`)

    @property
    def trained(self) -> int:
        return self.mask.count(1)


class RefusedBranch(msgspec.Struct, frozen=True, kw_only=True):
    """A branch that is no row, and why."""

    rollout_id: str
    branch: int
    kind: BranchKind
    call_ids: tuple[str, ...]
    reasons: tuple[str, ...]


class Samples(msgspec.Struct, frozen=True):
    rows: tuple[Sample, ...]
    refused: tuple[RefusedBranch, ...]


def samples(
    rollout: Rollout,
    trajectory: Trajectory | None = None,
    *,
    kinds: Collection[BranchKind] = TRAINED_KINDS,
    unscored: bool = False,
) -> Samples:
    """Rows of a rollout. `kinds` are the branches wanted; `unscored` also gives rows of a rollout that has no reward."""
    graph = trajectory if trajectory is not None else rollout.trajectory
    if graph is None:
        return Samples((), ())
    against = _against(rollout, unscored)
    trained: set[int] = set()
    kept: list[tuple[Branch, bytes]] = []
    refused: list[RefusedBranch] = []
    for branch in graph.branches:
        reasons = list(against)
        if branch.kind not in kinds:
            reasons.append(f"{branch.kind} branches are not asked for")
        if branch.ids is None:
            reasons += branch.flaws
        mask = b""
        if not reasons:
            mask = _mask(branch, trained, rollout.stale_before)
            if not any(mask):
                reasons += branch.flaws
                if stale := _stale_calls(branch, rollout.stale_before):
                    reasons.append(f"{len(stale)} answers are of policy versions before {rollout.stale_before}")
                elif not branch.flaws:
                    reasons.append("every answer on it trains in another row")
        if reasons:
            refused.append(_refuse(rollout, branch, reasons))
        else:
            kept.append((branch, mask))
    above = _parents([branch for branch, _ in kept])
    rows = tuple(_row(rollout, graph, kept[n], (n, len(kept)), above[n]) for n in range(len(kept)))
    return Samples(rows, tuple(refused))


def _parents(branches: Sequence[Branch]) -> list[tuple[int | None, int]]:
    """For each branch the first of those before it that shares most tokens with it, and how many."""
    found: list[tuple[int | None, int]] = []
    for n, branch in enumerate(branches):
        shared = [_shared_tokens(branch, other) for other in branches[:n]]
        most = max(shared, default=0)
        found.append((shared.index(most), most) if most else (None, 0))
    return found


def _shared_tokens(branch: Branch, other: Branch) -> int:
    """By their nodes: two paths through the same node have the same tokens up to its end."""
    end = 0
    for own, theirs in zip(branch.spans, other.spans, strict=False):
        if own.node != theirs.node:
            break
        end = own.end
    return end


def merge_counts(trajectory: Trajectory) -> MergeCounts | None:
    """Of all branches whose answers could train, whatever becomes of the rollout."""
    branches = [b for b in trajectory.branches if b.kind in TRAINED_KINDS and b.ids is not None and b.trained]
    if not branches:
        return None
    ends = {span.node: span.end for branch in branches for span in branch.spans if span.sampled}
    row_tokens = sum(len(branch.ids or ()) for branch in branches)
    return MergeCounts(
        calls=len(ends),
        rows=len(branches),
        call_tokens=sum(ends.values()),
        row_tokens=row_tokens,
        tree_tokens=row_tokens - sum(shared for _, shared in _parents(branches)),
    )


def advantages(rows: Iterable[Sample], *, scale: bool = True) -> dict[str, float]:
    """Group-relative advantages by rollout: each rollout counts once in its group's mean however many rows it has, and one
    without a reward counts nowhere. `scale` divides by the group's standard deviation where there is one."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.reward is not None:
            groups.setdefault(row.group_id or row.task_id, {})[row.rollout_id] = row.reward
    found: dict[str, float] = {}
    for rewards in groups.values():
        mean, spread = fmean(rewards.values()), pstdev(rewards.values())
        by = spread if scale and spread > 0 else 1.0
        found |= {rollout_id: (reward - mean) / by for rollout_id, reward in rewards.items()}
    return found


def _against(rollout: Rollout, unscored: bool) -> list[str]:
    reasons: list[str] = []
    if not rollout.trainable and rollout.failure is not None:
        reasons.append(f"the rollout failed at its {rollout.failure.boundary} ({rollout.failure.cause})")
    if rollout.reward is None and not unscored:
        reasons.append("the rollout has no reward")
    return reasons


def _mask(branch: Branch, trained: set[int], stale_before: int | None) -> bytes:
    """Each answer trains once among the rows that are kept, and one that is too old nowhere."""
    nodes = {node.id: node for node in branch.nodes}
    mask = bytearray(len(branch.ids or ()))
    for span in branch.spans:
        node = nodes[span.node]
        if can_train(node) and not _is_stale(node, stale_before) and span.node not in trained:
            trained.add(span.node)
            mask[span.start : span.end] = b"\1" * (span.end - span.start)
    return bytes(mask)


def _is_stale(node: Node, stale_before: int | None) -> bool:
    """Whether any of its tokens is of an older version; a version that is not known is not old."""
    return stale_before is not None and any(span.version < stale_before for span in node.spans)


def _stale_calls(branch: Branch, stale_before: int | None) -> tuple[str, ...]:
    return tuple(node.call_id for node in branch.nodes if node.call_id and _is_stale(node, stale_before))


def _row(
    rollout: Rollout,
    graph: Trajectory,
    kept: tuple[Branch, bytes],
    place: tuple[int, int],
    above: tuple[int | None, int],
) -> Sample:
    (branch, mask), (index, count), (parent, shared) = kept, place, above
    assert branch.ids is not None
    return Sample(
        rollout_id=rollout.id,
        run_id=rollout.run_id,
        group_id=rollout.group_id,
        task_id=rollout.task.id,
        attempt=rollout.attempt,
        index=index,
        count=count,
        kind=branch.kind,
        call_ids=tuple(span.call_id for span in branch.spans if span.sampled and span.call_id is not None),
        spans=branch.spans,
        ids=branch.ids,
        mask=mask,
        logprobs=_blank_out(branch, mask, branch.logprobs, floats((0.0,))),
        versions=_blank_out(branch, mask, branch.versions, array("q", (-1,))),
        temperatures=_temperatures(branch, graph, mask),
        prompt_len=branch.prompt_len,
        truncated=graph.record(branch.call_ids[-1]).finish == "length",
        reward=rollout.reward,
        parent=parent,
        shared=shared,
        experts=branch.experts,
        parent_rollout=rollout.parent_rollout,
        parent_call=rollout.parent_call,
        own_from=_own_from(branch, graph) if rollout.parent_rollout is not None else 0,
        stale_call_ids=_stale_calls(branch, rollout.stale_before),
    )


def _own_from(branch: Branch, graph: Trajectory) -> int:
    """How many tokens of a branch are its parent's: all before the answer at the branch point; on a branch that does not go
    through it (a sub-agent's, one that began anew), up to the last answer that was the parent's."""
    sampled = [span for span in branch.spans if span.sampled and span.call_id is not None]
    first = next(
        (r.id for r in graph.records if r.kind == "agent" and r.leaf is not None and REPLAYED not in r.flaws), None
    )
    at = next((span.start for span in sampled if span.call_id == first), None)
    replayed = [span.end for span in sampled if REPLAYED in graph.record(span.call_id or "").flaws]
    return at if at is not None else max(replayed, default=0)


def _blank_out(branch: Branch, mask: bytes, values: array[T], blank: array[T]) -> array[T]:
    """An answer that trains in another row, or in none, is context here like any other."""
    found = values
    for span in branch.spans:
        if span.sampled and span.start < span.end and not mask[span.start]:
            found = found[:] if found is values else found
            found[span.start : span.end] = blank * (span.end - span.start)
    return found


def _temperatures(branch: Branch, graph: Trajectory, mask: bytes) -> array[float] | None:
    """What each answer was really sampled at; the requested value stands in only where the policy reports no other."""
    found = floats((1.0,)) * len(branch.ids or ())
    for span in branch.spans:
        if span.sampled and span.call_id is not None and any(mask[span.start : span.end]):
            record = graph.record(span.call_id)
            used = record.effective if record.effective is not None else record.requested
            if used.temperature is None:
                return None
            found[span.start : span.end] = floats((used.temperature,)) * (span.end - span.start)
    return found


def _refuse(rollout: Rollout, branch: Branch, reasons: list[str]) -> RefusedBranch:
    return RefusedBranch(
        rollout_id=rollout.id,
        branch=branch.index,
        kind=branch.kind,
        call_ids=branch.call_ids,
        reasons=tuple(dict.fromkeys(reasons)),
    )
