"""Venvs for tests: made aside and renamed, with programs that start from where they ended up."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rollyard.core.errors import ConfigError
from tests.servers.venvs import make_venv, venv_path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index of one package with one program, and a cache of its own."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "greeter-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("greeter.py", "def main(): print('hello')\n")
        wheel.writestr("greeter-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n")
        wheel.writestr("greeter-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("greeter-1.0.dist-info/entry_points.txt", "[console_scripts]\ngreet = greeter:main\n")
        wheel.writestr("greeter-1.0.dist-info/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    for name, value in {**settings, "ROLLYARD_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)


def test_processes_that_want_the_same_venv_share_one_and_its_programs_start(index):
    ask = "from tests.servers.venvs import make_venv; print(make_venv('greeter', ['greeter==1.0']))"
    asking = [subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (process.communicate(timeout=120)[0].strip() for process in asking)
    assert first == second == str(venv_path("greeter", ["greeter==1.0"]) / "bin" / "python")
    program = Path(first).with_name("greet")
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout == "hello\n"


def test_what_cannot_be_installed_is_said_in_pips_words_and_leaves_nothing(index):
    with pytest.raises(ConfigError, match="absent-.* cannot be made here: .*No matching distribution found for absent"):
        make_venv("absent", ["absent==9"])
    assert [path.name for path in venv_path("x").parent.iterdir()] == [".locks"]
