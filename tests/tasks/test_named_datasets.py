"""Datasets by name: the registry file, what adapters make of public forms, and the check of a sample."""

import csv
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rollyard as ry
from rollyard.cli.main import app
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.tasks.adapters import guess_adapter
from rollyard.tasks.dataset_registry import DatasetEntry, add_dataset, read_registry
from rollyard.tasks.scaffold import new_task
from rollyard.testing.dataset import check_dataset, dataset_table, summarise
from rollyard.testing.tasks import CheckOptions

INSIDE = Path(ry.__file__).parent / "inside"
HUMAN = {
    "task_id": "HumanEval/7",
    "prompt": "def twice(n: int) -> int:\n    'two times n'\n",
    "canonical_solution": "    return 2 * n\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    "entry_point": "twice",
}
MBPP = {
    "task_id": 3,
    "text": "Write a function that gives a pair the other way round.",
    "code": "def turn(pair):\r\n    return pair[1], pair[0]",
    "test_setup_code": "",
    "test_list": ["assert turn((1, 2)) == (2, 1)", "assert turn(('a', {3})) == ({3}, 'a')"],
}


@pytest.fixture(autouse=True)
def own_registry(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLYARD_DATASETS", str(tmp_path / "registry" / "datasets.toml"))
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "cache"))


def add(name, source, **fields):
    return add_dataset(DatasetEntry(name=name, source=str(source), adapter=fields.pop("adapter", ""), **fields))


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(*words):
    return CliRunner().invoke(app, ["datasets", *map(str, words)], prog_name="rollyard")


def test_a_dataset_is_found_by_name_and_version(tmp_path):
    rows = jsonl(tmp_path / "rows.jsonl", HUMAN, MBPP)
    assert add("small", rows, version="1").adapter == "functions"
    add("small", jsonl(tmp_path / "more.jsonl", HUMAN), version="2")
    assert len(ry.Taskset.load("small@1")) == 2
    assert [task.id for task in ry.Taskset.load("small")] == ["HumanEval__7"]
    with pytest.raises(UnknownName, match="small@3"):
        ry.Taskset.load("small@3")
    with pytest.raises(ConfigError, match="there already"):
        add("small", rows, version="1")


def test_files_that_changed_since_are_an_error(tmp_path):
    rows = jsonl(tmp_path / "rows.jsonl", HUMAN)
    add("small", rows)
    jsonl(rows, MBPP)
    with pytest.raises(ConfigError, match="has changed since it was added"):
        ry.Taskset.load("small")
    folder = new_task(tmp_path / "tasks" / "one")
    add("folders", folder.parent)
    (folder / "instruction.md").write_text("Something else than before, and long enough.")
    with pytest.raises(ConfigError, match="has changed since it was added"):
        ry.Taskset.load("folders")


def test_a_row_that_makes_no_task_is_left_out_with_the_reason(tmp_path):
    broken = {**MBPP, "task_id": 4, "code": "def turn(:"}
    add("some", jsonl(tmp_path / "rows.jsonl", MBPP, broken))
    found = ry.Taskset.load("some")
    assert [task.id for task in found] == ["mbpp-3"]
    ((where, reason),) = found.skipped
    assert where == "mbpp-4" and "its own code is not Python" in reason


@pytest.mark.parametrize("kind", ["archive", "git", "folder"])
def test_sources_of_every_kind_give_the_same_tasks(tmp_path, kind):
    root = tmp_path / "set"
    new_task(root / "alpha")
    new_task(root / "beta")
    source = root
    if kind == "archive":
        source = tmp_path / "set.tar.gz"
        with tarfile.open(source, "w:gz") as archive:
            archive.add(root, "set")
    if kind == "git":
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
        for words in (
            ["init", "-q"],
            ["add", "."],
            ["commit", "-qm", "one"],
            ["commit", "-qm", "two", "--allow-empty"],
        ):
            subprocess.run([*git, *words], cwd=root, check=True)
        first = subprocess.run(["git", "rev-parse", "HEAD~1"], cwd=root, capture_output=True, text=True, check=True)
        source = f"git:{root}@{first.stdout.strip()}"
    add("set", source)
    assert [task.id for task in ry.Taskset.load("set")] == ["alpha", "beta"]


def test_the_command_line_adds_lists_and_shows(tmp_path):
    rows = jsonl(tmp_path / "rows.jsonl", HUMAN)
    done = command("add", "small", "--source", rows, "--licence", "MIT", "--option", "image=host")
    assert done.exit_code == 0 and "functions" in done.output, done.output
    assert read_registry()[0].options == {"image": "host"}
    listed = json.loads(command("list", "--json").output)
    assert listed["datasets"][0]["licence"] == "MIT" and "polyglot" in listed["adapters"]
    shown = json.loads(command("show", "small", "--json").output)
    assert shown["first"] == ["HumanEval__7"] and shown["entry"]["digest"].startswith("sha256:")
    with pytest.raises(UnknownName, match="colour"):
        add("other", rows, options={"colour": "red"})


def judge(tmp_path, code, **cases):
    """The exit code of the check of `code` as the solution."""
    (tmp_path / "solution.py").write_text(code)
    told = {"file": str(tmp_path / "solution.py"), "helpers": "", "functions": ["twice"], **cases}
    told.setdefault("tests", "assert twice(2) == 4")
    (tmp_path / "cases.json").write_text(json.dumps(told))
    script = [sys.executable, "-I", str(INSIDE / "function_check.py"), str(tmp_path / "cases.json")]
    return subprocess.run(script, capture_output=True, timeout=60).returncode


FORGERIES = {
    "ends the process": "import os\ndef twice(n):\n    os._exit(0)",
    "ends it at import": "import sys\nsys.exit(0)",
    "equal to all": "class E(int):\n    def __eq__(self, other):\n        return True\ndef twice(n):\n    return E()",
    "changes assert": "import builtins\nbuiltins.AssertionError = SystemExit\ndef twice(n):\n    raise SystemExit(0)",
    "kills the judge": "import os, signal\ndef twice(n):\n    os.kill(os.getppid(), signal.SIGKILL)\n    return 5",
    "writes answers": "import os\ndef twice(n):\n    [os.write(fd, b'{}\\n') for fd in range(3, 5)]\n    return 5",
}  # fmt: skip


@pytest.mark.adversarial
@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES)
def test_a_function_cannot_forge_the_result_of_its_tests(tmp_path, code):
    assert judge(tmp_path, code) != 0
    assert judge(tmp_path, "def twice(n):\n    return 2 * n") == 0


def test_values_of_every_kind_reach_the_tests_as_they_are(tmp_path):
    same = "def twice(*args):\n    return args[0] if len(args) == 1 else args"
    values = "[1, (2.5, float('inf')), {3: {'a': b'x'}}, {4}, frozenset([5]), None, True, 1j, int]"
    tests = f"for value in {values}:\n    got = twice(value)\n    assert got == value and type(got) is type(value)\n"
    tests += "try:\n    twice(1, 2)[5]\nexcept IndexError:\n    pass\n"
    assert judge(tmp_path, same, tests=tests) == 0
    raising = "def twice(n):\n    raise ValueError('odd')"
    assert judge(tmp_path, raising, tests="try:\n    twice(1)\nexcept ValueError:\n    pass") == 0


@pytest.mark.anyio
async def test_a_sample_is_proved_and_trivial_answers_are_told(tmp_path, backend):
    loose = {**MBPP, "task_id": 9, "test_list": ["assert turn((1, 2)) is not None"]}
    add("sample", jsonl(tmp_path / "rows.jsonl", MBPP, loose, {**MBPP, "task_id": 10, "code": "def turn("}))
    found = await check_dataset("sample", backend, CheckOptions(repeats=1, trivial=True), sample=5)
    summary = summarise(found)
    expected = {"found": 3, "loaded": 2, "sampled": 2, "built": 2, "nop 0": 2, "gold 1": 2, "flaky": 0, "trivial": 1}
    assert {name: summary[name] for name in expected} == expected
    good, bad, left_out = sorted(dataset_table(found), key=lambda row: ("mbpp-3", "mbpp-9", "-").index(row["task"]))
    assert good["result"] == "ok" and "answer solves the task" in bad["reason"]
    assert "mbpp-10" in left_out["reason"] and "not Python" in left_out["reason"]


def exercise(root, language, name, files, **config):
    folder = root / language / "exercises" / "practice" / name
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / ".meta" / "config.json").write_text(json.dumps({"files": config}))


def test_an_exercise_hides_its_tests_and_its_example(tmp_path):
    exercise(
        tmp_path / "poly", "go", "one",
        {"one.go": "package one", "one_test.go": "package one // tests", "cases_test.go": "package one // cases",
         "go.mod": "module one", ".docs/instructions.md": "Do it.", ".meta/example.go": "package one // answer"},
        solution=["one.go"], test=["one_test.go"], example=[".meta/example.go"], editor=["cases_test.go"],
    )  # fmt: skip
    assert guess_adapter(tmp_path / "poly") == "polyglot"
    add("poly", tmp_path / "poly")
    (task,) = ry.Taskset.load("poly")
    assert task.id == "go-one" and {file.path for file in task.files} == {"one.go", "go.mod"}
    root = Path(task.source)
    assert (root / "tests/project/cases_test.go").is_file() and not (root / "tests/project/one.go").exists()
    assert (root / "solution/answer/one.go").read_text().endswith("answer")
    assert "`/app/one.go`" in task.instruction and "answer" not in task.instruction
    add("rust", tmp_path / "poly", options={"languages": "rust"})
    assert len(ry.Taskset.load("rust")) == 0


def test_a_terminal_bench_folder_becomes_a_task(tmp_path):
    folder = tmp_path / "tb" / "hello"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text("instruction: Say hello.\nmax_test_timeout_sec: 60\ndifficulty: easy\n")
    (folder / "Dockerfile").write_text("FROM ghcr.io/laude-institute/t-bench/python-3-13:20250620\nCOPY data.txt ./\n")
    (folder / "data.txt").write_text("data")
    (folder / "run-tests.sh").write_text(
        "uv pip install pytest==8.4.1 numpy==2.3.1\nuv run pytest $TEST_DIR/test_outputs.py -rA\n"
    )
    (folder / "tests" / "test_outputs.py").write_text("def test_it(): assert True\n")
    (folder / "solution.sh").write_text("echo hello\n")
    assert guess_adapter(folder.parent) == "terminal-bench"
    add("tb", folder.parent)
    (task,) = ry.Taskset.load("tb")
    build = Path(task.build)
    assert sorted(path.name for path in build.iterdir()) == ["Dockerfile", "data.txt"]
    assert (build / "Dockerfile").read_text().splitlines()[1] == "WORKDIR /app"
    assert task.verifier.kind == "pytest" and task.verifier.layers == ("pip:pytest==8.4.1,numpy==2.3.1",)
    assert task.limits.verify == 60.0 and task.solution is not None


@pytest.mark.anyio
async def test_plain_prompts_are_judged_by_their_answer(tmp_path, backend):
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, ["id", "question", "answer"])
        rows.writeheader()
        rows.writerows(
            [{"id": "sum", "question": "What is 600 + 400?", "answer": "1,000"}, {"id": "none", "question": "?"}]
        )
    add("plain", tmp_path / "rows.csv")
    found = await check_dataset("plain", backend, CheckOptions(repeats=1, trivial=True), sample=5)
    (check,) = found.checks
    assert check.ok, check.findings
    assert found.skipped[0][0] == "none" and "no answer or" in found.skipped[0][1]


@pytest.mark.parametrize(("given", "right"), [("1000.0", True), (" 1000.\n", True), ("1001", False), ("a 1000", False)])
def test_an_answer_is_compared_by_words_and_numbers(tmp_path, given, right):
    (tmp_path / "given").write_text(given)
    (tmp_path / "expected").write_text("1,000")
    script = [
        sys.executable,
        "-I",
        str(INSIDE / "answer_check.py"),
        str(tmp_path / "given"),
        str(tmp_path / "expected"),
    ]
    assert (subprocess.run(script, capture_output=True, timeout=60).returncode == 0) is right
