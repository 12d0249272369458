"""Training rows as Parquet, written in row groups, so that a run of any size passes through bounded memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from rollyard.core.errors import MissingExtra
from rollyard.core.rollout import Rollout
from rollyard.store.partial_files import partial_name
from rollyard.trajectory.branch import BranchKind
from rollyard.trajectory.samples import RefusedBranch, Sample, samples
from rollyard.trajectory.value_tree import RowNode, ValueTree

GROUP_TOKENS = 250_000  # a row group is written when this many tokens have gathered,
GROUP_ROWS = 256  # or this many rows: those of short calls are mostly names and spans


class ParquetRows:
    def __init__(self, path: Path, tree: ValueTree, *, kinds: Collection[BranchKind], unscored: bool) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise MissingExtra("pyarrow", "parquet", why="a Parquet export") from None
        self._arrow: Any = pyarrow
        self._parquet: Any = pyarrow.parquet
        self._path, self._tree, self._kinds, self._unscored = path, tree, kinds, unscored
        self._waiting: list[tuple[Sample, Sequence[RowNode]]] = []
        self._tokens = 0
        self.rows = 0

    def __enter__(self) -> Self:
        self._schema = _schema(self._arrow)
        self._writer = self._parquet.ParquetWriter(partial_name(self._path), self._schema, compression="zstd")
        return self

    def add(self, rollout: Rollout) -> Sequence[RefusedBranch]:
        found = samples(rollout, kinds=self._kinds, unscored=self._unscored)
        for row in found.rows:
            self._waiting.append((row, self._tree.nodes_of(row)))
            self._tokens += len(row.ids)
            self.rows += 1
        if self._tokens >= GROUP_TOKENS or len(self._waiting) >= GROUP_ROWS:
            self._flush()
        return found.refused

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(_table(self._arrow, self._schema, self._waiting))
        self._waiting, self._tokens = [], 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._flush()
        self._writer.close()
        if kind is None:
            partial_name(self._path).replace(self._path)
        else:
            partial_name(self._path).unlink(missing_ok=True)


def _schema(arrow: Any) -> Any:
    text, long, real = arrow.string(), arrow.int64(), arrow.float64()
    span = arrow.struct(
        [
            ("role", text),
            ("start", arrow.int32()),
            ("end", arrow.int32()),
            ("sampled", arrow.bool_()),
            ("call_id", text),
        ]
    )
    node = arrow.struct(
        [("rollout", text), ("call", text), ("start", arrow.int32()), ("leaves", arrow.int32()), ("value", real)]
    )
    columns = [
        ("rollout_id", text),
        ("run_id", text),
        ("group_id", text),
        ("task_id", text),
        ("attempt", arrow.int32()),
        ("sample_index", arrow.int32()),
        ("n_samples", arrow.int32()),
        ("kind", text),
        ("input_ids", arrow.list_(arrow.int32())),
        ("loss_mask", arrow.list_(arrow.int8())),
        ("logprobs", arrow.list_(real)),
        ("versions", arrow.list_(long)),
        ("temperatures", arrow.list_(real)),
        ("prompt_len", arrow.int32()),
        ("call_ids", arrow.list_(text)),
        ("spans", arrow.list_(span)),
        ("truncated", arrow.bool_()),
        ("reward", real),
        ("parent_index", arrow.int32()),
        ("shared_tokens", arrow.int32()),
        ("parent_rollout", text),
        ("parent_call", text),
        ("own_from", arrow.int32()),
        ("nodes", arrow.list_(node)),
        ("stale_call_ids", arrow.list_(text)),
        ("routed_experts", arrow.binary()),
    ]
    return arrow.schema(columns, metadata={"rollyard.samples": "1"})


def _table(arrow: Any, schema: Any, waiting: Sequence[tuple[Sample, Sequence[RowNode]]]) -> Any:
    """Token columns are taken as the packed arrays they are; no token passes through Python."""
    rows = [row for row, _ in waiting]
    spans = [
        [
            {"role": s.role, "start": s.start, "end": s.end, "sampled": s.sampled, "call_id": s.call_id}
            for s in row.spans
        ]
        for row in rows
    ]
    columns: dict[str, Any] = {
        "rollout_id": [row.rollout_id for row in rows],
        "run_id": [row.run_id for row in rows],
        "group_id": [row.group_id for row in rows],
        "task_id": [row.task_id for row in rows],
        "attempt": [row.attempt for row in rows],
        "sample_index": [row.index for row in rows],
        "n_samples": [row.count for row in rows],
        "kind": [row.kind for row in rows],
        "input_ids": _lists(arrow, arrow.int32(), [row.ids for row in rows]),
        "loss_mask": _lists(arrow, arrow.int8(), [row.mask for row in rows]),
        "logprobs": _lists(arrow, arrow.float64(), [row.logprobs for row in rows]),
        "versions": _lists(arrow, arrow.int64(), [row.versions for row in rows]),
        "temperatures": _lists(arrow, arrow.float64(), [row.temperatures for row in rows]),
        "prompt_len": [row.prompt_len for row in rows],
        "call_ids": [list(row.call_ids) for row in rows],
        "spans": spans,
        "truncated": [row.truncated for row in rows],
        "reward": [row.reward for row in rows],
        "parent_index": [row.parent for row in rows],
        "shared_tokens": [row.shared for row in rows],
        "parent_rollout": [row.parent_rollout for row in rows],
        "parent_call": [row.parent_call for row in rows],
        "own_from": [row.own_from for row in rows],
        "nodes": [msgspec.to_builtins(found) for _, found in waiting],
        "stale_call_ids": [list(row.stale_call_ids) for row in rows],
        "routed_experts": [None if row.experts is None else row.experts.to_npy() for row in rows],
    }
    arrays = [
        values if isinstance(values, arrow.Array) else arrow.array(values, type=field.type)
        for field, values in zip(schema, columns.values(), strict=True)
    ]
    return arrow.Table.from_arrays(arrays, schema=schema)


def _lists(arrow: Any, kind: Any, values: Sequence[Any]) -> Any:
    """A list column out of packed arrays; None is a null list."""
    offsets: list[int | None] = [0]
    end = 0
    for value in values:
        if value is None:
            offsets[-1] = None
        else:
            end += len(value)
        offsets.append(end)
    packed = b"".join(bytes(value) for value in values if value is not None)
    flat = arrow.Array.from_buffers(kind, end, [None, arrow.py_buffer(packed)])
    return arrow.ListArray.from_arrays(arrow.array(offsets, type=arrow.int32()), flat)
