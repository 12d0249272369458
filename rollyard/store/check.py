"""Checking a run: the laws of every trajectory, and the evidence that was kept beside it.

The validators of `core` look at the graph alone. Here the bodies are read again: each must have the digest it is kept under,
and where an engine's own answer names token ids, they must be the ids of the graph. That is an independent proof of the
prefix law, since the graph was built from parsed values and stored as deltas.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from rollyard.core.call import CallRecord
from rollyard.core.errors import StoreError
from rollyard.core.rollout import Rollout
from rollyard.store.store import Store
from rollyard.trajectory.laws import LawViolation, counts, findings
from rollyard.trajectory.samples import samples
from rollyard.trajectory.trajectory import Trajectory

_PROMPT_KEYS = ("prompt_token_ids",)
_ANSWER_KEYS = ("token_ids", "output_ids")


class RunCheck(msgspec.Struct, frozen=True, kw_only=True):
    """`findings` are broken laws. Everything else is counted: forks by reason, prompts by source, rows and refusals."""

    run_id: str
    rollouts: int
    calls: int
    failed_calls: int
    branches: int
    rows: int
    calls_per_row: float | None  # how many calls became one training row; None without rows
    row_tokens: int  # of all rows
    tree_tokens: int  # of them, without what a row shares with an earlier one of its rollout
    tokens: int
    trained_tokens: int
    proved_prompts: int  # prompts that an engine's own answer confirms
    edges: Mapping[str, int]
    breaks: Mapping[str, int]
    prompts: Mapping[str, int]
    captures: Mapping[str, int]
    refused: Mapping[str, int]
    findings: tuple[LawViolation, ...]

    @property
    def ok(self) -> bool:
        return not self.findings


async def check_run(store: Store, run_id: str) -> RunCheck:
    """Hold every rollout of a run against the laws."""
    await store.get_run(run_id)
    numbers: Counter[str] = Counter()
    tallies: dict[str, Counter[str]] = {
        name: Counter() for name in ("edges", "breaks", "prompts", "captures", "refused")
    }
    found: list[LawViolation] = []
    async for rollout in store.rollouts(run_id, trajectories=True):
        trajectory: Trajectory = rollout.captured
        found += findings(trajectory)
        one = counts(trajectory)
        numbers["rollouts"] += 1
        for name in ("calls", "failed_calls", "branches", "tokens", "trained_tokens"):
            numbers[name] += getattr(one, name)
        for name in ("edges", "breaks", "prompts", "captures"):
            tallies[name].update(getattr(one, name))
        _count_rows(rollout, numbers, tallies["refused"])
        found += [f async for f in _evidence(store, trajectory, numbers)]
    names = ("rollouts", "calls", "failed_calls", "branches", "rows", "row_tokens", "tree_tokens", "tokens")
    fields: dict[str, Any] = {name: numbers[name] for name in (*names, "trained_tokens", "proved_prompts")} | tallies
    fields["calls_per_row"] = round(numbers["row_calls"] / numbers["rows"], 2) if numbers["rows"] else None
    return RunCheck(run_id=run_id, findings=tuple(found), **fields)


def _count_rows(rollout: Rollout, numbers: Counter[str], refused: Counter[str]) -> None:
    made = samples(rollout)
    numbers["rows"] += len(made.rows)
    numbers["row_calls"] += len({call_id for row in made.rows for call_id in row.call_ids})
    numbers["row_tokens"] += sum(len(row.ids) for row in made.rows)
    numbers["tree_tokens"] += sum(len(row.ids) - row.shared for row in made.rows)
    for one in made.refused:
        for reason in one.reasons:
            refused[reason.partition(": ")[2] if reason.startswith("call ") else reason] += 1


async def _evidence(store: Store, trajectory: Trajectory, numbers: Counter[str]) -> AsyncGenerator[LawViolation]:
    try:
        own = await store.load_own_bodies(trajectory.rollout_id)
    except StoreError as error:
        yield LawViolation("every body is kept", trajectory.rollout_id, "its calls", str(error))
        return
    for record in trajectory.records:
        for digest in (record.raw_request, record.raw_response):
            if not digest:
                continue
            try:
                body = await store.load_blob(digest, record.rollout_id, own)
            except StoreError as error:
                yield LawViolation("every body is kept", trajectory.rollout_id, f"call {record.id}", str(error))
                continue
            if hashlib.sha256(body).digest() != digest:
                yield LawViolation("a body has its digest", trajectory.rollout_id, f"call {record.id}", digest.hex())
            elif digest is record.raw_response:
                for finding in _compare_ids(trajectory, record, body, numbers):
                    yield finding


def _compare_ids(trajectory: Trajectory, record: CallRecord, body: bytes, numbers: Counter[str]) -> list[LawViolation]:
    """Compare the token ids in the engine's answer with those of the graph."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    found: list[LawViolation] = []
    prompt, sampled = _find_ids(answer, _PROMPT_KEYS), _find_ids(answer, _ANSWER_KEYS)
    node = trajectory.answer(record.id)
    known = trajectory.prompt_ids(record.id)
    if prompt is not None and known is not None:
        numbers["proved_prompts"] += 1
        if prompt != list(known):
            found.append(_differs(trajectory, record, "the graph has the engine's prompt"))
    if sampled is not None and node is not None and node.ids is not None and sampled != list(node.ids):
        found.append(_differs(trajectory, record, "the graph has the engine's answer"))
    return found


def _find_ids(answer: Any, keys: tuple[str, ...]) -> list[int] | None:
    """A list of ids under one of the names, at the top or in the first choice."""
    if not isinstance(answer, dict):
        return None
    places: list[Any] = [answer]
    choices: Any = answer.get("choices")
    if isinstance(choices, list) and len(choices) == 1:
        places.append(choices[0])
    for place in places:
        for key in keys:
            value: Any = place.get(key) if isinstance(place, dict) else None
            if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
                return value
    return None


def _differs(trajectory: Trajectory, record: CallRecord, law: str) -> LawViolation:
    return LawViolation(law, trajectory.rollout_id, f"call {record.id}", "the stored answer names other ids")
