"""Every `rollyard ...` that a page prints names a verb and options that there are; and every page with commands or programs has a
test that runs them, named here."""

import importlib
import re
import shlex

import pytest
import typer

from rollyard.cli.main import VERBS, app
from tests.test_docs import PAGES, ROOT

# page: the test that runs what it prints. What other pages print is only looked at, by the test below.
RUN_BY = {
    "README.md": "tests.test_readme",
    "CONTRIBUTING.md": "tests.test_makefile",
    "docs/add-an-agent.md": "tests.agents.test_docs",
    "docs/agents.md": "tests.test_page_commands",
    "docs/branching.md": "tests.agents.test_branching",
    "docs/compatible-apis.md": "tests.plane.test_compatible_apis_docs",
    "docs/control-plane.md": "tests.plane.test_docs",
    "docs/environments.md": "tests.envs.test_docs",
    "docs/evaluation.md": "tests.runs.test_docs",
    "docs/own-agent.md": "tests.test_guides",
    "docs/own-task.md": "tests.test_guides",
    "docs/page.md": "tests.test_page_commands",
    "docs/policies.md": "tests.test_page_commands",
    "docs/quickstart.md": "tests.test_guides",
    "docs/remote-environments.md": "tests.envs.test_remote_example",
    "docs/rl-in-50-lines.md": "tests.test_guides",
    "docs/rollouts-over-http.md": "tests.train.test_rollouts_docs",
    "docs/running-a-plane.md": "tests.plane.test_operators",
    "docs/tasks.md": "tests.tasks.test_docs",
    "docs/tokens.md": "tests.test_page_commands",
    "docs/two-models.md": "tests.test_guides",
    "docs/users.md": "tests.test_page_commands",
    "docs/verifiers.md": "tests.tasks.test_docs",
}
FENCE = re.compile(r"```[^\n]*\n(.*?)```", re.S)


def commands(text):
    """Lines of blocks, and what stands between backticks; without comments, and with continued lines joined."""
    blocks = FENCE.findall(text)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    for line in lines:
        found = re.match(r"(?:\$ |[A-Z_]+=\S+ )*rollyard ([a-z].*)", line.strip())
        if found and " ready at " not in line and (words := split(found[1])) and re.fullmatch(r"[a-z]+", words[0]):
            yield words


def split(line):
    try:
        return shlex.split(re.split(r" [|>&;]|&&| #|  ", line)[0], comments=True)
    except ValueError:  # words of a sentence
        return []


def check(words):
    verb = typer.main.get_command(app).get_command(None, words[0])
    below, rest = getattr(verb, "commands", {}), words[1:]
    if below and rest and re.fullmatch(r"[a-z-]+(?:\|.*)?", rest[0]):
        assert rest[0] in below, f"rollyard {words[0]} {rest[0]}"
        verb, rest = below[rest[0]], rest[1:]
    known = {option for one in verb.params for option in (*one.opts, *one.secondary_opts)} | {"--help", "-h"}
    for word in rest:
        option = word.partition("=")[0]
        assert not re.fullmatch(r"--[a-z][a-z-]*", option) or option in known, f"{shlex.join(words)}: {option}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "cli.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_a_page_prints_exist(page):
    for words in commands(page.read_text()):
        assert words[0] in VERBS, words
        check(words)


def test_a_command_that_does_not_exist_is_seen():
    (words,) = commands("```sh\nrollyard run x --atempts 3  # three\n```")
    with pytest.raises(AssertionError, match="--atempts"):
        check(words)
    with pytest.raises(AssertionError, match="plane fly"):
        check(["plane", "fly"])


def test_every_page_by_job_has_a_test_that_runs_it():
    for page, module in RUN_BY.items():
        assert (ROOT / page).exists(), page
        assert importlib.util.find_spec(module) is not None, module
    guides = {
        str(page.relative_to(ROOT)) for page in PAGES if re.search(r"^```\w+ title=", page.read_text(), re.MULTILINE)
    }
    assert guides <= set(RUN_BY)
