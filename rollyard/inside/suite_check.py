"""Whether every test that passes in a tree passes in another one too: `python3 -I suite_check.py TREE PLAN.json`.

`original.tar.gz` beside the plan is the tree as it should be. Its tests are run in it, and then in a copy of TREE that has these
tests, these settings of pytest, and no others. At least one test of the plan's `finding` files must pass in the original:
otherwise nothing here could find the fault, and the rest judges no one. Runs on old Pythons.
"""

import hashlib
import hmac
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

TEST = re.compile(r"(test_.*|.*_test|conftest)\.py$")
SETTINGS = ("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml")


def run_suite(tree, plan):
    """Each test and whether it passed, and why that is not believed: the code under test runs in the process of its tests, so
    `run_tests.py` beside this file records what pytest says while they run."""
    place = tempfile.mkdtemp()
    roots = [os.path.join(tree, root).rstrip("/") for root in plan["roots"]]
    known = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    env = dict(os.environ, PYTHONPATH=":".join(roots + known), PYTHONDONTWRITEBYTECODE="1")
    witness, record = os.path.join(place, "witness.py"), os.path.join(place, "record")
    command = [sys.executable, "-I", witness, "-q", "-p", "no:cacheprovider", "--rootdir", tree]
    command += ["-o", "pythonpath=" + " ".join(plan["roots"])] + plan["arguments"]
    print("$ " + " ".join(command), flush=True)
    given = {"command": command, "witness": witness, "log": os.path.join(place, "log"), "record": record, "echo": True}
    key = "%064x" % random.SystemRandom().getrandbits(256)
    runner = [sys.executable, "-I", os.path.join(os.path.dirname(os.path.abspath(__file__)), "run_tests.py")]
    child = subprocess.Popen(runner, cwd=tree, env=env, stdin=subprocess.PIPE)
    child.communicate(json.dumps(dict(given, key=key)).encode("ascii"))
    try:
        with open(record, "rb") as file:
            signature, _, body = file.read().partition(b"\n")
    except OSError:
        return {}, "the tests did not end"
    if signature.decode("ascii", "replace") != hmac.new(key.encode("ascii"), body, hashlib.sha256).hexdigest():
        return {}, "the record of the tests was changed"
    heard = json.loads(body.decode("ascii"))
    if not heard["starts"] or heard["ends"] < heard["starts"]:
        return {}, "the tests did not run to their end"
    if heard["strange"] or not heard["controls"] or set(heard["controls"]) != {"failed"}:
        return {}, "a test that cannot pass did not fail: the code under test changed what tests say"
    found = {}
    for node, when, outcome, _, _ in heard["tests"]:
        if outcome == "failed":
            found[node] = False
        elif when == "call" and outcome == "passed":
            found.setdefault(node, True)
    return found, None


def copy_answer(tree, original, target, plan):
    """The tree with the original's tests and settings in place of its own."""
    shutil.copytree(tree, target, symlinks=True, ignore=shutil.ignore_patterns(".git", "__pycache__", "*.pyc"))
    judges = set(plan["judges"])
    places = set(os.path.dirname(path) for path in judges) | {""}  # where pytest looks for settings
    for folder, _, names in os.walk(target):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), target)
            added = not os.path.lexists(os.path.join(original, path))
            steers = name in SETTINGS and os.path.dirname(path) in places
            if path in judges or (added and (TEST.match(name) or steers)):
                os.remove(os.path.join(target, path))
    for path in judges:
        place = os.path.join(target, path)
        if os.path.realpath(os.path.dirname(place)) != os.path.dirname(os.path.join(os.path.realpath(target), path)):
            sys.exit(path + ": a link stands where a folder of tests was")
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.isdir(place):
            shutil.rmtree(place)
        shutil.copy2(os.path.join(original, path), place, follow_symlinks=False)


def check(tree, plan_file):
    with open(plan_file, encoding="utf-8") as file:
        plan = json.load(file)
    place = os.path.realpath(tempfile.mkdtemp())
    original, answer = os.path.join(place, "original"), os.path.join(place, "answer")
    with tarfile.open(os.path.join(os.path.dirname(plan_file), "original.tar.gz")) as archive:
        archive.extractall(original)  # noqa: S202 - the adapter's own
    expected, _ = run_suite(original, plan)
    wanted = sorted(name for name, passed in expected.items() if passed)
    if not any(name.startswith(path + "::") for name in wanted for path in plan["finding"]):
        return "no test of " + ", ".join(plan["finding"]) + " passes in the original tree: what does its suite need?"
    copy_answer(tree, original, answer, plan)
    found, doubt = run_suite(answer, plan)
    if doubt is not None:
        return doubt
    lost = [name for name in wanted if not found.get(name)]
    for name in lost[:50]:
        print("did not pass:", name)
    print(len(wanted) - len(lost), "of", len(wanted), "passed that pass in the original")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(check(sys.argv[1], os.path.abspath(sys.argv[2])))
