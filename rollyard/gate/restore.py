"""A session after a restart: its graph, its counts and its answers come back from the log when its key is used again.

Whether an answer had reached its reader before the process died cannot be known. An answer that a later call built upon
did; any other is treated as undelivered, so that the same request, sent again, gets the same answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rollyard.core.call import CallRecord, Reply, TokenText
from rollyard.core.node import Node
from rollyard.core.protocols import CallLog
from rollyard.gate.pending import PendingTurn, turn_key
from rollyard.trajectory.trajectory import Trajectory

if TYPE_CHECKING:
    from rollyard.gate.session import Session


async def restore(session: Session, log: CallLog, limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        records, nodes = await log.load_calls(session.rollout_id)
    trajectory = Trajectory.restore(session.rollout_id, records, nodes)
    session.trajectory = trajectory
    continued = {record.parent_call_id for record in trajectory.records}
    for record in trajectory.records:
        _count(session, record)
        reply = _reply(trajectory, record)
        if reply is not None and record.raw_request:
            key = turn_key(record.dialect, record.raw_request, record.model_requested)
            turn = PendingTurn(key, None, deadline=0.0)
            turn.reply = reply
            turn.delivered = record.id in continued
            session.turns.restore(turn)
    note_shape(session, trajectory)
    session.restored = False


def _count(session: Session, record: CallRecord) -> None:
    if record.kind == "auxiliary" and record.leaf is None and record.error is None:
        return  # tokens were counted
    session.relayed += record.capture == "none"
    if record.finish == "budget":
        session.budget_stops += 1
        return
    session.calls += 1
    session.answered += record.leaf is not None or (session.through is not None and record.error is None)
    session.prompt_tokens += record.usage.prompt_tokens or 0
    session.charge_cached(record.usage)
    session.completion_tokens += record.usage.completion_tokens or 0


def _reply(trajectory: Trajectory, record: CallRecord) -> Reply | None:
    answer = trajectory.answer(record.id)
    if answer is None:
        return None
    return Reply(
        message=answer.message,
        finish=record.finish or "stop",
        stop_reason=record.stop_reason,
        usage=record.usage,
        model=record.model_served,
        tokens=_tokens(answer) if record.requested.logprobs else (),
        trainable=record.trainable,
        finished_at=record.finished_at,
    )


def _tokens(answer: Node) -> tuple[TokenText, ...]:
    """What the agent asked to see of them. The engine's alternatives are in no node."""
    texts, logprobs = answer.texts, answer.logprobs
    if logprobs is None or len(logprobs) != len(texts):
        return tuple([TokenText(text) for text in texts])
    return tuple([TokenText(text, value) for text, value in zip(texts, logprobs, strict=True)])


def note_shape(session: Session, trajectory: Trajectory) -> None:
    found = (r for r in trajectory.records if r.kind == "agent" and r.leaf is not None and r.tools_digest)
    first = next(found, None)
    if first is not None:
        session.shape.tools = first.tools_digest
        messages = trajectory.messages(first.id)
        session.shape.system = next((m.digest for m in messages if m.role == "system"), b"")
