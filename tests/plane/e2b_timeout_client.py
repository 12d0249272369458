"""Run by a Python that has the real e2b SDK: `begin` makes sandboxes whose time is over at once, `again` comes back to them."""

import json
import sys
import time

from e2b import Sandbox, SandboxState

COUNT = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"
WAYS = {
    "paused": {"on_timeout": "pause"},
    "woken": {"on_timeout": "pause", "auto_resume": True},
    "stopped": {"on_timeout": {"action": "pause", "keep_memory": False}},
}


def wait_for(true):
    while not true():
        time.sleep(0.05)


def begin(way):
    box = Sandbox.create(timeout=60, lifecycle=way, envs={"HOME": "/tmp"})
    box.commands.run(COUNT, background=True, timeout=0)
    wait_for(lambda: box.files.exists("/tmp/count"))
    box.set_timeout(1)
    wait_for(lambda: box.get_info().state == SandboxState.PAUSED)
    told = box.get_info().lifecycle
    return box.sandbox_id, [box.is_running(), told["on_timeout"], told["auto_resume"]]


def moves(box):
    """Whether the program in it still counts."""
    first, until = box.files.read("/tmp/count"), time.monotonic() + 2
    while time.monotonic() < until:
        if (now := box.files.read("/tmp/count")) != first and now.strip():
            return True
        time.sleep(0.05)
    return False


if sys.argv[1] == "begin":
    print(json.dumps({name: begin(way) for name, way in WAYS.items()}))
else:
    paused, woken, stopped = sys.argv[2:]
    seen = {"listed": sorted(one.state.value for one in Sandbox.list().next_items())}
    box = Sandbox.connect(paused, timeout=60)
    seen["paused"] = [box.is_running(), moves(box)]
    box = Sandbox.connect(stopped, timeout=60)
    seen["stopped"] = [box.is_running(), box.files.read("/tmp/count").strip().isdigit(), moves(box)]
    print(json.dumps(seen))
