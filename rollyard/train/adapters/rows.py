"""Which rows of which rollouts train, and one model call of a row (`TrainedCall`) for trainers that count in calls.

Not a filter that hides losses: a rollout with a reward that gives no row raises `Untrainable` with every reason. One without
a reward is left out, as its group's baseline must not see it.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from rollyard.core.call import CallRecord, floats
from rollyard.core.errors import Untrainable
from rollyard.core.message import Message
from rollyard.core.rollout import Rollout
from rollyard.trajectory.branch import BranchKind
from rollyard.trajectory.samples import TRAINED_KINDS, Sample, advantages, samples
from rollyard.trajectory.trajectory import Trajectory

Advantages = Mapping[str, float]  # rollout id -> its advantage


class TrainedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call that trains: the ids its answer was sampled from, and the answer."""

    row: Sample
    record: CallRecord
    prompt: array[int]
    ids: array[int]
    logprobs: array[float]
    versions: array[int]
    messages: tuple[Message, ...]
    message: Message


def rows_of(rollouts: Iterable[Rollout], *, kinds: Collection[BranchKind] = TRAINED_KINDS) -> list[Sample]:
    """The rows of all scored rollouts, in order."""
    found: list[Sample] = []
    for rollout in rollouts:
        if rollout.reward is not None:
            found += scored_rows(rollout, kinds=kinds)
    return found


def scored_rows(
    rollout: Rollout, *, kinds: Collection[BranchKind] = TRAINED_KINDS, unscored: bool = False
) -> tuple[Sample, ...]:
    """The rows of one rollout, or `Untrainable`; `unscored` takes it without a reward, for who asks for that elsewhere."""
    made = samples(rollout, kinds=kinds, unscored=unscored)
    if not made.rows:
        reasons = tuple(dict.fromkeys(reason for refused in made.refused for reason in refused.reasons))
        raise Untrainable(rollout.id, reasons or ("no model call was captured",))
    return made.rows


def answers_of(
    rollout: Rollout, *, kinds: Collection[BranchKind] = TRAINED_KINDS, unscored: bool = False
) -> list[TrainedCall]:
    """Every answer that trains, once, in the order in which the calls were made."""
    graph = graph_of(rollout)
    found: list[TrainedCall] = []
    for row in scored_rows(rollout, kinds=kinds, unscored=unscored):
        for span in row.spans:
            if not span.call_id or not span.sampled or not any(row.mask[span.start : span.end]):
                continue
            answer = graph.answer(span.call_id)
            assert answer is not None, "a sampled span has an answer"
            found.append(
                TrainedCall(
                    row=row,
                    record=graph.record(span.call_id),
                    prompt=row.ids[: span.start],
                    ids=row.ids[span.start : span.end],
                    logprobs=row.logprobs[span.start : span.end],
                    versions=row.versions[span.start : span.end],
                    messages=graph.messages(span.call_id),
                    message=answer.message,
                )
            )
    return sorted(found, key=lambda answer: answer.record.seq)


def graph_of(rollout: Rollout) -> Trajectory:
    if rollout.trajectory is None:
        raise Untrainable(rollout.id, ("no model call was captured",))
    return rollout.trajectory


def main_row(rows: Sequence[Sample]) -> Sample:
    """The row a trainer gets that takes one per rollout: the agent's own with the most tokens that train."""
    return max(rows, key=lambda row: (row.kind == "agent", row.trained, -row.index))


def spread(row: Sample, advantage: float) -> array[float]:
    """A rollout's advantage on each token of a row that trains, 0.0 on the others."""
    return floats(advantage if bit else 0.0 for bit in row.mask)


def advantages_of(rows: Iterable[Sample], given: Advantages | None) -> Advantages:
    """Those given, or group-relative ones with one entry per rollout."""
    return advantages(rows) if given is None else given


def tree_place(row: Sample) -> dict[str, int | None]:
    """Where a row hangs in its rollout's tree, for adapters whose trainers keep fields of others: its first `shared_tokens` are
    those of the row `parent_row`."""
    return {"parent_row": row.parent, "shared_tokens": row.shared}


def versions_of(row: Sample) -> list[int]:
    """The policy versions that sampled a row, oldest first."""
    return sorted({version for version, bit in zip(row.versions, row.mask, strict=True) if bit and version >= 0})
