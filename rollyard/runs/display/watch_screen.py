"""`rollyard watch` as a table to move around in: what is in flight first, then what has ended, newest first; a key opens one.

Reads the store twice a second and changes only rows that changed. Of a very large run it shows the newest thousand; the page has
them all. What agents wrote is shown as text: no markup, no control characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rollyard.core.errors import MissingExtra
from rollyard.core.printable import printable
from rollyard.runs.display.watch import RunningRollout, in_flight
from rollyard.store import Store
from rollyard.store.listing import ShownRollout
from rollyard.store.values import RolloutQuery, RolloutRow, RunInfo

try:
    from rich.text import Text
    from textual.app import App, ComposeResult
    from textual.binding import Binding, BindingType
    from textual.containers import VerticalScroll
    from textual.screen import Screen
    from textual.widgets import DataTable, Footer, Static
except ImportError as error:
    raise MissingExtra("textual", "tui", why="the table of `rollyard watch`") from error

EVERY_S = 0.5
ROWS = 1000
COLUMNS = ("task", "#", "agent", "policy", "status", "reward", "calls", "tokens", "time", "failed at")
_GOOD, _BAD, _LIVE = "green", "red", "magenta"


async def watch_screen(store: Store, run_id: str) -> None:
    """Until `q`."""
    await WatchApp(store, run_id).run_async()


class RolloutScreen(Screen[None]):
    """One rollout as text; `escape`, `u` or `q` goes back."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,u,q", "app.pop_screen", "back"),
        Binding("j", "scroll(3)", "down"),
        Binding("k", "scroll(-3)", "up"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="rollout"):
            yield Static(Text(self.text))
        yield Footer()

    def action_scroll(self, lines: int) -> None:
        self.query_one("#rollout", VerticalScroll).scroll_relative(y=lines, animate=False)


class WatchApp(App[None]):
    CSS = "#head { padding: 0 1; height: auto } DataTable { height: 1fr } #rollout { padding: 0 1 }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "move(1)", "down"),
        Binding("k", "move(-1)", "up"),
        Binding("enter", "open", "open", priority=False),
        Binding("f", "next_failure", "next failure"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, store: Store, run_id: str) -> None:
        super().__init__()
        self._store, self._run_id = store, run_id
        self._rows: dict[str, tuple[str, ...]] = {}
        self._failed: set[str] = set()
        self.flying: dict[str, tuple[str, ...]] = {}
        self.finished = False

    def compose(self) -> ComposeResult:
        yield Static("", id="head")
        table: DataTable[Text] = DataTable(cursor_type="row", zebra_stripes=True)
        table.add_columns(*((name, name) for name in COLUMNS))
        yield table
        yield Footer()

    async def on_mount(self) -> None:
        await self.refresh_rows()
        self.set_interval(EVERY_S, self.refresh_rows)
        self.table.focus()

    @property
    def table(self) -> DataTable[Text]:
        return self.query_one(DataTable)

    async def refresh_rows(self) -> None:
        if self.finished:
            return
        info = await self._store.get_run(self._run_id)
        page = await self._store.list_rollouts(RolloutQuery(run_id=self._run_id, descending=True, limit=ROWS))
        ended = {row.id: _cells(row) for row in page.rows}
        self._failed = {row.id for row in page.rows if row.boundary is not None}
        self.flying = {one.id: _running_cells(one) for one in await in_flight(self._store, info) if one.id not in ended}
        self._show({**self.flying, **ended})
        self.query_one("#head", Static).update(Text(_head(info, len(self.flying))))
        self.finished = info.finished

    def _show(self, rows: Mapping[str, tuple[str, ...]]) -> None:
        """In the order given. Rows are only moved when the set of them changes, and the cursor stays on its rollout."""
        table = self.table
        if list(rows) != list(self._rows):
            here = self._selected()
            table.clear()
            for key, cells in rows.items():
                table.add_row(*_style_cells(cells), key=key)
            if here in rows:
                table.move_cursor(row=table.get_row_index(here))
        else:
            for key, cells in rows.items():
                for name, old, new in zip(COLUMNS, self._rows[key], cells, strict=True):
                    if old != new:
                        table.update_cell(key, name, _style_cells(cells)[COLUMNS.index(name)])
        self._rows = dict(rows)

    def _selected(self) -> str:
        """The rollout under the cursor, or nothing."""
        names = list(self._rows)
        return names[self.table.cursor_row] if 0 <= self.table.cursor_row < len(names) else ""

    # keys

    def action_move(self, by: int) -> None:
        self.table.move_cursor(row=self.table.cursor_row + by)

    def action_next_failure(self) -> None:
        """Downwards from the cursor, then from the top."""
        names, at = list(self._rows), self.table.cursor_row
        for index in (*range(at + 1, len(names)), *range(at + 1)):
            if names[index] in self._failed:
                self.table.move_cursor(row=index)
                return

    async def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        await self.action_open()

    async def action_open(self) -> None:
        here = self._selected()
        if here and here in self._rows:
            self.push_screen(RolloutScreen(await self._text(here)))

    async def _text(self, rollout_id: str) -> str:
        events = await self._store.events(rollout_id=rollout_id)
        if rollout_id in self.flying:
            lines = [f"{stored.event.name} {stored.event.fields}" for stored in events]
            return printable("\n".join([f"rollout {rollout_id} is under way", *lines]))
        return ShownRollout(await self._store.get_rollout(rollout_id), events).text("all")


def _running_cells(one: RunningRollout) -> tuple[str, ...]:
    number = "" if one.attempt is None else str(one.attempt)
    return (one.task or one.id, number, one.agent, one.policy or "-", one.stage, "", "", "", "", "")


def _cells(row: RolloutRow) -> tuple[str, ...]:
    tokens = (row.prompt_tokens or 0) + (row.completion_tokens or 0)
    return (
        row.task_id,
        str(row.attempt),
        row.agent,
        row.policy or "-",
        row.status,
        "none" if row.reward is None else f"{row.reward:g}",
        str(row.calls),
        str(tokens),
        f"{row.wall_s:.1f} s",
        row.boundary or "",
    )


def _style_cells(cells: tuple[str, ...]) -> list[Text]:
    kinds: dict[int, Any] = {}
    if cells[5] == "":
        kinds[4] = _LIVE
    elif cells[9]:
        kinds[4] = kinds[9] = _BAD
    if cells[5] not in ("", "none"):
        kinds[5] = _GOOD if float(cells[5]) >= 1 else _BAD if float(cells[5]) <= 0 else ""
    return [Text(printable(cell), style=kinds.get(index, "")) for index, cell in enumerate(cells)]


def _head(info: RunInfo, flying: int) -> str:
    owed = info.attempts.get("owed", 0) + info.attempts.get("leased", 0)
    mean = "-" if info.mean_reward is None else f"{info.mean_reward:.3f}"
    state = "finished" if info.finished else f"{flying} in flight, {owed} to do"
    return f"run {info.id}   {info.rollouts} done, {state}   mean reward {mean} over {info.scored} scored"
