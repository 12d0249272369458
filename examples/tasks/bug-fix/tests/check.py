"""The reported bugs, and one that nobody reported: a range inside another must not shorten it.

The agent's code runs in a process of its own, as a user that reaches neither the tests nor the reward; what it answers is
compared here, as plain values.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

CASES = {
    "touching ranges become one": ([[1, 3], [4, 6]], [[1, 6]]),
    "a gap stays a gap": ([[1, 3], [5, 6]], [[1, 3], [5, 6]]),
    "nothing gives nothing": ([], []),
    "a range inside another does not shorten it": ([[1, 10], [2, 3], [11, 12]], [[1, 12]]),
    "order does not matter": ([[8, 9], [1, 2], [2, 4]], [[1, 4], [8, 9]]),
}
PROGRAM = """
import json, sys
sys.path.insert(0, "/app")
from ranges import merge
print(json.dumps([list(pair) for pair in merge([tuple(pair) for pair in json.load(sys.stdin)])]))
"""
NOBODY = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}


def answer(ranges):
    """What the agent's `merge` gives, or None when it gives no list of pairs."""
    command = [sys.executable, "-I", "-c", PROGRAM]
    text = json.dumps(ranges)
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=10, cwd="/", **NOBODY)
        print(done.stderr[-500:])
        return json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        print(error)
        return None


os.chmod("/tests", 0o700)
passed = {name: answer(ranges) == wanted for name, (ranges, wanted) in CASES.items()}
tests = [{"name": name, "status": "passed" if ok else "failed"} for name, ok in passed.items()]
Path("/logs/verifier/ctrf.json").write_text(json.dumps({"results": {"tests": tests}}))
Path("/logs/verifier/reward.txt").write_text(str(int(all(passed.values()))))
print(passed)
