"""A rollout as JSON for the admin API: the fields that OpenEnv's capture proxy gives, out of our graph.

Rows are labelled, never dropped: a branch that cannot be trained on says why. Ids leave as lists of integers here and only
here; inside they stay packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollyard.core.call import Call, CallRecord, CaptureLevel, Sampling
from rollyard.core.message import Message
from rollyard.core.protocols import CallLog
from rollyard.trajectory.trajectory import Branch, Trajectory
from rollyard.wire import CODECS
from rollyard.wire.codec import WireRequest

_RANK: tuple[CaptureLevel, ...] = ("none", "text", "logprobs", "tokens")
_AGENT = ("agent", "subagent", "compaction")


def capture_level(records: tuple[CallRecord, ...]) -> CaptureLevel | None:
    """The least that any answered call gave; None before the first."""
    levels: list[CaptureLevel] = [
        r.capture for r in records if r.error is None and r.leaf is not None and r.finish != "budget"
    ]
    return _RANK[min(_RANK.index(level) for level in levels)] if levels else None


def stats(trajectory: Trajectory) -> dict[str, int]:
    records = [r for r in trajectory.records if r.leaf is not None]
    return {
        "n_turns": len(records),
        "n_roots": sum(1 for r in records if r.parent_call_id is None),
        "n_leaves": len(trajectory.branches),
        "n_forks": sum(1 for r in records if r.break_reason not in (None, "new_root")),
        "n_discarded": sum(1 for b in trajectory.branches if b.kind == "discarded"),
    }


def rollout_document(
    trajectory: Trajectory,
    *,
    metadata: Mapping[str, Any],
    budget_stops: int,
    purpose: str,
    include_discarded: bool,
    requests: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """`requests` are the decoded requests by call id, when they were asked for."""
    branches = trajectory.branches
    level = capture_level(trajectory.records)
    train = level == "tokens" and purpose != "eval"
    rows = [_sequence(b, train) for b in branches if include_discarded or b.kind != "discarded"]
    trainable = [row for row in rows if row["trainable"]]
    return {
        "session_id": trajectory.rollout_id,
        "metadata": dict(metadata),
        "budget_stop_count": budget_stops,
        "turns": _turns(trajectory, branches, requests),
        "stats": {
            **stats(trajectory),
            "n_sequences": len(rows),
            "n_trainable_sequences": len(trainable),
            "n_trainable_tokens": sum(row["n_trainable"] for row in trainable),
        },
        "sequences": rows,
        "validation": [f"{r.id}: {r.error}" for r in trajectory.records if r.error is not None],
        "trainable": bool(trainable),
        "capture_level": level,
        "rollout_type": "train" if train else "eval",
    }


def _sequence(branch: Branch, train: bool) -> dict[str, Any]:
    ids = list(branch.ids) if branch.ids is not None else []
    role = branch.kind if branch.kind == "discarded" else "agent" if branch.kind in _AGENT else "auxiliary"
    sampled = [span for span in branch.spans if span.sampled]
    return {
        "role": role,
        "kind": branch.kind,
        "root_id": branch.call_ids[0],
        "node_ids": list(branch.call_ids),
        "n_turns": len(branch.call_ids),
        "prompt_len": branch.prompt_len,
        "n_trainable": branch.trained if train else 0,
        "turn_lengths": [span.end - span.start for span in sampled],
        "input_ids": ids,
        "loss_mask": list(branch.mask) if train else [0] * len(ids),
        "logprobs": list(branch.logprobs),
        "versions": list(branch.versions),
        "trainable": train and role == "agent" and branch.trained > 0,
        "validation": list(branch.flaws),
    }


def _turns(
    trajectory: Trajectory, branches: tuple[Branch, ...], requests: Mapping[str, Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    roots: dict[str, str] = {}
    discarded: set[str] = set()
    for branch in branches:
        for call_id in branch.call_ids:
            roots.setdefault(call_id, branch.call_ids[0])
        if branch.kind == "discarded":
            discarded.add(branch.call_ids[-1])
    return [_turn(trajectory, r, roots.get(r.id, r.id), r.id in discarded, requests) for r in trajectory.records]


def _turn(
    trajectory: Trajectory,
    record: CallRecord,
    root: str,
    discarded: bool,
    requests: Mapping[str, Mapping[str, Any]] | None,
) -> dict[str, Any]:
    answer = trajectory.answer(record.id)
    prompt = trajectory.prompt_ids(record.id) if answer is not None else None
    turn: dict[str, Any] = {
        "node_id": record.id,
        "index": record.seq,
        "root_id": root,
        "kind": record.kind,
        "n_sampled": len(answer.ids) if answer is not None and answer.ids is not None else 0,
        "n_prompt": len(prompt) if prompt is not None else 0,
        "finish_reason": record.finish,
        "harness_session_id": record.thread,
        "sampling_params": _sampling(record.effective),
        "requested_sampling_params": _sampling(record.requested),
        "sampled_logprobs": list(answer.logprobs) if answer is not None and answer.logprobs is not None else None,
        "discarded": discarded,
        "error": record.error,
    }
    if requests is not None:
        request = requests.get(record.id, {})
        turn["request_messages"] = request.get("messages", [])
        turn["request_tools"] = request.get("tools", [])
        turn["response_message"] = None if answer is None else chat_messages((answer.message,))[0]
    return turn


def trace_entries(trajectory: Trajectory, requests: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per trainable agent call, with the engine's own prompt ids and a mask over prompt and completion."""
    entries: list[dict[str, Any]] = []
    for branch in trajectory.branches:
        if branch.kind not in _AGENT or branch.ids is None:
            continue
        for span in branch.spans:
            if not span.sampled or span.call_id is None or not any(branch.mask[span.start : span.end]):
                continue
            record = trajectory.record(span.call_id)
            answer = trajectory.answer(span.call_id)
            prompt = trajectory.prompt_ids(span.call_id)
            if answer is None or prompt is None:
                continue
            entries.append(
                {
                    "request": requests.get(record.id, {}),
                    "response": {
                        "choices": [
                            {"message": chat_messages((answer.message,))[0], "finish_reason": record.finish},
                        ]
                    },
                    "prompt_token_ids": list(prompt),
                    "completion_token_ids": list(branch.ids[span.start : span.end]),
                    "per_token_logps": list(branch.logprobs[span.start : span.end]),
                    "loss_mask": [0] * len(prompt) + list(branch.mask[span.start : span.end]),
                    "metadata": {
                        "node_id": record.id,
                        "index": record.seq,
                        "model": record.model_served or record.model_requested,
                        "harness_session_id": record.thread,
                        "sampling_params": _sampling(record.effective),
                        "requested_sampling_params": _sampling(record.requested),
                        "version_start": record.version_start,
                        "version_end": record.version_end,
                    },
                }
            )
    return entries


def chat_messages(messages: tuple[Message, ...]) -> list[Any]:
    return chat_request(Call(id="", rollout_id="", dialect="chat", model="", messages=messages))["messages"]


def chat_request(call: Call) -> dict[str, Any]:
    """Any call as the messages and tools of a chat completion."""
    plain = msgspec.structs.replace(call, raw=b"", raw_digest=b"")
    body = msgspec.json.decode(CODECS["chat"].encode_request(plain, model="", sampling=Sampling(), extra={}))
    return {"messages": body.get("messages", []), "tools": body.get("tools", [])}


async def requests_of(trajectory: Trajectory, log: CallLog | None) -> dict[str, Mapping[str, Any]]:
    """What each call asked, from its own body where there is a log, else from the graph (which has no tool list)."""
    found: dict[str, Mapping[str, Any]] = {}
    for record in trajectory.records:
        if log is not None and record.raw_request:
            raw = await log.load_blob(record.raw_request, record.rollout_id)
            request = WireRequest(
                call_id=record.id,
                rollout_id=record.rollout_id,
                body=raw,
                headers={},
                model=record.model_requested,
                stream=False,
            )
            found[record.id] = chat_request(CODECS[record.dialect].decode(request))
        elif record.leaf is not None:
            found[record.id] = {"messages": chat_messages(trajectory.messages(record.id)), "tools": []}
    return found


def _sampling(sampling: Sampling | None) -> dict[str, Any]:
    return {} if sampling is None else {k: v for k, v in msgspec.to_builtins(sampling).items() if v is not None}
