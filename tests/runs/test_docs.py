"""The pages on evaluation, training and browsers say what the code does: their TOML loads, their verbs and options exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.runs.run.config import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("evaluation.md", "training.md", "browsers.md")] + [ROOT / "README.md"]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.S)


def test_the_example_evaluation_loads(tmp_path):
    (text,) = blocks(PAGES[0], "toml")
    (tmp_path / "eval.toml").write_text(text.replace("examples/", f"{ROOT}/examples/"))
    config = load(str(tmp_path / "eval.toml"))
    assert config.agents == ("pi", "codex")
    assert config.prices["small"].completion == 0.4
    assert config.concurrency == {"small": 4}


def commands():
    lines = [
        line.partition("#")[0].strip() for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()
    ]
    return sorted({line for line in lines if line.startswith("rollyard ")})


@pytest.mark.parametrize("line", commands())
def test_a_printed_command_names_a_verb_and_options_that_exist(line):
    words = shlex.split(line)[1:]
    verb = [words[0], *(words[1:2] if words[0] in ("check", "serve", "image", "init") else [])]
    done = subprocess.run(
        [sys.executable, "-c", "from rollyard.cli.main import main; main()", *verb, "--help"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for option in (word for word in words if word.startswith("--")):
        assert option in done.stdout, option
