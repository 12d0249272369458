"""`rollyard watch` as a table, driven by keys through textual's pilot; and what is shown where textual is not."""

from __future__ import annotations

import subprocess
import sys

import anyio
import msgspec
import pytest

import rollyard as ry
from bench.page import fill
from rollyard.core.task import Task

pytest.importorskip("textual", reason="textual (the extra tui) is not installed")
pytestmark = pytest.mark.anyio


async def test_keys_move_find_failures_and_open_a_rollout(tmp_path):
    from rollyard.runs.display.watch_screen import RolloutScreen, WatchApp

    async with ry.Store.open(tmp_path / "runs.db") as store:
        run_id, _ = await fill(store, 80, 2)
        rows = sorted(await store.lines(run_id), key=lambda row: -row.started_at)
        failed = [index for index, row in enumerate(rows) if row.boundary is not None]
        app = WatchApp(store, run_id)
        async with app.run_test(size=(160, 40)) as pilot:
            await pilot.pause()
            assert app.table.row_count == 80
            assert app.finished
            await pilot.press("j", "j", "k")
            assert app.table.cursor_row == 1
            seen = []
            for _ in range(len(failed) + 1):
                await pilot.press("f")
                seen.append(app.table.cursor_row)
            assert seen == [index for index in failed if index > 1] + [i for i in failed if i <= 1] + seen[:1]
            await pilot.press("enter")
            await pilot.pause()
            assert isinstance(app.screen, RolloutScreen)
            assert rows[failed[0]].id in app.screen.text
            assert "failed at sandbox" in app.screen.text
            await pilot.press("j", "k", "u")
            assert app.table.cursor_row == failed[0]


async def test_what_is_in_flight_stands_first_and_moves_down_when_it_ends(tmp_path):
    from rollyard.runs.display.watch_screen import WatchApp

    policy = ry.policy.scripted({"steps": [{"text": "done"}]})
    held = anyio.Event()

    async def answer(call):
        await held.wait()
        return await policy(call)

    class Held:
        __call__ = staticmethod(answer)
        closed, aclose = policy.closed, policy.aclose

    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(Held(), log=store) as gate:
        tasks = [Task(id="t0", instruction="x"), Task(id="[red]t1[/red]", instruction="x")]
        async with ry.sandbox.backend("local") as backend:
            async with ry.Run(tasks, agent="shell-agent", sandbox=backend, gate=gate, store=store, parallel=1) as run:
                app = WatchApp(store, run.id)
                async with app.run_test(size=(160, 30)) as pilot:
                    with anyio.fail_after(60):
                        while not app.flying:
                            await pilot.pause(0.1)
                    assert app.table.row_count == 1
                    assert str(app.table.get_cell_at((0, 0))) == "t0"
                    await pilot.press("enter")
                    await pilot.pause()
                    assert "is under way" in app.screen.text
                    await pilot.press("escape")
                    held.set()
                    with anyio.fail_after(60):
                        while not app.finished:
                            await pilot.pause(0.1)
                    assert app.flying == {}
                    assert {str(app.table.get_cell_at((row, 0))) for row in range(2)} == {"t0", "[red]t1[/red]"}


def test_a_run_that_is_over_is_printed_line_by_line_to_a_pipe(tmp_path):
    async def prepare():
        async with ry.Store.open(tmp_path / "runs.db") as store:
            await fill(store, 5, 1)

    anyio.run(prepare)
    command = [sys.executable, "-m", "rollyard", "watch", "run_bench", "--store", str(tmp_path / "runs.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("group/task-0000") == 5
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120, check=True)
    lines = [msgspec.json.decode(line) for line in done.stdout.splitlines()]
    assert sum("rollout" in line for line in lines) == 5


@pytest.mark.parametrize(
    ("there", "tty", "style"), [(True, True, "table"), (False, True, "rich"), (True, False, "plain")]
)
def test_without_textual_a_terminal_gets_riches_display(there, tty, style):
    hidden = "" if there else "sys.modules['textual'] = None; "
    code = f"import sys; {hidden}from rollyard.runs.display.watch import choose_style; print(choose_style('auto', tty={tty}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == style


def test_asking_for_the_table_without_textual_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['textual'] = None; import rollyard.runs.display.watch_screen"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "rollyard[tui]" in done.stderr
