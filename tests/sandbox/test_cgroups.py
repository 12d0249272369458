"""The group that holds all sandboxes of a machine."""

import os
from pathlib import Path

import pytest

from rollyard.sandbox.local import cgroups

FILES = {1: ("cpu.shares", 1024, "cpu"), 2: ("cpu.weight", 100, "")}


def test_all_sandboxes_together_have_the_share_of_one_process_on_every_processor():
    tree = next((tree for tree in cgroups.find().hierarchies if "cpu" in tree.controllers), None)
    if tree is None:
        pytest.skip("no group with a share of the processors can be made here")
    name, one, controller = FILES[tree.version]
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    if not any(controller in names.split(",") and path == "/" for _, names, path in own):
        pytest.skip("this process is in a group of its own, which competes with ours as a whole")
    share = Path(tree.root, name)
    share.write_text(str(one))  # as a group is made
    cgroups.find()
    assert int(share.read_text()) == one * os.cpu_count()
