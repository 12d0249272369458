"""Whether every test that passes in a tree passes in another one too: `python3 -I suite_check.py TREE PLAN.json`.

`original.tar.gz` beside the plan is the tree as it should be. Its tests are run in it, and then in a copy of TREE that has these
tests, these settings of pytest, and no others. At least one test of the plan's `finding` files must pass in the original:
otherwise nothing here could find the fault, and nobody is judged by the rest. Runs on old Pythons.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from xml.etree import ElementTree

TEST = re.compile(r"(test_.*|.*_test|conftest)\.py$")
SETTINGS = ("pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml")


def run_suite(tree, plan):
    """Each test and whether it passed; None where pytest left no report."""
    report = tree + ".xml"
    roots = [os.path.join(tree, root).rstrip("/") for root in plan["roots"]]
    known = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    env = dict(os.environ, PYTHONPATH=":".join(roots + known), PYTHONDONTWRITEBYTECODE="1")
    command = [sys.executable, "-I", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tree]
    command += ["-o", "pythonpath=" + " ".join(plan["roots"]), "--junitxml", report] + plan["arguments"]
    print("$ " + " ".join(command), flush=True)
    subprocess.call(command, cwd=tree, env=env)
    try:
        cases = ElementTree.parse(report).getroot().iter("testcase")  # noqa: S314 - in the sandbox alone
    except (OSError, ElementTree.ParseError):
        return None
    found = {}
    for case in cases:
        outcome = {child.tag for child in case}
        if "skipped" not in outcome:
            found[str(case.get("classname")) + "::" + str(case.get("name"))] = not outcome & {"failure", "error"}
    return found


def copy_answer(tree, original, target, plan):
    """The tree with the original's tests and settings in place of its own."""
    shutil.copytree(tree, target, symlinks=True, ignore=shutil.ignore_patterns(".git", "__pycache__", "*.pyc"))
    judges = set(plan["judges"])
    for folder, _, names in os.walk(target):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), target)
            added = not os.path.lexists(os.path.join(original, path))
            if path in judges or (added and (TEST.match(name) or path in SETTINGS)):
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
    expected = run_suite(original, plan)
    wanted = sorted(name for name, passed in (expected or {}).items() if passed)
    modules = [path[: -len(".py")].replace("/", ".") for path in plan["finding"]]
    if not any(name.startswith((module + "::", module + ".")) for name in wanted for module in modules):
        return "no test of " + ", ".join(plan["finding"]) + " passes in the original tree: what does its suite need?"
    copy_answer(tree, original, answer, plan)
    found = run_suite(answer, plan)
    if found is None:
        return "the tests did not end"
    lost = [name for name in wanted if not found.get(name)]
    for name in lost[:50]:
        print("did not pass:", name)
    print(len(wanted) - len(lost), "of", len(wanted), "passed that pass in the original")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(check(sys.argv[1], os.path.abspath(sys.argv[2])))
