"""Each machine of `make portability`: the level that it is known for, and one rollout that ends with its reward."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests import portability

ORDINARY = ("namespaces barred, ordinary user",)
ROWS = [
    pytest.param(machine, id=machine.name, marks=() if machine.name in ORDINARY else pytest.mark.slow)
    for machine in portability.MACHINES
]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root makes other machines here")
@pytest.mark.parametrize("machine", ROWS)
def test_a_rollout_ends_with_its_reward_on(machine):
    if machine.version is not None and portability.find_python(machine.version) is None:
        pytest.skip(f"there is no Python {machine.version} on this machine")
    with tempfile.TemporaryDirectory(prefix="ry-machine-", dir="/var/tmp") as home:
        found = portability.attempt(machine, Path(home))
    assert found.reward == 1.0, found
    assert found.level in machine.levels


def test_every_machine_stands_in_the_docs():
    text = (portability.ROOT / "docs/local-sandbox.md").read_text()
    assert [machine.name for machine in portability.MACHINES if f"| {machine.name} |" not in text] == []
