"""`examples/demo.py` as a stranger runs it, where its agent cannot be installed."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_an_agent_that_cannot_be_installed_is_told_like_every_other_failure(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        registry = f"http://127.0.0.1:{probe.getsockname()[1]}/"
    env = {name: value for name, value in os.environ.items() if not name.lower().startswith("npm_config_")}
    env |= {"npm_config_registry": registry, "ROLLYARD_CACHE": str(tmp_path / "cache"), "ROLLYARD_HOME": str(tmp_path)}
    command = [sys.executable, str(ROOT / "examples" / "demo.py")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 3, done.stderr
    assert done.stderr == ""
    assert "status infra_error, reward None" in done.stdout
    assert "failed at sandbox (AgentInstallFailed, in install): agent 'pi' could not be installed" in done.stdout
    assert f"ECONNREFUSED: FetchError: request to {registry}" in done.stdout
    assert "check the names and that npm reaches its registry" in done.stdout
    assert "make demo AGENT=shell-agent" in done.stdout
    assert f"--store {tmp_path / 'runs.db'}" in done.stdout
