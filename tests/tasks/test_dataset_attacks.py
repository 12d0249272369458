"""Hostile datasets: what their rows and files name stays in them, read or written."""

import json
import subprocess

import pytest

from rollyard.core.errors import ConfigError
from rollyard.tasks.adapters import load_adapter

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
