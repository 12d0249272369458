"""The table of session semantics in docs/trainers.md: every public name has a row, every row has tests, and these exist."""

import ast
import re
from pathlib import Path

from rollyard.train.openenv_harness import RolloutHarness
from rollyard.train.openenv_session import OpenEnvSession, SessionFactory

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "trainers.md"


def rows():
    section = PAGE.read_text().partition("| method | what it does | tests |")[2].partition("\n\n")[0]
    return [line.strip("|").split(" | ") for line in section.splitlines()[2:]]


def functions(file):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}


def test_every_method_of_a_session_is_in_the_table():
    named = set(re.findall(r"\b[a-z_]+", " ".join(row[0] for row in rows())))
    for kind in (SessionFactory, OpenEnvSession, RolloutHarness):
        assert {name for name in vars(kind) if not name.startswith("_")} <= named


def test_every_row_of_the_table_names_tests_that_exist():
    known = functions(HERE / "test_session.py") | functions(HERE / "foreign" / "openenv_side.py")
    for method, _, tests in rows():
        names = re.findall(r"`(\w+)`", tests)
        assert names and set(names) <= known, f"{method}: {set(names) - known}"
