"""What pages without a story print is run too: commands and programs that need no model, no cluster and no account."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import anyio
import pytest

import rollyard as ry

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.S)
USERS = ("--agent shell-agent", "--policy scripted:examples/users/assistant.yaml")


def blocks(page, language):
    return [body for kind, body in BLOCK.findall((ROOT / "docs" / page).read_text()) if kind == language]


def lines(page, start, *parts):
    """The commands of a page that begin so and hold these words."""
    found = [line for _, body in BLOCK.findall((ROOT / "docs" / page).read_text()) for line in body.splitlines()]
    found = [line for line in found if line.startswith(start) and all(part in line for part in parts)]
    assert found, (page, start)
    return [shlex.split(line, comments=True) for line in found]


def environment():
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run(words, cwd):
    done = subprocess.run(words, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def served(words, cwd):
    """A page's server on a spare port: what it said when it was ready, and the first page it shows."""
    line = [*words, "--json"]
    line[line.index("--port") + 1 : line.index("--port") + 2] = ["0"] if "--port" in line else []
    with subprocess.Popen(line, cwd=cwd, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            told = json.loads(server.stdout.readline())
            with urllib.request.urlopen(told["url"], timeout=30) as answer:
                return told, answer.read().decode()
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def talked(tmp_path_factory):
    """A folder with the examples and the run that docs/users.md prints."""
    folder = tmp_path_factory.mktemp("talked")
    (folder / "examples").symlink_to(ROOT / "examples")
    (words,) = lines("users.md", "rollyard run", *USERS)
    return folder, run(words, folder)


def test_a_simulated_user_and_its_rows(talked):
    folder, printed = talked
    assert "1 task, 1 attempt, 1 scored" in printed
    (words,) = lines("users.md", "rollyard export")
    run(["last" if word == "RUN" else word for word in words], folder)
    rows = (folder / "users.jsonl").read_text().splitlines()
    assert rows and all(json.loads(row)["reward"] is not None for row in rows)


def test_the_page_is_served_and_written_to_a_file(talked):
    folder, _ = talked
    reading, writing = lines("page.md", "rollyard view")
    assert "shell-agent" in served(reading, folder)[1]
    told, _ = served([*writing, "--port", "0"], folder)
    assert told["token"]
    (words,) = lines("page.md", "rollyard export")
    run(["last" if word == "RUN" else word for word in words], folder)
    assert "order-desk" in (folder / "run.html").read_text()


def test_agents_are_found_by_name_and_by_file(tmp_path, monkeypatch):
    run(["rollyard", "init", "agent", "my-agent"], tmp_path)
    monkeypatch.chdir(tmp_path)
    (body,) = blocks("agents.md", "python")
    for line in body.splitlines():
        if line.startswith("ry.") and "my_package" not in line:
            assert eval(line)  # noqa: S307 - our own page


def test_every_step_of_a_script_is_one_that_a_script_may_have(tmp_path):
    (body,) = blocks("policies.md", "yaml")
    (tmp_path / "script.yaml").write_text(body)
    assert ry.policy.scripted(str(tmp_path / "script.yaml")) is not None


@pytest.mark.parametrize("page", ["policies.md", "tokens.md"])
def test_a_policy_is_made_as_the_page_makes_it(page, monkeypatch):
    monkeypatch.setenv("PROVIDER_KEY", "sk-" + "x" * 20)
    made = []
    for body in blocks(page, "python"):
        names = {"ry": ry}
        text = re.sub(r'"path/to/\w+"', '"bytes"', body)
        for statement in ast.parse(text).body:
            if isinstance(statement, ast.Assign):
                exec(ast.unparse(statement), names)  # noqa: S102 - our own page
                made.append(names[statement.targets[0].id])
    policies = [one for one in made if hasattr(one, "aclose")]
    assert len(policies) >= 2
    for one in policies:
        anyio.run(one.aclose)
