"""The right commit is named, the function is right at the head, and the history up to it is the old one."""

import subprocess
import sys
from pathlib import Path

GIT = ["git", "-C", "/app/shop", "-c", "core.hooksPath=/dev/null", "-c", "safe.directory=*"]


def git(*words):
    return subprocess.run([*GIT, *words], capture_output=True, text=True, timeout=20).stdout


def total_at(commit):
    names = {}
    exec(git("show", f"{commit}:price.py"), names)
    return names["total"]([100, 250], discount=10)


commits = git("rev-list", "--reverse", "main").split()
titles = git("log", "--reverse", "--format=%s", "main").splitlines()
kept = titles[:20] == [f"Work on prices, part {n}" for n in range(20)] and len(commits) > 20
first_wrong = next((c for c in commits[:20] if total_at(c) != 315), None)
answer = Path("/app/answer.txt").read_text().strip()
print(f"history kept: {kept}, right commit: {answer == first_wrong}, fixed: {total_at('HEAD') == 315}")
sys.exit(not (kept and answer == first_wrong and total_at("HEAD") == 315))
