"""Names to things, by entry points."""

import subprocess
import sys

import pytest

from rollyard.core import registry
from rollyard.core.errors import UnknownName

SECOND_LOOK = """
import sys
from rollyard.core import registry

registry.load("rollyard.verifiers", "commands")
opened = []
sys.addaudithook(lambda event, details: opened.append(str(details[0])) if event == "open" else None)
registry.load("rollyard.verifiers", "commands")
print(len([path for path in opened if path.endswith("entry_points.txt")]))
"""


def test_a_second_look_reads_no_package_again():
    done = subprocess.run([sys.executable, "-c", SECOND_LOOK], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "0"


def test_a_package_that_comes_onto_the_path_later_is_found(tmp_path, monkeypatch):
    with pytest.raises(UnknownName):
        registry.load("rollyard.agents", "latecomer")
    info = tmp_path / "latecomer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: latecomer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollyard.agents]\nlatecomer = json:loads\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.load("rollyard.agents", "latecomer")("1") == 1
