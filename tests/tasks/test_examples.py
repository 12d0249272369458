"""The example tasks: an agent that does not do the work but attacks the checker gets nothing."""

import shutil
from pathlib import Path

import pytest

import rollyard as ry

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]

TASKS = Path(__file__).parents[2] / "examples" / "tasks"

# what is written over the file under test; each would win where it runs inside the checker, or reaches the reward
ALWAYS_EQUAL = """
class Same(list):
    def __eq__(self, other):
        return True
def merge(ranges):
    return Same()
"""
REWARD_WRITER = """
import os, subprocess
for path in ("/logs/verifier/reward.txt", "/logs/verifier/reward.json"):
    try:
        os.unlink(path)
    except OSError:
        pass
subprocess.Popen(["sh", "-c", "sleep 1; echo 1 > /logs/verifier/reward.json"], start_new_session=True)
"""
LEAVER = "import os\nos._exit(0)\n"
READER = """
import re
def merge(ranges):
    text = open("/tests/check.py").read()
    cases = eval(re.search(r"CASES = ({.*?^})", text, re.S | re.M)[1])
    return next(wanted for asked, wanted in cases.values() if [tuple(a) for a in asked] == list(ranges))
"""


async def reward(folder, tmp_path, solve):
    """What an agent that runs `solve` gets, and what was printed."""
    shutil.copytree(TASKS / folder, tmp_path / folder)
    (tmp_path / folder / "solution" / "solve.sh").write_text("#!/bin/sh\nset -e\n" + solve)
    (task,) = ry.Taskset.load(tmp_path / folder)
    policy = ry.policy.scripted(str(TASKS.parent / "scripts" / "bug-fix.yaml"))  # the oracle asks no model
    done = await ry.run_rollout(task, agent="oracle", policy=policy)
    return done.reward, done.verdict.log


@pytest.mark.parametrize(
    "code", [ALWAYS_EQUAL, REWARD_WRITER, LEAVER, READER], ids=["equal", "writer", "leaver", "reader"]
)
async def test_bug_fix_cannot_be_forged(tmp_path, code):
    got, log = await reward("bug-fix", tmp_path, f"cat > /app/ranges.py <<'END'\n{code}\nEND\n")
    assert got == 0.0, log


@pytest.mark.parametrize(
    "code",
    [
        "def total(prices, discount=0):\n    return type('Same', (int,), {'__eq__': lambda *a: True})()\n",
        "import sys\nsys.exit(0)\n",
        "import __main__\n__main__.kept = __main__.named = __main__.fixed = True\n__main__.sys.exit = lambda code: None\n",
    ],
    ids=["equal", "exit", "main"],
)
async def test_git_history_cannot_be_forged(tmp_path, code):
    solve = f"cd /app/shop\ncat > price.py <<'END'\n{code}END\n"
    solve += "git -c user.name=a -c user.email=a@example.com commit -qam fix\n"
    solve += "git rev-list --reverse main | sed -n 14p > /app/answer.txt\n"
    got, log = await reward("git-history", tmp_path, solve)
    assert got == 0.0, log
