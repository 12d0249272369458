"""What a process owns is deleted with it: at exit, without a loop, in batches, and what stays is named. A sandbox is a file here,
so that another process can see which are left."""

import subprocess
import sys

import anyio
import pytest

from rollyard.core.errors import SandboxError
from rollyard.sandbox.teardown import Owned, delete_all, not_deleted, one_by_one

PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from rollyard.sandbox.teardown import Owned, one_by_one
place = Path(sys.argv[1])

def delete(name, seconds):
    if name == "stuck":
        return False
    (place / name).unlink()
    return True

owned = Owned("files", one_by_one(delete))
for path in place.iterdir():
    owned.add(path.name)
"""


def left_after(program, place, names):
    place.mkdir()
    for name in names:
        (place / name).touch()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program, str(place)], capture_output=True, text=True, timeout=60
    )
    return sorted(path.name for path in place.iterdir()), done


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "sys.exit(3)",
        "raise ValueError('a crash')",
        "raise KeyboardInterrupt",
        "async def main():\n    raise ValueError\nasyncio.run(main())",
        "os.kill(os.getpid(), 2)",
    ],
)
def test_what_was_not_closed_is_deleted_when_the_process_exits(tmp_path, ending):
    left, done = left_after(ending, tmp_path / "boxes", [f"b{n}" for n in range(20)])
    assert left == [], done.stderr


def test_what_could_not_be_deleted_at_exit_is_named(tmp_path):
    left, done = left_after("", tmp_path / "boxes", ["a", "stuck", "z"])
    assert left == ["stuck"]
    told = done.stdout + done.stderr
    assert "left_behind" in told and "stuck" in told and "rollyard clean --backend files" in told


def test_a_forked_child_that_exits_deletes_nothing_of_its_parent(tmp_path):
    program = """
if os.fork() == 0:
    sys.exit(0)
os.wait()
print(len(list(place.iterdir())))
"""
    left, done = left_after(program, tmp_path / "boxes", ["a", "b"])
    assert (left, done.stdout) == ([], "2\n")


def test_deleting_goes_in_batches_of_a_hundred_and_forgets_only_what_is_gone():
    seen = []

    def delete(batch, seconds):
        seen.append(len(batch))
        return [name for name in batch if name.endswith("7")]

    owned = Owned("none", delete)
    for n in range(250):
        owned.add(f"b{n}")
    left = owned.delete_now()
    assert seen == [100, 100, 50]
    assert left == list(owned) == [f"b{n}" for n in range(250) if n % 10 == 7]
    for name in left:
        owned.discard(name)


def test_a_deadline_that_is_over_leaves_the_rest_alone():
    asked = []
    assert one_by_one(lambda name, seconds: asked.append(name) or True)(["a", "b"], 0.0) == ["a", "b"]
    assert asked == []


@pytest.mark.anyio
async def test_one_that_cannot_be_deleted_keeps_no_other_from_being_tried():
    running, most, gone = 0, 0, set()

    async def delete(name):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await anyio.sleep(0)
        running -= 1
        if name == "b3":
            raise SandboxError("the server said no")
        gone.add(name)

    left = await delete_all([f"b{n}" for n in range(250)], delete)
    assert (list(left), len(gone), most) == (["b3"], 249, 100)
    error = not_deleted(left)
    assert "b3" in str(error) and "the server said no" in str(error)
