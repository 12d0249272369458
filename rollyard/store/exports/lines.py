"""The formats that are lines of JSON: attempts, turns, samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.call import REPLAYED, floats, ids
from rollyard.core.experts import read_experts
from rollyard.core.rollout import Rollout
from rollyard.store.exports.sink import JsonLines
from rollyard.store.values import Note
from rollyard.trajectory.branch import BranchKind, Span
from rollyard.trajectory.samples import RefusedBranch, Sample, samples
from rollyard.trajectory.turns import turns
from rollyard.trajectory.value_tree import RowNode, ValueTree


class AttemptLines(JsonLines):
    """One line per attempt. What is not known is null, never 0."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.rows = 0
        self.notes: Sequence[Note] = ()  # on the rollout that comes next

    def add(self, rollout: Rollout) -> Sequence[RefusedBranch]:
        self.rows += 1
        self.write({**attempt_line(rollout), "notes": [note_line(note) for note in self.notes]})
        return ()


def note_line(note: Note) -> dict[str, Any]:
    fields = msgspec.to_builtins(note)
    return {name: fields[name] for name in ("kind", "name", "text", "score", "author", "at")}


class TurnLines(JsonLines):
    """One line per answered call, with what identifies its rollout. Empty for rollouts whose content was not recorded. `kinds`
    are the calls wanted; None: all."""

    def __init__(self, path: Path, kinds: Collection[BranchKind] | None = None) -> None:
        super().__init__(path)
        self.rows = 0
        self._kinds = kinds

    def add(self, rollout: Rollout) -> Sequence[RefusedBranch]:
        same = {
            "rollout_id": rollout.id,
            "run_id": rollout.run_id,
            "group_id": rollout.group_id,
            "task_id": rollout.task.id,
            "attempt": rollout.attempt,
            "reward": rollout.reward,
            "parent_rollout": rollout.parent_rollout,
            "parent_call": rollout.parent_call,
        }
        for index, turn in enumerate(turns(rollout.trajectory)):
            if self._kinds is not None and turn.kind not in self._kinds:
                continue
            prompt = rollout.captured.prompt_ids(turn.call_id)
            self.rows += 1
            self.write(
                {
                    **same,
                    "turn": index,
                    "replayed": REPLAYED in rollout.captured.record(turn.call_id).flaws,
                    **msgspec.structs.asdict(turn),
                    "prompt_ids": None if prompt is None else list(prompt),
                }
            )
        return ()


class SampleLines(JsonLines):
    """One line per training row; arrays as lists. `tree` knows what the branch points of the run are worth."""

    def __init__(self, path: Path, tree: ValueTree, *, kinds: Collection[BranchKind], unscored: bool) -> None:
        super().__init__(path)
        self.rows = 0
        self._tree, self._kinds, self._unscored = tree, kinds, unscored

    def add(self, rollout: Rollout) -> Sequence[RefusedBranch]:
        found = samples(rollout, kinds=self._kinds, unscored=self._unscored)
        for row in found.rows:
            self.rows += 1
            self.write(sample_line(row, self._tree.nodes_of(row)))
        return found.refused


def attempt_line(rollout: Rollout) -> dict[str, Any]:
    verdict, failure = rollout.verdict, rollout.failure
    return {
        "task_id": rollout.task.id,
        "attempt": rollout.attempt,
        "status": rollout.status,
        "reward": rollout.reward,
        "calls": rollout.calls,
        "rollout_id": rollout.id,
        "run_id": rollout.run_id,
        "group_id": rollout.group_id,
        "agent": rollout.agent,
        "agent_version": rollout.agent_version,
        "mode": rollout.mode,
        "seed": rollout.seed,
        "stop_reason": rollout.stop_reason,
        "exit_code": rollout.exit_code,
        "parts": verdict.parts if verdict is not None else {},
        "checks": verdict.checks if verdict is not None else {},
        "grade": verdict.grade if verdict is not None else None,
        "failure": None if failure is None else msgspec.to_builtins(failure),
        "usage": rollout.usage,
        "parent_rollout": rollout.parent_rollout,
        "parent_call": rollout.parent_call,
        "replayed": rollout.replayed,
        "pinned": rollout.pinned,
        "resumed": rollout.resumed,
        "laid_over": rollout.laid_over,
        "labels": rollout.labels,
        "started_at": rollout.started_at,
        "wall_s": rollout.wall_s,
    }


def sample_line(row: Sample, nodes: Sequence[RowNode] = ()) -> dict[str, Any]:
    """A row under the names that the Parquet export uses too; `nodes` are the branch points on its way."""
    return {
        "rollout_id": row.rollout_id,
        "run_id": row.run_id,
        "group_id": row.group_id,
        "task_id": row.task_id,
        "attempt": row.attempt,
        "sample_index": row.index,
        "n_samples": row.count,
        "kind": row.kind,
        "input_ids": list(row.ids),
        "loss_mask": list(row.mask),
        "logprobs": list(row.logprobs),
        "versions": list(row.versions),
        "temperatures": None if row.temperatures is None else list(row.temperatures),
        "prompt_len": row.prompt_len,
        "call_ids": list(row.call_ids),
        "spans": [
            {"role": s.role, "start": s.start, "end": s.end, "sampled": s.sampled, "call_id": s.call_id}
            for s in row.spans
        ],
        "truncated": row.truncated,
        "reward": row.reward,
        "parent_index": row.parent,
        "shared_tokens": row.shared,
        "parent_rollout": row.parent_rollout,
        "parent_call": row.parent_call,
        "own_from": row.own_from,
        "nodes": [msgspec.to_builtins(node) for node in nodes],
        "stale_call_ids": list(row.stale_call_ids),
        "routed_experts": None if row.experts is None else row.experts.to_base64(),
    }


def read_sample(line: Mapping[str, Any]) -> Sample:
    """The row that a line was written of; its spans know no nodes, since the graph is not here."""
    return Sample(
        rollout_id=line["rollout_id"],
        run_id=line["run_id"],
        group_id=line["group_id"],
        task_id=line["task_id"],
        attempt=line["attempt"],
        index=line["sample_index"],
        count=line["n_samples"],
        kind=line["kind"],
        call_ids=tuple(line["call_ids"]),
        spans=tuple(Span(-1, s["role"], s["start"], s["end"], s["sampled"], s["call_id"]) for s in line["spans"]),
        ids=ids(line["input_ids"]),
        mask=bytes(line["loss_mask"]),
        logprobs=floats(line["logprobs"]),
        versions=ids(line["versions"]),
        temperatures=None if line["temperatures"] is None else floats(line["temperatures"]),
        prompt_len=line["prompt_len"],
        truncated=line["truncated"],
        reward=line["reward"],
        parent=line["parent_index"],
        shared=line["shared_tokens"],
        experts=None if line["routed_experts"] is None else read_experts(line["routed_experts"]),
        parent_rollout=line["parent_rollout"],
        parent_call=line["parent_call"],
        own_from=line["own_from"],
        stale_call_ids=tuple(line["stale_call_ids"]),
    )
