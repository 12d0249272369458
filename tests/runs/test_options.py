"""An option of a rollout is declared in one file, and is then everywhere: command line, TOML, requests, the page's form."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest

from rollyard.core.errors import ConfigError
from rollyard.core.limits import Limits
from rollyard.core.task import McpServer
from rollyard.runs.coding_request import CodingOptions, request_of
from rollyard.runs.rollout.options import (
    OPTIONS,
    RolloutFields,
    RolloutOptions,
    merge_options,
    read_options,
    write_options,
)

ROOT = Path(__file__).parents[2]

# Run with a copy of the package in which nothing but options.py has one field more.
LOOK = """
import asyncio, sys
import typer
from rollyard.cli.eval import app as evaluate
from rollyard.cli.run import app as run
from rollyard.page.actions import LocalActions
from rollyard.page.rendering import environment
from rollyard.runs.coding_request import CodingOptions, RolloutRequest, request_of
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.runs.run.config import load

for app in (run, evaluate):
    flags = [flag for param in typer.main.get_command(app).params for flag in param.opts]
    assert "--probe" in flags, flags
open(sys.argv[1], "w").write("tasks = 'x'\\nprobe = 7\\n")
assert load(sys.argv[1]).probe == 7
request = request_of({"instruction": "x", "probe": 8})
assert request.probe == 8 and request.arguments(CodingOptions(probe=3))["probe"] == 8
assert request_of({"instruction": "x"}).arguments(CodingOptions(probe=3))["options"].probe == 3
actions = LocalActions(None, None)
template = environment().get_template("start.html")
fields = {"form": {"probe": "9"}, "problem": None, "command": None, **actions.choices()}
page = "".join(template.blocks["main"](template.new_context(fields)))
assert 'name="probe" value="9" placeholder="a probe"' in page, page
assert "--probe 9" in actions.command({"instruction": "x", "agent": "nop", "probe": "9"})
done = asyncio.run(run_rollout("x", agent="nop", probe=4, verify="true"))
assert done.reward == 1.0
"""


def test_a_new_option_is_one_file(tmp_path):
    shutil.copytree(ROOT / "rollyard", tmp_path / "rollyard", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "rollyard/runs/rollout/options.py"
    field = (
        '    seed: Annotated[int | None, _help("seed of the first attempt; the next one has the next number")] = None\n'
    )
    assert field in file.read_text()
    probe = '    probe: Annotated[int | None, _help("a probe")] = None\n'
    file.write_text(file.read_text().replace(field, field + probe))
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(tmp_path / "run.toml")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_keywords_are_the_fields():
    assert list(get_type_hints(RolloutFields)) == list(OPTIONS) == list(RolloutOptions.__struct_fields__)


WRITTEN = {
    "model": "m",
    "seed": 0,
    "disable_thinking": True,
    "direct": False,
    "network": "allow:a.b,127.0.0.1:80",
    "disabled_tools": ("bash", "web"),
    "labels": {"a": "b=c"},
    "limits": Limits(agent=5),
    "mcp": (McpServer(name="m", url="http://127.0.0.1:1/mcp"),),
    "min_isolation": "container",
    "system_prompt": "",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_read_again(name):
    words = write_options({name: WRITTEN[name]})
    option = OPTIONS[name]
    if option.kind == "flag":
        value = words == [option.flag]
    else:
        assert set(words[::2]) == {option.flag}
        value = words[1::2] if option.kind == "lines" else words[1]
    assert read_options({name: value}) == {name: WRITTEN[name]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels", ["plain"]),
        ("limits", ["agents=5"]),
        ("limits", ["agent=long"]),
        ("min_isolation", "strong"),
        ("seed", "x"),
    ],
)
def test_a_text_that_is_no_such_option_is_refused_by_its_flag(name, text):
    with pytest.raises(ConfigError, match=OPTIONS[name].flag):
        read_options({name: text})


@pytest.mark.parametrize(("name", "said"), [("sleep_after", "is no number"), ("seed", "is no whole number")])
def test_a_text_that_is_no_number_is_told_in_plain_words(name, said):
    with pytest.raises(ConfigError) as refused:
        read_options({name: "abc"})
    assert refused.value.message == f"{OPTIONS[name].flag}: 'abc' {said}"


def test_keywords_stand_over_the_value_and_none_is_the_default():
    base = RolloutOptions(model="a", seed=3, disabled_tools=("bash",))
    merged = merge_options({"model": "b", "seed": 0, "labels": None, "disabled_tools": ["web"]}, base)
    assert merged == RolloutOptions(model="b", seed=0, disabled_tools=("web",))
    assert msgspec.to_builtins(RolloutOptions()) == {}


@pytest.mark.adversarial
@pytest.mark.parametrize(
    "asked",
    [{"agent": "/srv/agent.toml"}, {"agent": "rollyard.train.tiny:nothing"}, {"image": "/etc"}, {"image": "~root"}],
    ids=str,
)
def test_a_client_of_the_coding_environment_names_no_file_and_no_module_of_the_server(asked):
    served = CodingOptions(agent="nop", clients_choose=True)
    with pytest.raises(ConfigError, match="no agent named|an image has a name"):
        request_of({"instruction": "x", **asked}).arguments(served)
    own = CodingOptions(agent="./mine.toml")  # what the server was started with
    assert request_of({"instruction": "x", "agent": "./mine.toml"}).arguments(own)["agent"] == "./mine.toml"
