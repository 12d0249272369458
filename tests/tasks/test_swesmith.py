"""SWE-smith's branches: what the agent is given of one, and how what it left is judged."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.runs.rollout.provision import Provision
from rollyard.tasks.adapters import guess_adapter, load_adapter
from rollyard.tasks.adapters.git_trees import read_tree
from rollyard.tasks.dataset_registry import DatasetEntry, add_dataset
from rollyard.testing.leaks import make_needles
from rollyard.testing.tasks import CheckOptions, check_task

RIGHT = "def clip(value, low, high):\n    return max(low, min(value, high))\n"
WRONG = "def clip(value, low, high):\n    return max(low, max(value, high))\n"
NAME = "someone__calc.0123abcd"
OPTIONS = {"packages": "pytest==9.2.0"}


def git(place, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    return subprocess.run(
        ["git", *who, *words], cwd=place, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def commit(place, text, **files):
    for path, content in files.items():
        file = place / path.replace("__", "/").replace("_py", ".py")
        if content is None:
            file.unlink()
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
    git(place, "add", "-A")
    git(place, "commit", "-qm", text)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """As the public ones are: a branch for each instance, three commits each, beside branches that are none."""
    monkeypatch.setenv("ROLLYARD_DATASETS", str(tmp_path / "registry" / "datasets.toml"))
    place = tmp_path / "calc"
    place.mkdir()
    git(place, "init", "-qb", "main")
    (place / ".gitattributes").write_text("tests export-ignore\n")
    (place / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    commit(
        place,
        "Initial commit",
        src__calc_py=RIGHT,
        tests__test_clip_py="import calc\n\ndef test_above():\n    assert calc.clip(5, 0, 3) == 3\n",
        tests__test_other_py="import calc\n\ndef test_here():\n    assert calc.clip\n\ndef test_not_here():\n    assert False\n",
    )
    git(place, "branch", "dependabot/pip/sphinx")
    git(place, "checkout", "-qb", f"{NAME}.func_pm_op_swap__abc")
    commit(place, "Bug Patch", src__calc_py=WRONG)
    commit(place, "Remove F2P Tests", tests__test_clip_py=None)
    git(place, "checkout", "-qb", f"{NAME}.short__abc", "main")
    commit(place, "Bug Patch", src__calc_py=WRONG)
    git(place, "checkout", "-q", "main")
    return place


def load(repository, **options):
    add_dataset(DatasetEntry(name="calc", source=str(repository), adapter="", options={**OPTIONS, **options}))
    return ry.Taskset.load("calc")


def test_each_branch_of_three_commits_is_a_task(repository, tmp_path):
    assert guess_adapter(repository) == "swesmith"
    tasks = load(repository)
    assert [task.id for task in tasks] == [f"{NAME}.func_pm_op_swap__abc"]
    assert [("short__abc" in one.folder, "three commits" in one.reason) for one in tasks.skipped] == [(True, True)]
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    drafts = load_adapter("swesmith").read(clone, {"instances": "*.func_pm*"})
    assert [draft.id for draft in drafts] == [f"{NAME}.func_pm_op_swap__abc"]


def test_an_agent_is_given_the_last_tree_and_no_history(repository):
    (task,) = load(repository)
    assert "someone/calc" in task.instruction
    assert "tests/test_clip.py" in task.instruction
    build = Path(task.build)
    with tarfile.open(build / "repository.tar.gz") as archive:
        names = sorted(archive.getnames())
        faulty = archive.extractfile("src/calc.py").read().decode()
    assert names == [".gitattributes", "pytest.ini", "src/calc.py", "tests/test_other.py"]
    assert faulty == WRONG
    assert sorted(path.name for path in build.iterdir()) == ["Dockerfile", "repository.tar.gz"]
    assert "Bug Patch" not in (build / "Dockerfile").read_text() + task.instruction


def judge(repository, tmp_path, act):
    (task,) = load(repository)
    return judge_task(task, tmp_path, act)


def judge_task(task, tmp_path, act):
    """How the judge exits on a tree that `act` has changed, and what it says."""
    tree, tests = tmp_path / "tree", tmp_path / "tests"
    with tarfile.open(Path(task.build) / "repository.tar.gz") as archive:
        archive.extractall(tree, filter="data")
    act(tree)
    shutil.copytree(Path(task.source) / "tests", tests)
    command = [sys.executable, "-I", str(tests / "suite_check.py"), str(tree), str(tests / "plan.json")]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def repair(tree):
    (tree / "src/calc.py").write_text(RIGHT)
    (tree / "tests/test_mine.py").write_text("import calc.nothing\n")  # its own tests judge nobody


def skip_all(tree):
    (tree / "conftest.py").write_text("def pytest_collection_modifyitems(items):\n    items.clear()\n")
    (tree / "tests/conftest.py").write_text("import os\nos._exit(0)\n")


def choose_tests(tree):
    (tree / "pytest.ini").write_text("[pytest]\ntestpaths = tests/test_other.py\n")
    (tree / "tox.ini").write_text("[pytest]\naddopts = --deselect tests/test_clip.py\n")


def write_tests(tree):
    (tree / "tests/test_clip.py").write_text("def test_above(): pass\n")


def end_early(tree):
    (tree / "src/calc.py").write_text("import os\nos._exit(0)\n")


def change_reports(tree):
    lines = ["from _pytest.reports import TestReport", "make = TestReport.from_item_and_call.__func__"]
    lines += ["def passed(kind, item, call):", "    report = make(kind, item, call)", "    report.outcome = 'passed'"]
    lines += ["    return report", "TestReport.from_item_and_call = classmethod(passed)"]
    (tree / "src/calc.py").write_text("\n".join([*lines, WRONG]))


def write_report(tree):
    case = '<testcase classname="tests.test_{0}" name="test_{1}"/>'
    cases = case.format("clip", "above") + case.format("other", "here")
    lines = ["import atexit, os, sys", "def forge():", "    place = sys.argv[sys.argv.index('--rootdir') + 1] + '.xml'"]
    lines += [f"    open(place, 'w').write('<testsuite>{cases}</testsuite>')", "atexit.register(forge)"]
    (tree / "src/calc.py").write_text("\n".join([*lines, WRONG]))


@pytest.mark.parametrize(
    "act", [lambda tree: None, skip_all, choose_tests, write_tests, end_early, change_reports, write_report]
)
def test_only_a_repair_passes(repository, tmp_path, act):
    code, said = judge(repository, tmp_path, act)
    assert code == 1, said


def test_a_repair_passes_whatever_fails_in_the_original_too(repository, tmp_path):
    code, said = judge(repository, tmp_path, repair)
    assert code == 0, said
    assert "2 of 2 passed that pass in the original" in said


def test_a_link_in_the_place_of_tests_is_not_written_through(repository, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def plant(tree):
        shutil.rmtree(tree / "tests")
        (tree / "tests").symlink_to(elsewhere)

    code, said = judge(repository, tmp_path, plant)
    assert code == 1
    assert "a link stands" in said
    assert list(elsewhere.iterdir()) == []


def test_a_suite_that_cannot_find_the_fault_says_what_is_missing(repository, tmp_path):
    (task,) = load(repository, arguments="--ignore=tests/test_clip.py")
    assert json.loads((Path(task.source) / "tests/plan.json").read_bytes())["finding"] == ["tests/test_clip.py"]
    code, said = judge_task(task, tmp_path, repair)
    assert code == 1
    assert "no test of tests/test_clip.py passes in the original tree" in said


def test_a_blob_that_is_not_there_is_named(repository):
    blob = git(repository, "rev-parse", "main:src/calc.py").strip()
    (repository / ".git/objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(ConfigError, match=r"src/calc.py of .* is not there"):
        read_tree(repository, "main")


@pytest.mark.anyio
async def test_a_branch_is_proved_in_a_sandbox(repository, backend):
    (task,) = load(repository)
    check = await check_task(task, backend, CheckOptions(repeats=1), Provision.of(backend))
    assert [(proof.agent, proof.rewards) for proof in check.proofs] == [("nop", (0.0,)), ("oracle", (1.0,))], check
    assert check.ok, check.findings


def test_the_lines_of_a_fault_are_not_taken_for_the_answer(repository):
    (task,) = load(repository)
    groups = make_needles(task)["groups"]
    assert [RIGHT.splitlines()[1].strip()] in groups
    assert not any(WRONG.splitlines()[1].strip() in group for group in groups)
