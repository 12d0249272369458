"""Scratch directories end with their block, and those of a killed process with the next one's."""

import os
import signal
import subprocess
import sys

import anyio
import anyio.lowlevel
import pytest

from rollyard.core.scratch import async_scratch, scratch

CHILD = """
import os, sys, time
from rollyard.core.scratch import scratch
with scratch("drill") as place:
    (place / "closed").mkdir()
    (place / "closed" / "file").write_text("x")
    (place / "closed").chmod(0)
    print(place, flush=True)
    sys.stdin.read()
"""


MANY = """
import contextlib, os, sys
from rollyard.core.scratch import scratch
looks = []
with contextlib.ExitStack() as stack:
    for _ in range(50):
        stack.enter_context(scratch("many"))
    own = f"/proc/{os.getpid()}/stat"
    sys.addaudithook(lambda name, given: looks.append(given[0]) if name == "open" and str(given[0]) == own else None)
    stack.enter_context(scratch("next"))
print(len(looks))
"""


def test_a_process_with_many_directories_is_looked_for_once():
    looks = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True, check=True).stdout
    assert 1 <= int(looks) <= 2  # the sweep, and the name of the next one


def test_a_directory_is_private_empty_and_gone_after_its_block():
    with scratch("drill") as place:
        assert os.listdir(place) == []
        assert place.stat().st_mode & 0o077 == 0
        (place / "inner").mkdir()
    assert not place.exists()


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_uses_stays():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    killed, living = (subprocess.Popen([sys.executable, "-c", CHILD], **pipes) for _ in range(2))
    left, used = (child.stdout.readline().strip() for child in (killed, living))
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert os.path.isdir(left)
    with scratch("next"):
        assert not os.path.exists(left)
        assert os.path.isdir(used)
    living.communicate()
    assert living.returncode == 0
    assert not os.path.exists(used)


@pytest.mark.anyio
async def test_removing_many_files_does_not_hold_up_the_event_loop():
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turn)
        async with async_scratch("test") as folder:
            for number in range(500):
                (folder / str(number)).touch()
            before = turns
        during = turns - before
        tasks.cancel_scope.cancel()
    assert during > 0 and not folder.exists()
