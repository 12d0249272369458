"""Rollouts and reports as data frames: `to_pandas()` and `to_polars()` (extras `pandas` and `polars`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rollyard.core.errors import MissingExtra
from rollyard.core.html import block, encodable, line, table
from rollyard.core.rollout import Rollout
from rollyard.store.values import RolloutRow, row_of

if TYPE_CHECKING:
    import pandas
    import polars  # pyright: ignore[reportMissingImports]

_SHOWN = ("task_id", "attempt", "agent", "policy", "status", "reward", "calls", "wall_s", "error", "id")


def pandas_frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pandas.DataFrame:
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("pandas", "pandas", why="to_pandas") from error
    return pandas.DataFrame(_values(rows, columns))


def polars_frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> polars.DataFrame:
    try:
        import polars  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtra("polars", "polars", why="to_polars") from error
    return polars.DataFrame(_values(rows, columns), strict=False)


def _values(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dict[str, list[Any]]:
    """By column. Half of a character, which a program may have printed, is written as its number: frames keep UTF-8."""
    return {encodable(name): [_value(row.get(name)) for row in rows] for name in columns}


def _value(value: Any) -> Any:
    return encodable(value) if isinstance(value, str) else value


class RolloutList(list[Rollout]):
    """Rollouts as `ry.run` and `Store.all_rollouts` give them: a list, and a table of one row for each."""

    def rows(self) -> list[dict[str, Any]]:
        """What a list of rollouts shows, why each failed, and the parts of its verdict as `part.NAME`."""
        return [_fields(rollout) for rollout in self]

    def to_pandas(self) -> pandas.DataFrame:
        rows = self.rows()
        return pandas_frame(rows, _columns(rows))

    def to_polars(self) -> polars.DataFrame:
        rows = self.rows()
        return polars_frame(rows, _columns(rows))

    def _repr_html_(self) -> str:
        scored = [rollout.reward for rollout in self if rollout.reward is not None]
        mean = f", mean reward {sum(scored) / len(scored):.3f}" if scored else ""
        head = line(f"{len(self)} rollouts, {len(scored)} scored{mean}")
        return block(head, table(_SHOWN, [[row[name] for name in _SHOWN] for row in self.rows()]))


def _fields(rollout: Rollout) -> dict[str, Any]:
    parts = rollout.verdict.parts if rollout.verdict is not None else {}
    named = {f"part.{name}": value for name, value in parts.items()}
    return {**msgspec.structs.asdict(row_of(rollout)), "error": rollout.error, **named}


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns that every rollout has, in their order, then the parts that some have."""
    fixed = [*RolloutRow.__struct_fields__, "error"]
    return list(dict.fromkeys([*fixed, *(name for row in rows for name in row)]))
