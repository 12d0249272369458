"""The right commit is named, the function is right at the head, and the history up to it is the old one.

The agent's code runs in a process of its own, as a user that reaches neither the tests nor the reward; the numbers it prints are
compared here. The history is the same on every machine, so its hashes are known.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

FIRST_WRONG = "ee583b6f7bf8817b8856423eea1101bbbf38a57f"
LAST_OLD = "2fab23efba488ad5813419f6410180dafef7f4f1"
GIT = ["git", "--no-replace-objects", "-C", "/app/shop", "-c", "core.hooksPath=/dev/null", "-c", "safe.directory=*"]
PROGRAM = """
import json, sys
names = {}
exec(sys.stdin.read(), names)
print(json.dumps([names["total"](prices, discount=discount) for prices, discount in json.loads(sys.argv[1])]))
"""
CASES = {315: ([100, 250], 10), 350: ([100, 250], 0), 2: ([1, 2], 30), 0: ([7], 100)}
NOBODY = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}


def git(*words):
    return subprocess.run([*GIT, *words], capture_output=True, text=True, timeout=20).stdout


def is_right(source):
    command = [sys.executable, "-I", "-c", PROGRAM, json.dumps(list(CASES.values()))]
    try:
        done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=10, cwd="/", **NOBODY)
        return json.loads(done.stdout) == list(CASES)
    except (subprocess.TimeoutExpired, ValueError):
        return False
    except PermissionError:
        print("programs cannot become another user here, so the agent's code cannot be judged")
        sys.exit(2)


os.chmod("/tests", 0o700)
commits = git("rev-list", "--first-parent", "--reverse", "main").split()
kept = len(commits) > 20 and commits[19] == LAST_OLD
answer = Path("/app/answer.txt")
named = answer.is_file() and answer.read_bytes().strip() == FIRST_WRONG.encode()
fixed = is_right(git("cat-file", "blob", "main:price.py"))
print(f"history kept: {kept}, right commit: {named}, fixed: {fixed}")
sys.exit(not (kept and named and fixed))
