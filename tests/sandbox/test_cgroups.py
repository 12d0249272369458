"""The group that holds all sandboxes of a machine."""

import os
import subprocess
import sys
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


def test_the_memory_of_the_group_that_this_process_is_in_is_what_it_has():
    """As in a container that may make no groups, where sandboxes stay in its own."""
    tree = next((tree for tree in cgroups.find().hierarchies if "memory" in tree.controllers), None)
    if tree is None:
        pytest.skip("no group with a memory limit can be made here")
    group = Path(tree.root, f"own-{os.getpid()}")
    group.mkdir()
    try:
        Path(group, {1: "memory.limit_in_bytes", 2: "memory.max"}[tree.version]).write_text(str(600 * 2**20))
        code = "import sys; from pathlib import Path; Path(sys.argv[1], 'cgroup.procs').write_text('0')\n"
        code += "from rollyard.sandbox.local import cgroups; from rollyard.sandbox.local.memory import MachineMemory\n"
        code += "own = cgroups.find_bounds(cgroups.Cgroups()); assert own == cgroups.find_own()\n"
        code += "use = MachineMemory(groups=own).read({}); print(use.total >> 20, use.available < use.total)"
        command = [sys.executable, "-c", code, group]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        group.rmdir()
    assert cgroups.find_bounds(cgroups.find()) == (str(Path(tree.root).parent),)
    assert done.stdout.split() == ["600", "True"], done.stderr
