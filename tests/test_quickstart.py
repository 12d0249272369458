"""docs/quickstart.md, top to bottom, as a reader would type it."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "quickstart.md").read_text()
SAVED = {"toml": "eval.toml"}


@pytest.mark.agent
def test_every_command_of_the_quickstart_does_what_the_page_says(tmp_path):
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(words):
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout

    ran = []
    for language, text in re.findall(r"```(\w+)\n(.*?)```", PAGE, re.S):
        if language in SAVED:
            (tmp_path / SAVED[language]).write_text(text)
        elif language == "python":
            assert run([sys.executable, "-c", text]).strip() == "completed 1.0 1"
        else:
            assert language == "sh"
            for line in text.splitlines():
                run(shlex.split(line))
                ran.append(shlex.split(line)[1])
    verbs = "doctor demo init check init run list list show check grep why eval export"
    assert ran == verbs.split()
    assert (tmp_path / "report" / "report.html").exists()
    rows = [msgspec.json.decode(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert rows and all(row["reward"] == 1.0 and row["input_ids"] for row in rows)
