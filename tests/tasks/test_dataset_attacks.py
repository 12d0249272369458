"""Hostile datasets: what their rows and files name stays in them, read or written."""

import json
import subprocess

import pytest

from rollyard.core.errors import ConfigError
from rollyard.tasks.adapters import load_adapter
from rollyard.tasks.adapters.drafts import is_original, put_tests_back
from rollyard.tasks.adapters.git_trees import pack_tree, read_tree

pytestmark = pytest.mark.adversarial
SECRET = "very secret"


@pytest.fixture
def outside(tmp_path):
    """A file of the host beside the dataset."""
    (tmp_path / "secret.txt").write_text(SECRET)
    return tmp_path / "secret.txt"


def write(adapter, source, folder, **options):
    """Every draft of the dataset, each in a folder of its own; what could not be written is told."""
    refused = []
    for number, draft in enumerate(load_adapter(adapter).read(source, options)):
        try:
            draft.write(folder / "deep" / "inner" / str(number))
        except ConfigError as error:
            refused.append(str(error))
    return refused


def leaked(folder):
    return [path for path in folder.rglob("*") if path.is_file() and SECRET in path.read_text(errors="replace")]


def terminal(tmp_path, **files):
    task = tmp_path / "set" / "one"
    (task / "tests").mkdir(parents=True)
    texts = {"task.yaml": "instruction: do it\n", "run-tests.sh": "pytest $TEST_DIR/\n", "Dockerfile": "FROM host\n"}
    for name, text in {**texts, **files}.items():
        if name.startswith("link "):
            (task / name[5:]).unlink(missing_ok=True)
            (task / name[5:]).symlink_to(text)
        else:
            (task / name).write_text(text)
    return tmp_path / "set"


@pytest.mark.parametrize("name", ["task.yaml", "run-tests.sh", "Dockerfile", "solution.sh", "docker-compose.yaml"])
def test_a_link_in_a_terminal_bench_task_reads_no_file_of_the_host(tmp_path, outside, name):
    if name == "task.yaml":
        outside.write_text(f"instruction: {SECRET}\n")
    source = terminal(tmp_path, **{f"link {name}": str(outside)})
    refused = write("terminal-bench", source, tmp_path / "made")
    assert not leaked(tmp_path / "made")
    assert refused and "leads out of" in refused[0]


def test_a_copied_test_is_no_file_of_the_host(tmp_path, outside):
    source = terminal(tmp_path, Dockerfile="FROM host\nCOPY tests/../../../secret.txt tests/link/secret.txt /x/\n")
    (source / "one" / "tests" / "link").symlink_to(tmp_path)
    refused = write("terminal-bench", source, tmp_path / "made")
    assert not leaked(tmp_path / "made")
    assert refused and "leads out of" in refused[0]


def exercise(tmp_path, **files):
    place = tmp_path / "set" / "python" / "exercises" / "practice" / "one"
    (place / ".meta").mkdir(parents=True)
    (place / "one.py").write_text("x = 1\n")
    (place / "one_test.py").write_text("class OneTest:\n    def test_it(self): pass\n")
    (place / ".meta" / "evil.sh").write_text("echo evil\n")
    named = {"solution": ["one.py"], "test": ["one_test.py"], "example": [".meta/evil.sh"], **files}
    (place / ".meta" / "config.json").write_text(json.dumps({"files": named}))
    return tmp_path / "set"


def test_an_exercise_reads_and_writes_no_file_of_the_host(tmp_path, outside):
    source = exercise(tmp_path, example=["../../../../../secret.txt"])
    assert "leads out of" in write("polyglot", source, tmp_path / "made")[0]
    link = source / "python" / "exercises" / "practice" / "one" / "notes.md"
    link.symlink_to(outside)
    exercise_config = link.parent / ".meta" / "config.json"
    exercise_config.write_text(exercise_config.read_text().replace("../../../../../secret.txt", ".meta/evil.sh"))
    write("polyglot", source, tmp_path / "made")
    assert not leaked(tmp_path / "made")
    (link.parent / ".meta" / "down").mkdir()  # a path that is inside where it is read, and outside where it is written
    up = ".meta/down/../../.meta/../../one/.meta/evil.sh"
    exercise_config.write_text(
        json.dumps({"files": {"solution": ["one.py"], "test": ["one_test.py"], "example": [up]}})
    )
    before = {path for path in tmp_path.rglob("*") if "made" not in path.parts}
    write("polyglot", source, tmp_path / "made")
    assert {path for path in tmp_path.rglob("*") if "made" not in path.parts} == before


@pytest.mark.parametrize("field", ["base_commit", "repo"])
def test_a_row_gives_git_no_option_and_no_other_repository(tmp_path, outside, field):
    source = tmp_path / "set"
    for repository in (source / "repos" / "a__b", tmp_path / "private"):
        repository.mkdir(parents=True)
        (repository / "secret.txt").write_text(SECRET)
        git = ["git", "-C", str(repository), "-c", "user.name=x", "-c", "user.email=x@x"]
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
            subprocess.run([*git, *command], check=True, capture_output=True)
    folder = source / "tasks" / "a__b-1"
    folder.mkdir(parents=True)
    hostile = {"base_commit": f"--output={outside}", "repo": "../../private"}[field]
    task = {
        "instance_id": "a__b-1",
        "repo": "a/b",
        "base_commit": "HEAD",
        "log_parser": "parse_log_pytest",
        field: hostile,
    }
    (folder / "task.yaml").write_text(json.dumps(task))
    texts = {"gold.patch": "diff", "test.patch": "diff", "problem_statement.md": "x", "Dockerfile": ""}
    texts["eval.sh"] = ": '>>>>> Start Test Output'\npytest\n: '>>>>> End Test Output'\n"
    texts["tests.json"] = json.dumps({"FAIL_TO_PASS": ["a"], "PASS_TO_PASS": []})
    texts["environment.yml"] = "dependencies:\n  - python=3.9.1=h1\n"
    for name, text in texts.items():
        (folder / name).write_text(text)
    refused = write("swebench", source / "tasks", tmp_path / "made", repositories=str(source / "repos"))
    assert outside.read_text() == SECRET
    assert "is no commit" in refused[0] or "is no repository" in refused[0]
    assert not list((tmp_path / "made").rglob("repository.tar.gz"))


TEST = "def test_old():\n    assert True\n"
BASE = {"conftest.py": "# of the base\n", "tests/test_a.py": TEST, "tests/conftest.py": "#\n", "code.py": "fault\n"}
TEST_PATCH = """diff --git a/tests/test_a.py b/tests/test_a.py
--- a/tests/test_a.py
+++ b/tests/test_a.py
@@ -1,2 +1,4 @@
 def test_old():
     assert True
+def test_new():
+    assert False
"""
FORGED = {
    "code.py": "an honest change\n",
    "conftest.py": "every test passes\n",
    "tests/conftest.py": None,
    "lib/conftest.py": "every test passes\n",
    "pytest.ini": "[pytest]\naddopts = -p forged\n",
    "tests/test_a.py": f"{TEST}\n\n\ndel test_new\n",
    "tests/__pycache__/test_a.pyc": "forged",
    "docs/conftest.py": "the answer has one here too\n",
}


def commit(tree, *words):
    git = ["git", "-C", str(tree), "-c", "user.name=x", "-c", "user.email=x@x"]
    for command in (["init", "-q"], ["add", "-A", "-f"], ["commit", "-q", "-m", "x", *words]):
        subprocess.run([*git, *command], check=True, capture_output=True)


@pytest.mark.parametrize("way", ["a tar", "a commit's name", "a copy of the repository"])
def test_tests_and_their_settings_are_those_of_the_base_whatever_the_agent_made_of_them(tmp_path, way):
    tree, answer = tmp_path / "tree", "diff --git a/docs/conftest.py b/docs/conftest.py\n"
    for name, text in BASE.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    commit(tree)
    subprocess.run(["cp", "-a", tree / ".git", tmp_path / "base.git"], check=True)
    base = subprocess.run(["git", "-C", tree, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    originals = read_tree(tree, "HEAD")
    wanted = {path: file for path, file in originals.items() if is_original(path, TEST_PATCH, answer)}
    (tmp_path / "originals.tar.gz").write_bytes(pack_tree(wanted))
    (tmp_path / "test.patch").write_text(TEST_PATCH)
    for name, text in FORGED.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text) if text is not None else (tree / name).unlink()
    commit(tree, "--amend")  # what is the first commit now has the forged tests
    restore = {
        "a tar": f"{tmp_path}/originals.tar.gz",
        "a commit's name": f"git checkout -q {base.stdout.strip()} --",
        "a copy of the repository": f"git --git-dir={tmp_path}/base.git --work-tree=. checkout -q HEAD --",
    }[way]
    lines = put_tests_back(str(tree), restore, TEST_PATCH, answer)
    script = "\n".join(lines).replace("/tests/test.patch", f"{tmp_path}/test.patch")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {
        path.relative_to(tree).as_posix(): path.read_text()
        for path in tree.rglob("*")
        if path.is_file() and ".git" not in path.parts
    }
    changed = {"tests/test_a.py": f"{TEST}def test_new():\n    assert False\n", "code.py": FORGED["code.py"]}
    assert found == {**BASE, **changed, "docs/conftest.py": FORGED["docs/conftest.py"]}


def test_tests_of_an_instance_without_a_test_patch_are_put_back(tmp_path):
    row = {"instance_id": "o__r.1.f__2", "repo": "o/r", "problem_statement": "It broke.", "patch": "the fault"}
    row |= {"image_name": "o/img", "FAIL_TO_PASS": ["tests/test_a.py::test_a"], "PASS_TO_PASS": ["b.py::c"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert not write("swebench", tmp_path / "rows.jsonl", tmp_path / "made")
    (script,) = (tmp_path / "made").rglob("plan.json")
    for path in ("tests/test_a.py", "b.py"):
        assert f"--git-dir=/opt/base.git --work-tree=. checkout -q HEAD -- {path} " in script.read_text()
    (dockerfile,) = (tmp_path / "made").rglob("Dockerfile")
    assert "cp -a .git /opt/base.git" in dockerfile.read_text()
