"""The first hour of a stranger, on a terminal: every verb is started as a person starts it, and read as a person reads it."""

from pathlib import Path

import pytest

from tests.cli.terminal import on_terminal

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "examples" / "tasks"
SCRIPTED = f"scripted:{ROOT / 'examples' / 'scripts' / 'bug-fix.yaml'}"
RUN = ("run", TASKS, "--filter", "bug-fix", "--agent", "shell-agent")

LOOKS = {
    "80 columns in colour": {"columns": 80},
    "80 columns without colour": {"columns": 80, "NO_COLOR": "1"},
    "160 columns in colour": {"columns": 160},
    "a terminal that cannot move its cursor": {"columns": 80, "TERM": "dumb"},
}
looks = pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())


def assert_readable(shown, code=0):
    assert shown.code == code, shown.screen
    assert "Traceback" not in shown.written, shown.screen
    assert shown.wide_lines == [], shown.screen


@looks
def test_a_run_shows_each_attempt_and_a_report_that_fit(tmp_path, look):
    shown = on_terminal(*RUN, "--policy", SCRIPTED, "--attempts", "2", "--store", "a.db", cwd=tmp_path, **look)
    assert_readable(shown)
    assert shown.screen.count("bug-fix  #") == 2 and "completed  reward 1" in shown.screen
    assert "1 tasks, 2 attempts, 2 scored" in shown.screen
    assert "rollyard show run_" in shown.screen and "--store a.db" in shown.screen
    assert shown.coloured == ("NO_COLOR" not in look and "TERM" not in look)
    assert "in flight" not in shown.screen  # what was drawn while it went on is gone
