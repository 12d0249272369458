"""What each target would install on a fresh machine, as make itself says it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def commands(target, tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    words = ["make", "--dry-run", target, f"VENV={tmp_path / 'fresh'}"]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_demo_installs_the_runtime_and_nothing_else(tmp_path):
    wanted = commands("demo", tmp_path)
    assert "--editable .\n" in wanted and "rollyard demo --agent pi" in wanted
    assert "requirements-dev" not in wanted and "system-packages tests" not in wanted and "torch" not in wanted


def test_the_ordinary_suite_does_not_install_torch(tmp_path):
    wanted = commands("test", tmp_path)
    assert "-r requirements-dev.txt" in wanted and "system-packages tests" in wanted and "pytest" in wanted
    assert " torch" not in wanted and "torch" not in (ROOT / "requirements-dev.txt").read_text().splitlines()


def test_programs_of_a_recipe_keep_what_they_compile():
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    words = ["make", "--eval=show: ; @env", "show"]
    assert (
        "PYTHONDONTWRITEBYTECODE"
        not in subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    )


@pytest.mark.parametrize("target", ["check", "train", "test-slow"])
def test_targets_that_use_torch_install_it(target, tmp_path):
    assert "-c constraints.txt torch\n" in commands(target, tmp_path)


def test_workers_of_the_suite_share_what_a_group_makes(tmp_path):
    """A version of pytest that keeps pytest-xdist from seeing groups costs a third of the suite's time, in silence."""
    (tmp_path / "test_one.py").write_text(
        "import pytest\n@pytest.mark.xdist_group('shared')\n@pytest.mark.parametrize('n', range(4))\ndef test_one(n): pass\n"
    )
    words = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-v", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    workers = {line.split("]")[0] for line in done.stdout.splitlines() if "PASSED" in line}
    assert len(workers) == 1, done.stdout
