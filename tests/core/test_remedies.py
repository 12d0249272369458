"""docs/troubleshooting.md is made from the errors and their remedies. `python tests/core/test_remedies.py` writes it again."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

from rollyard.core import errors
from rollyard.core.remedies import REMEDIES, remedy_of
from rollyard.core.rollout import Failure, Rollout
from rollyard.core.task import Task
from rollyard.runs.report.why import explain

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
HEAD = """# Troubleshooting

Every error by its name, with its cause and what to do. The name is what `rollyard why`, a failure's `cause`, `--json`
and Python show. Made from the tree of errors (`rollyard/core/errors.py`) and `rollyard/core/remedies.py`; `python
tests/core/test_remedies.py` writes it again, and a test fails when it is stale.

Start with `rollyard why last`, which says the same for your own rollouts with the evidence, and `rollyard doctor`,
which tries this machine. Exit codes of every verb: 0 success, 1 rollouts failed, 2 the command or a file is wrong (a
`ConfigError`), 3 infrastructure (all others), 130 Ctrl-C, 143 SIGTERM.

"Again" says what Rollyard does by itself: **safe**: tries again; **if idempotent**: repeats only what may be
repeated; **reattach**: goes on where it was; **gone**: needs a new sandbox or session; **timeout**,
**configuration**, **never**: does not.

## In the first hour

| you see | do |
|---|---|
| a sandbox cannot be opened | `rollyard doctor`: it names the kernel setting or package, with the command |
| an agent is not installed | it is, on first use, with npm or pip; `rollyard run --prebaked` takes the one in the image |
| the model server answers 404 | its address lacks or doubles `/v1`: `rollyard doctor --base-url URL` |
| the model server answers 401 | `--key-env NAME`, or `key_env=NAME` behind `#` for one policy of several |
| every reward is 0 | `rollyard check tasks FOLDER`: does the solution pass? then `rollyard why last` |
| a rollout has no reward | it failed before it was judged: `rollyard why last` names the boundary |
| no training rows | `rollyard export last --format samples --out rows.jsonl` lists the reasons in `rows.jsonl.refused.jsonl` |
"""


@cache
def classes():
    """Every error of ours, in the tree and beside it: found in the source, so that none is missed because it was not imported."""
    known = dict.fromkeys(name for name, value in vars(errors).items() if is_error(value))
    places = {
        path: ast.parse(path.read_text())
        for path in sorted((ROOT / "rollyard").rglob("*.py"))
        if "inside" not in path.parts
    }
    beside = {}
    for path, tree in places.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} & {
                *known,
                "RollyardError",
            }:
                beside.setdefault(node.name, ".".join(path.relative_to(ROOT).with_suffix("").parts))
    return {name: getattr(importlib.import_module(module), name) for name, module in beside.items()} | {
        "Error": errors.Error
    }


def is_error(value):
    return isinstance(value, type) and issubclass(value, errors.Error)


def code(error):
    said = vars(error).get("code")
    return f"`{said}` ({error.status})" if isinstance(said, str) else ""


def render():
    found = classes()
    title = {
        None: "Input, and errors without a boundary",
        **{word: f"Boundary: {word}" for word in errors.Boundary.__args__},
    }
    sections = {name: [] for name in (*title.values(), "Control plane")}
    for name in REMEDIES:
        error = found[name]
        section = "Control plane" if issubclass(error, errors.PlaneError) else title[error.boundary]
        sections[section].append(error)
    parts = [HEAD]
    for section, those in sections.items():
        parts.append(f"\n## {section}\n")
        for error in those:
            cause, remedy = REMEDIES[error.__name__]
            wire = f" On the wire: {code(error)}." if code(error) else ""
            shown = remedy.format(id="ROLLOUT", run="RUN", sandbox="BACKEND")
            shown = re.sub(r"docs/([\w/-]+\.md)", r"[\1](\1)", shown)
            parts.append(f"### {error.__name__}\n")
            parts.append(f"{cause}{wire} Again: {error.retry.replace('_', ' ')}.\n\n{shown}\n")
    return "\n".join(parts)


def test_every_error_has_a_cause_and_a_remedy():
    assert sorted(REMEDIES) == sorted(classes())


def test_the_page_is_what_the_errors_say():
    assert PAGE.read_text() == render(), "docs/troubleshooting.md is stale: run `python tests/core/test_remedies.py`"


@pytest.mark.parametrize(
    ("cause", "boundary", "wanted"),
    [("UpstreamError", "policy", "look at `key_env`"), ("OSError", "sandbox", "`rollyard doctor --sandbox docker`")],
)
def test_why_says_what_the_page_says(cause, boundary, wanted):
    failure = Failure(
        boundary=boundary, cause=cause, message="no", stage="open", retry=True, grade=False, trainable=False
    )
    rollout = Rollout(
        id="r1", run_id="run1", agent="pi", sandbox="docker", status="infra_error", failure=failure,
        task=Task(id="t", instruction="x"),
    )  # fmt: skip
    said = explain(rollout).remedy
    assert wanted in said and "run1" in said and "{" not in said
    assert said.startswith(remedy_of(cause, boundary).partition("{")[0])


if __name__ == "__main__":
    PAGE.write_text(render())
