"""`rollyard demo` as a stranger runs it: with nothing but the wheel, and where its agent cannot be installed."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROLLYARD = str(Path(sys.executable).with_name("rollyard"))


def demo(tmp_path, *words, **env):
    env = {**os.environ, "ROLLYARD_HOME": str(tmp_path / "home"), "ROLLYARD_CACHE": str(tmp_path / "cache"), **env}
    env.pop("ROLLYARD_STORE", None)
    return subprocess.run(
        [ROLLYARD, "demo", *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )


def test_it_solves_its_task_without_a_network_and_says_where_to_look(tmp_path):
    done = demo(tmp_path, http_proxy="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "the agent runs shell: sed -i 's/World/Rollyard/' greeting.txt" in done.stdout
    assert "completed, reward 1, 3 model calls" in done.stdout and "+Hello, Rollyard!" in done.stdout
    assert "now look:  rollyard view\n" in done.stdout
    shown = subprocess.run([ROLLYARD, "list", "demo", "--json"], cwd=tmp_path, capture_output=True, text=True)
    assert [row["reward"] for row in json.loads(shown.stdout)["rows"]] == [1.0]


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
@pytest.mark.slow
def test_an_agent_that_cannot_be_installed_is_told_like_every_other_failure(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        registry = f"http://127.0.0.1:{probe.getsockname()[1]}/"
    done = demo(tmp_path, "--agent", "pi", "--store", "mine.db", npm_config_registry=registry)
    assert done.returncode == 3, done.stderr
    assert "infra_error, no reward" in done.stdout
    assert "failed at sandbox in install: agent 'pi' could not be installed" in done.stdout
    assert f"ECONNREFUSED: FetchError: request to {registry}" in done.stdout
    assert "check the names and that npm reaches its registry" in done.stdout
    assert "rollyard demo --agent shell-agent" in done.stdout
    assert "--store mine.db" in done.stdout
