"""Datasets by name: the registry file, what adapters make of public forms, and the check of a sample."""

import csv
import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import rollyard as ry
from rollyard.cli.main import app
from rollyard.core.errors import ConfigError, UnknownName, Unsupported
from rollyard.core.limits import Deadline
from rollyard.core.sandbox import SandboxSpec
from rollyard.inside import log_check
from rollyard.runs.rollout.provision import Provision
from rollyard.tasks.adapters import guess_adapter
from rollyard.tasks.dataset_registry import DatasetEntry, add_dataset, read_registry
from rollyard.tasks.harbor.compose import read_services
from rollyard.tasks.lint import TaskFinding
from rollyard.tasks.scaffold import new_task
from rollyard.testing.dataset import DatasetCheck, check_dataset, dataset_table, summarise
from rollyard.testing.tasks import CheckOptions, TaskCheck, check_each

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


FOREIGN = {
    "other.csv": (b"Frage,Antwort\nhow many?,3\n", "fields Frage, Antwort .*--option prompt=FIELD"),
    "latin.csv": ("prompt,answer\nStra\u00dfe?,3\n".encode("latin-1"), "is not UTF-8.*save it as UTF-8"),
    "many.csv": (b"prompt,answer\nred, or green?,3\n", "many.csv:2: more fields than the 2 of the first line.*quotes"),
    "empty.csv": (b"prompt,answer\n", "has no rows"),
    "object.json": (b'{"data": []}', "a file of rows is a list of objects"),
    "cut.jsonl.gz": (gzip.compress(b'{"prompt": "a", "answer": "b"}\n' * 99)[:40], "ends too soon"),
    "odd.jsonl.gz": (b'{"prompt": "a", "answer": "b"}\n', "cannot be read: Not a gzipped file"),
    "odd.parquet": (b"PAR1", "cannot be read"),
    "messages.jsonl": (b'{"prompt": [{"role": "user"}], "answer": "b"}\n', "the row's prompt is a list, not text"),
    "tests.jsonl": (b'{"text": "t", "code": "def f(): 1", "test_list": 5}\n', "cannot be made into a task: TypeError"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_another_form_is_an_error_that_says_what_is_wrong_with_it(tmp_path, name):
    content, said = FOREIGN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        add("foreign", tmp_path / name)
        ry.Taskset.load("foreign")


@pytest.mark.parametrize("name", ["rows.csv", "rows.json", "rows.jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path, name):
    content = {"rows.csv": "prompt,answer\na,b\n", "rows.json": '[{"prompt": "a", "answer": "b"}]'}
    (tmp_path / name).write_text(content.get(name, '{"prompt": "a", "answer": "b"}\n'), encoding="utf-8-sig")
    assert add("marked", tmp_path / name).adapter == "prompts"
    assert ry.Taskset.load("marked")[0].instruction.startswith("a\n")


def test_rows_with_one_id_are_tasks_of_their_own_and_a_line_that_is_no_row_ends_no_load(tmp_path):
    rows = [b'{"id": "a/b", "prompt": "%s", "answer": "1"}' % text for text in (b"first", b"x" * 200_000, b"third")]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([rows[0], b"no row", b"[]", *rows[1:]]))
    add("doubled", tmp_path / "rows.jsonl")
    found = ry.Taskset.load("doubled")
    assert {task.id: task.instruction[:5] for task in found} == {"a__b": "first", "a__b-2": "xxxxx", "a__b-3": "third"}
    assert [(name, reason.partition("rows.jsonl")[2][:3]) for name, reason in found.skipped] == [
        ("row-1", ":2:"), ("row-2", ":3:"),
    ]  # fmt: skip


def test_a_field_of_a_csv_file_may_be_long(tmp_path):
    (tmp_path / "rows.csv").write_text(f"prompt,answer\n{'x' * 200_000},3\n")
    add("long", tmp_path / "rows.csv")
    assert len(ry.Taskset.load("long")[0].instruction) > 200_000


def test_files_without_task_folders_are_not_added_as_folders(tmp_path):
    with pytest.raises(ConfigError, match="no task folders in it"):
        add("rows", jsonl(tmp_path / "rows.jsonl", HUMAN), adapter="folders")


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


def judge(tmp_path, code, *, user=None, **cases):
    """The exit code of the check of `code` as the solution; `user` is an ordinary one who runs it."""
    (tmp_path / "solution.py").write_text(code)
    told = {"file": str(tmp_path / "solution.py"), "helpers": "", "functions": ["twice"], **cases}
    told.setdefault("tests", "assert twice(2) == 4")
    (tmp_path / "cases.json").write_text(json.dumps(told))
    script = [sys.executable, "-I", str(INSIDE / "function_check.py"), str(tmp_path / "cases.json")]
    if user is not None:
        script[0], script[2] = SYSTEM_PYTHON, shutil.copy(script[2], tmp_path)
        for path in (*tmp_path.parents, tmp_path):
            if path.is_relative_to(tempfile.gettempdir()) and path != Path(tempfile.gettempdir()):
                path.chmod(0o777)
    return subprocess.run(script, capture_output=True, timeout=60, user=user).returncode


SYSTEM_PYTHON = "/usr/bin/python3"  # one that every user may run
READS_MEMORY = """
import os, re
def twice(n):
    with open(f"/proc/{os.getppid()}/maps") as maps, open(f"/proc/{os.getppid()}/mem", "rb", 0) as memory:
        for line in maps:
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            if " rw-p " in line:
                memory.seek(low)
                if found := re.search(rb"twice.2. == (\\d+)", memory.read(high - low)):
                    return int(found[1])
"""
FORGERIES = {
    "reads the expected values": "import json\ndef twice(n):\n    return int(json.load(open('cases.json'))['tests'][-1])",
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


@pytest.mark.adversarial
def test_a_solution_whose_tests_run_beside_it_cannot_answer_before_they_do(tmp_path):
    early = (
        'import os\nfor fd in range(3, 9):\n    try:\n        os.write(fd, b\'{"value": ["plain", null]}\\n\' * 3)\n'
    )
    early += "    except OSError:\n        pass\n"
    assert judge(tmp_path, early, together=True) != 0
    assert judge(tmp_path, "def twice(n):\n    return 2 * n", together=True) == 0


@pytest.mark.adversarial
@pytest.mark.skipif(os.getuid() != 0, reason="the check of an ordinary user is started by root")
@pytest.mark.skipif(not os.path.exists(SYSTEM_PYTHON), reason=f"there is no {SYSTEM_PYTHON}")
@pytest.mark.parametrize("code", [*FORGERIES.values(), READS_MEMORY], ids=[*FORGERIES, "reads the judge's memory"])
def test_nor_can_it_where_the_judge_has_no_other_user_for_it(tmp_path, code):
    assert judge(tmp_path, code, user=65534) != 0
    assert judge(tmp_path, "def twice(n):\n    return 2 * n", user=65534) == 0


def test_values_of_every_kind_reach_the_tests_as_they_are(tmp_path):
    same = "def twice(*args):\n    return args[0] if len(args) == 1 else args"
    values = "[1, (2.5, float('inf')), {3: {'a': b'x'}}, {4}, frozenset([5]), None, True, 1j, int]"
    tests = f"for value in {values}:\n    got = twice(value)\n    assert got == value and type(got) is type(value)\n"
    tests += "try:\n    twice(1, 2)[5]\nexcept IndexError:\n    pass\n"
    assert judge(tmp_path, same, tests=tests) == 0
    raising = "def twice(n):\n    raise ValueError('odd')"
    assert judge(tmp_path, raising, tests="try:\n    twice(1)\nexcept ValueError:\n    pass") == 0


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_sample_is_proved_and_trivial_answers_are_told(tmp_path, backend):
    loose = {**MBPP, "task_id": 9, "test_list": ["assert turn((1, 2)) is not None"]}
    wrong = {**MBPP, "task_id": 8, "code": "def turn(pair):\n    return pair"}
    broken = {**MBPP, "task_id": 10, "code": "def turn("}
    add("sample", jsonl(tmp_path / "rows.jsonl", MBPP, loose, wrong, broken))
    found = await check_dataset("sample", backend, CheckOptions(repeats=1, trivial=True), sample=5)
    summary = summarise(found)
    expected = {"found": 4, "loaded": 3, "sampled": 3, "built": 3, "nop 0": 3, "gold 1": 2, "flaky": 0, "trivial": 1}
    assert {name: summary[name] for name in expected} == expected
    rows = {row["task"]: row for row in dataset_table(found)}
    assert rows["mbpp-3"]["result"] == "ok" and "answer solves the task" in rows["mbpp-9"]["reason"]
    assert "solution gets 0" in rows["mbpp-8"]["reason"] and "FAILED: AssertionError" in rows["mbpp-8"]["reason"]
    assert "mbpp-10" in rows["-"]["reason"] and "not Python" in rows["-"]["reason"]


@pytest.mark.anyio
async def test_outcomes_in_the_results_file_are_not_made_again_and_logs_are_kept_whole(tmp_path, backend):
    add("two", jsonl(tmp_path / "rows.jsonl", HUMAN, MBPP))
    options = CheckOptions(repeats=1, logs=tmp_path / "logs")
    results, told = tmp_path / "results.jsonl", []
    first = await check_dataset("two", backend, options, sample=1, results=results, tell=told.append)
    results.write_bytes(results.read_bytes() + b'{"conditions": {"cut o')  # killed while it wrote
    both = await check_dataset("two", backend, options, sample=2, results=results, tell=told.append)
    assert len(told) == len(both.checks) == 2 and first.checks[0] in both.checks
    assert [check.task_id for check in both.checks] == ["HumanEval__7", "mbpp-3"] and all(c.ok for c in both.checks)
    again = await check_dataset("two", backend, options, sample=2, results=results, tell=told.append)
    assert again == both and len(told) == 2
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "HumanEval__7.nop.1", "HumanEval__7.oracle.1", "mbpp-3.nop.1", "mbpp-3.oracle.1",
    ]  # fmt: skip
    assert "[exit 0]" in (tmp_path / "logs" / "mbpp-3.oracle.1" / "verdict.log").read_text()
    results.write_text("no JSON\n")
    with pytest.raises(ConfigError, match=r"results\.jsonl:1: no outcome of a check"):
        await check_dataset("two", backend, options, sample=2, results=results)


HOSTILE_LOGS = """#!/bin/bash
mkdir /logs/verifier/verdict.log
echo inner > /logs/verifier/verdict.log/inner
echo long > /logs/verifier/$(printf '\\377%.0s' {1..250})
echo kept > /logs/verifier/kept
echo 0 > /logs/verifier/reward.txt
"""


@pytest.mark.adversarial
@pytest.mark.anyio
async def test_logs_stay_in_their_folder_whatever_tasks_and_verifiers_name(tmp_path, backend):
    new_task(tmp_path / "task")
    (tmp_path / "task" / "tests" / "test.sh").write_text(HOSTILE_LOGS)
    task = ry.Taskset.load(tmp_path / "task")[0]
    named = [msgspec.structs.replace(task, id=name) for name in ("../../out", str(tmp_path / "out"))]
    options = CheckOptions(repeats=1, logs=tmp_path / "a" / "logs")
    found = [check async for check in check_each(named, backend, options, Provision.of(backend))]
    assert len(found) == 2 and {path.name for path in tmp_path.iterdir()} <= {"task", "a", "cache"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["logs"]
    folders = list((tmp_path / "a" / "logs").glob("*nop.1"))
    assert len(folders) == 2 and {(folder / "kept").read_text() for folder in folders} == {"kept\n"}
    assert {(folder / "verdict.log.written" / "inner").read_text() for folder in folders} == {"inner\n"}
    for name in ("../out", "/out", "a//b"):
        with pytest.raises(ConfigError, match="names no folder below"):
            ry.Taskset([msgspec.structs.replace(task, id=name)]).to_folder(tmp_path / "written")


@pytest.mark.anyio
async def test_tasks_that_differ_in_their_names_alone_keep_their_own_outcomes(tmp_path, backend):
    for name in ("first", "second"):
        new_task(tmp_path / "set" / name)
        shutil.rmtree(tmp_path / "set" / name / "solution")
    results = tmp_path / "results.jsonl"
    for _ in range(2):
        found = await check_dataset(str(tmp_path / "set"), backend, CheckOptions(repeats=1), sample=2, results=results)
        assert [check.task_id for check in found.checks] == ["first", "second"]
    assert len(results.read_bytes().splitlines()) == 2


def test_what_a_check_cannot_use_is_said_before_it_runs(tmp_path):
    new_task(tmp_path / "task")
    (tmp_path / "file").write_text("")
    for options, words in (
        (["--network", "bogus"], "got 'bogus'"),
        (["--build-network", "allow:"], "names no host"),
        (["--filter", "zzz*"], "matches 'zzz*'"),
        (["--results", str(tmp_path)], "cannot be written: Is a directory"),
        (["--results", str(tmp_path / "file" / "x.jsonl")], "cannot be written: Not a directory"),
        (["--logs", str(tmp_path / "file")], "cannot be written: File exists"),
    ):
        done = CliRunner().invoke(app, ["check", "dataset", str(tmp_path / "task"), *options])
        assert isinstance(done.exception, ConfigError) and words in str(done.exception), (options, done.output)
        assert "task" not in done.output


def exercise(root, language, name, files, **config):
    folder = root / language / "exercises" / "practice" / name
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / ".meta" / "config.json").write_text(json.dumps({"files": config}))


def test_datasets_that_are_added_at_the_same_time_are_all_kept(tmp_path):
    source = jsonl(tmp_path / "rows.jsonl", HUMAN)
    together = threading.Barrier(8)

    def add_one(number):
        together.wait()
        add(f"set{number}", source)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add_one, range(8)))
    assert {entry.name for entry in read_registry()} == {f"set{number}" for number in range(8)}


def test_an_exercise_hides_its_tests_and_its_example(tmp_path):
    exercise(
        tmp_path / "poly", "go", "one",
        {"one.go": "package one", "one_test.go": "package one\n\nfunc TestOne(t *testing.T) {\n}\n",
         "cases_test.go": "package one // cases",
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


def test_an_exercise_with_more_example_and_test_files_than_it_names_is_whole(tmp_path):
    meta = ".meta/src/reference/java"
    exercise(
        tmp_path / "poly", "java", "poker",
        {"src/main/java/Poker.java": "stub", "src/test/java/PokerTest.java": "@Test void best() {}",
         "src/test/java/CardTest.java": '@Disabled("x")\n@Test\npublic void card() {}',
         f"{meta}/Card.java": "card", f"{meta}/Poker.java": "poker"},
        solution=["src/main/java/Poker.java"], test=["src/test/java/PokerTest.java"],
        example=[f"{meta}/Card.java", f"{meta}/Poker.java"],
    )  # fmt: skip
    add("poly", tmp_path / "poly")
    (task,) = ry.Taskset.load("poly")
    assert {file.path for file in task.files} == {"src/main/java/Poker.java"}
    answer = Path(task.source) / "solution/answer/src/main/java"
    assert {path.name: path.read_text() for path in answer.iterdir()} == {"Card.java": "card", "Poker.java": "poker"}
    assert json.loads((Path(task.source) / "tests/plan.json").read_text())["expected"] == ["card", "best"]
    assert "Disabled" not in (Path(task.source) / "tests/project/src/test/java/CardTest.java").read_text()


def test_a_file_that_the_agent_is_given_is_no_part_of_the_answer(tmp_path):
    exercise(
        tmp_path / "poly", "rust", "one",
        {"src/lib.rs": "stub", "tests/one.rs": "#[test]\nfn it() {}\n", "Cargo.toml": "[package]",
         ".meta/example.rs": "answer", ".meta/Cargo-example.toml": "[package]"},
        solution=["src/lib.rs", "Cargo.toml"], test=["tests/one.rs"], example=[".meta/example.rs"],
    )  # fmt: skip
    add("poly", tmp_path / "poly")
    (task,) = ry.Taskset.load("poly")
    answer = Path(task.source) / "solution/answer"
    assert [str(path.relative_to(answer)) for path in answer.rglob("*.*")] == ["src/lib.rs"]


def test_a_terminal_bench_folder_becomes_a_task(tmp_path):
    folder = tmp_path / "tb" / "hello"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text("instruction: Say hello.\nmax_test_timeout_sec: 60\ndifficulty: easy\n")
    (folder / "Dockerfile").write_text(
        "FROM ghcr.io/laude-institute/t-bench/python-3-13:20250620\nCOPY data.txt ./\nCOPY tests/given.txt ./\n"
    )
    (folder / "tests" / "given.txt").write_text("for the agent")
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
    assert sorted(path.name for path in build.rglob("*") if path.is_file()) == ["Dockerfile", "data.txt", "given.txt"]
    assert (build / "Dockerfile").read_text().splitlines()[1] == "WORKDIR /app"
    assert task.verifier.kind == "pytest" and task.verifier.layers == ("pip:pytest==8.4.1,numpy==2.3.1",)
    assert task.limits.verify == 60.0 and task.solution is not None
    stages = "FROM --platform=linux/amd64 golang:1 AS tools\nFROM tools as more\nFROM ubuntu:24.04\nCOPY --from=tools /a /a\n"
    (folder / "Dockerfile").write_text((folder / "Dockerfile").read_text() + stages)
    add("here", folder.parent, options={"image": "host"})
    (task,) = ry.Taskset.load("here")
    lines = (Path(task.build) / "Dockerfile").read_text().splitlines()
    named = [line for line in lines if line.startswith("FROM")]
    assert named == ["FROM host", "FROM host AS tools", "FROM tools as more", "FROM host"]
    assert lines[:2] == ["FROM host", "WORKDIR /app"]


AGENT = """
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [ "sh", "-c", "sleep infinity" ]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
"""


def terminal_bench(folder, compose, options=None, **files):
    texts = {"task.yaml": "instruction: Do it.\n", "run-tests.sh": "true\n", "docker-compose.yaml": compose, **files}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    add(folder.parent.name, folder.parent, adapter="terminal-bench", options=options or {})
    (task,) = ry.Taskset.load(folder.parent.name)
    return task


def test_a_program_of_a_terminal_bench_folder_may_still_be_started(tmp_path):
    """And a script that may not be started, which some tasks are about, still may not."""
    names = {"program": 0o755, "locked.sh": 0o644, "api/start": 0o755, "tests/helper": 0o755, "tests/data.sh": 0o600}
    folder = tmp_path / "tb" / "hello"
    for name, mode in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch(mode)
    compose = f"services:\n  client:\n    build:\n      dockerfile: Dockerfile\n{AGENT}  api:\n    build: ./api\n"
    task = terminal_bench(folder, compose, Dockerfile="FROM host\n", **{"api/Dockerfile": "FROM host\n"})
    (api,) = read_services(task.compose).others
    made = [*(Path(task.build) / name for name in ("program", "locked.sh", "api/start")), Path(api.build) / "start"]
    made += [Path(task.source) / "tests" / name for name in ("helper", "data.sh")]
    assert [oct(path.stat().st_mode & 0o777) for path in made] == ["0o755", "0o644", "0o755", "0o755", "0o755", "0o644"]


def test_services_of_terminal_bench_are_services_of_the_task(tmp_path):
    compose = (
        f"services:\n  web:\n    build:\n      dockerfile: Dockerfile\n{AGENT}    ports: ['80']\n    networks: [one]\n"
        "    depends_on: [api, store]\n"
        "  api:\n    build:\n      context: .\n      dockerfile: Dockerfile.api\n    container_name: api\n    networks: [one]\n"
        "  store:\n    image: python:3.13\n    command: [python, /srv/store.py]\n    links: [api]\n"
        "    volumes:\n      - ./store.py:/srv/store.py:ro\n      - ./seed:/seed\n      - kept:/data\n"
        "networks:\n  one:\n    driver: bridge\nvolumes:\n  kept:\n"
    )
    files = {"Dockerfile": "FROM host\n", "Dockerfile.api": "FROM base\n", "store.py": "1\n", "seed/a/b.txt": "b\n"}
    task = terminal_bench(tmp_path / "several" / "shop", compose, **files)
    found = read_services(task.compose)
    api, store = found.others
    assert Path(task.build, "Dockerfile").read_text() == "FROM host\n"
    assert set(found.main.depends_on) == {"api", "store"} and not found.main.volumes and not found.main.env
    assert Path(api.build, "Dockerfile").read_text() == "FROM base\n"
    assert set(store.depends_on) == {"api"} and [volume.name for volume in store.volumes] == ["kept"]
    assert Path(store.build, "Dockerfile").read_text().splitlines() == [
        "FROM python:3.13", "COPY mounted/store.py /srv/store.py", "COPY mounted/seed/ /seed/",
    ]  # fmt: skip
    assert Path(store.build, "mounted/seed/a/b.txt").read_text() == "b\n"


def test_a_terminal_bench_folder_that_is_built_elsewhere_or_asks_for_more_is_not_taken_for_a_plain_one(tmp_path):
    compose = f"services:\n  client:\n    build:\n      context: client\n      dockerfile: Dockerfile\n{AGENT}"
    base = "FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04:20250624\n"
    task = terminal_bench(tmp_path / "inner" / "one", compose, **{"client/Dockerfile": base})
    assert task.compose is None and Path(task.build).name == "client"
    assert Path(task.build, "Dockerfile").read_text() == f"{base}WORKDIR /app\n"
    more = f"services:\n  client:\n    build:\n      dockerfile: Dockerfile\n{AGENT}    tmpfs: ['/root']\n"
    task = terminal_bench(tmp_path / "more" / "one", more, Dockerfile="FROM host\n")
    with pytest.raises(Unsupported, match="'tmpfs' is not supported"):
        read_services(task.compose)


FETCHING = """#!/bin/bash
# Install curl
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.7.13/install.sh | sh
source $HOME/.local/bin/env
if [ "$PWD" = "/" ]; then
    echo "Error: No working directory set."
    exit 1
fi
uv venv .tbench-testing
source .tbench-testing/bin/activate
uv pip install pytest==8.4.1 \\
    numpy==2.3.1
"""


def test_what_a_script_does_beside_fetching_pytest_is_done(tmp_path):
    compose = "services:\n  client:\n    build:\n      dockerfile: Dockerfile\n" + AGENT
    last = "uv run pytest $TEST_DIR/test_outputs.py -rA\n"
    files = {"Dockerfile": "FROM host\nCOPY tests/given /app/given\n", "tests/given/a/b.txt": "b\n"}
    plain = terminal_bench(tmp_path / "plain" / "one", compose, **files, **{"run-tests.sh": FETCHING + last})
    assert plain.verifier.kind == "pytest" and plain.verifier.layers == ("pip:pytest==8.4.1,numpy==2.3.1",)
    assert Path(plain.build, "tests/given/a/b.txt").read_text() == "b\n"
    more = f"{FETCHING}cp $TEST_DIR/test.py /app/test.py\n{last}"
    task = terminal_bench(tmp_path / "more" / "one", compose, **files, **{"run-tests.sh": more})
    assert task.verifier.kind != "pytest" and task.verifier.layers == plain.verifier.layers
    (tests,) = task.verifier.tests
    free = {"run-tests.sh": FETCHING.replace("numpy==2.3.1", "numpy") + last}
    versions = {"packages": "numpy==2.2.0,scipy==1.16.0"}
    task = terminal_bench(tmp_path / "free" / "one", compose, versions, **files, **free)
    assert task.verifier.layers == ("pip:pytest==8.4.1,numpy==2.2.0",)
    lines = Path(tests, "run-tests.sh").read_text().splitlines()
    assert lines == ["cp $TEST_DIR/test.py /app/test.py", "pytest $TEST_DIR/test_outputs.py -rA"]


@pytest.mark.anyio
async def test_what_a_script_prints_is_no_part_of_the_reward(tmp_path, backend):
    compose = "services:\n  client:\n    build:\n      dockerfile: Dockerfile\n" + AGENT
    files = {"Dockerfile": "FROM host\nWORKDIR /app\n", "run-tests.sh": "echo looking\ntest -f /app/answer\n"}
    terminal_bench(tmp_path / "talking" / "one", compose, **files, **{"solution.sh": "echo 1 > /app/answer\n"})
    found = await check_dataset("talking", backend, CheckOptions(repeats=1), sample=1)
    assert summarise(found) | {"nop 0": 1, "gold 1": 1} == summarise(found), dataset_table(found)


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


@pytest.fixture
def instance(tmp_path):
    """A SWE-bench folder, and its repository with a commit after the base."""
    repository = tmp_path / "repositories" / "acme__widget"
    repository.mkdir(parents=True)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run([*git, "init", "-q"], cwd=repository, check=True)
    for text in ("fault", "the answer of a later commit"):
        (repository / "widget.py").write_text(text)
        subprocess.run([*git, "add", "."], cwd=repository, check=True)
        subprocess.run([*git, "commit", "-qm", text], cwd=repository, check=True)
    base = subprocess.run(["git", "rev-parse", "HEAD~1"], cwd=repository, capture_output=True, text=True, check=True)
    folder = tmp_path / "swe" / "acme__widget-1"
    folder.mkdir(parents=True)
    files = {
        "task.yaml": "instance_id: acme__widget-1\nrepo: acme/widget\nimage: acme/i:1\nlog_parser: parse_log_flask\n"
        f"version: '7.2'\nbase_commit: {base.stdout}",
        "tests.json": json.dumps({"FAIL_TO_PASS": ["test_w.py::test_new"], "PASS_TO_PASS": ["test_w.py::test_old"]}),
        "gold.patch": "diff --git a/widget.py b/widget.py\n--- gold\n",
        "test.patch": "diff --git a/test_w.py b/test_w.py\n--- tests\n",
        "eval.sh": ": '>>>>> Start Test Output'\npytest -rA test_w.py\n: '>>>>> End Test Output'\n",
        "Dockerfile": 'echo "Current environment: x"\ncd /testbed\nsed -i s/a/b/ setup.py\npython -m pip install .\n'
        "\n# Configure git\n",
        "environment.yml": "dependencies:\n  - pip=24.2=py39h0\n  - python=3.9.20=h1\n  - numpy=1.19.2=py39h5\n  - xz=5=h\n"
        "  - pip:\n      - attrs==23.1.0\n",
        "problem_statement.md": "The widget is at fault.",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder.parent, repository.parent


def test_an_instance_is_built_from_its_base_commit_alone(instance):
    source, repositories = instance
    assert add("swe", source, options={"repositories": str(repositories)}).adapter == "swebench"
    (task,) = ry.Taskset.load("swe")
    build = Path(task.build)
    dockerfile = (build / "Dockerfile").read_text()
    pins = "python -m pip install -q numpy==1.19.2 attrs==23.1.0"
    assert "RUN python3.9 -m venv" in dockerfile and pins in dockerfile and "xz" not in dockerfile
    assert dockerfile.index(pins) < dockerfile.index("ADD repository.tar.gz")  # one environment for all of a version
    assert "export SETUPTOOLS_SCM_PRETEND_VERSION=7.2\n" in (build / "install.sh").read_text()
    assert (build / "install.sh").read_text().endswith("sed -i s/a/b/ setup.py\npython -m pip install .\n")
    with tarfile.open(build / "repository.tar.gz") as tree:
        assert tree.getnames() == ["widget.py"] and tree.extractfile("widget.py").read() == b"fault"
    seen = [task.instruction, *(path.read_text(errors="replace") for path in build.iterdir())]
    assert not any(word in text for text in seen for word in ("gold", "--- tests", "test_new", "later commit"))


def test_python_2_gets_its_environment_by_virtualenv(instance):
    source, repositories = instance
    declared = source / "acme__widget-1" / "environment.yml"
    declared.write_text(declared.read_text().replace("3.9.20", "2.7.18"))
    add("swe", source, options={"repositories": str(repositories)})
    (task,) = ry.Taskset.load("swe")
    dockerfile = (Path(task.build) / "Dockerfile").read_text()
    assert "virtualenv -q -p python2.7 /opt/testbed" in dockerfile and "python2.7 -m venv" not in dockerfile


@pytest.mark.parametrize(("command", "inner"), [("pytest -rA test_w.py", True), ("pytest -rA test_w.py more/", False)])
def test_tests_of_a_pytest_that_a_test_starts_need_no_record(instance, command, inner):
    folder = instance[0] / "acme__widget-1"
    name, old = "test_made.py::test_hello", "test_w.py::test_old"
    wanted = {"FAIL_TO_PASS": ["test_w.py::test_new"], "PASS_TO_PASS": [old, name]}
    (folder / "tests.json").write_text(json.dumps(wanted))
    (folder / "eval.sh").write_text((folder / "eval.sh").read_text().replace("pytest -rA test_w.py", command))
    add("swe", instance[0])
    (task,) = ry.Taskset.load("swe")
    tests = json.loads((Path(task.source) / "tests" / "tests.json").read_text())
    log = "".join(f"PASSED {one}\n" for one in ("test_w.py::test_new", old, name))
    seen = {"prepared": True, "starts": 1, "ends": 1, "strange": 0, "controls": ["failed"], "control": None}
    tested = [[one, "call", "passed", False, one] for one in ("test_w.py::test_new", old)]
    refused = log_check.find_forgery(log, tests, {**seen, "tests": tested})
    assert refused is None if inner else name in refused
    assert old in log_check.find_forgery(log, tests, {**seen, "tests": tested[:1]})
    assert log_check.find_missing(log.replace(f"PASSED {name}\n", ""), tests) == [name]


def test_a_folder_that_hides_a_dataset_says_so(tmp_path, monkeypatch):
    add("small", jsonl(tmp_path / "rows.jsonl", HUMAN))
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"the dataset of this name is small@1"):
        ry.Taskset.load("small")


def test_without_repositories_an_instance_runs_in_its_own_image(instance):
    add("swe", instance[0])
    (task,) = ry.Taskset.load("swe")
    assert task.build is None and task.image == "acme/i:1" and task.workdir == "/testbed"
    (seal,) = task.files
    assert task.setup == ("sh seal_repository.sh . && rm seal_repository.sh",) and seal.path == "seal_repository.sh"
    base = (instance[0] / "acme__widget-1" / "task.yaml").read_text().split()[-1]
    plan = (Path(task.source) / "tests" / "plan.json").read_text()
    assert f"git rev-parse {base}^{{tree}}" in plan and "checkout -q $tree -- test_w.py" in plan
    add("lost", instance[0], options={"repositories": str(instance[0])})
    with pytest.raises(ConfigError, match="no repository of acme/widget in it"):
        ry.Taskset.load("lost")


def test_rows_are_instances_too(tmp_path):
    row = {
        "instance_id": "django__django-1",
        "repo": "django/django",
        "base_commit": "c" * 40,
        "problem_statement": "It is at fault.",
        "patch": "p",
        "test_patch": "diff --git a/tests/forms/test_x.py b/tests/forms/test_x.py\n",
        "FAIL_TO_PASS": '["a (b.C)"]',
        "PASS_TO_PASS": "[]",
    }
    smith = {
        "instance_id": "o__r.1.f__2",
        "repo": "o/r",
        "problem_statement": "It broke.",
        "patch": "the fault",
        "image_name": "o/img",
        "FAIL_TO_PASS": ["tests/test_a.py::test_a"],
        "PASS_TO_PASS": [],
    }
    add("rows", jsonl(tmp_path / "rows.jsonl", row, smith, {**row, "instance_id": "none", "FAIL_TO_PASS": "[]"}))
    found = ry.Taskset.load("rows")
    official, broken = found
    plan = json.loads((Path(official.source) / "tests/plan.json").read_text())
    assert official.image == "swebench/sweb.eval.x86_64.django_1776_django-1:latest"
    assert plan["command"].endswith("--parallel 1 forms.test_x @CONTROL@")
    assert plan["control"]["path"] == "tests/forms/test_NAME.py"
    assert "git apply -R" in (Path(broken.source) / "solution/solve.sh").read_text()
    assert (Path(broken.build) / "Dockerfile").read_text().startswith("FROM o/img\n")
    assert "no test fails before its patch" in found.skipped[0].reason
    gym = {**row, "instance_id": "getmoto__Moto-1", "repo": "getmoto/moto", "FAIL_TO_PASS": ["tests/t.py::a"]}
    add("gym", jsonl(tmp_path / "gym.jsonl", gym), options={"image": "x/sweb.{owner}_s_{rest}:latest"})
    assert [task.image for task in ry.Taskset.load("gym")] == ["x/sweb.getmoto_s_moto-1:latest"]


LOGS = {
    "pytest": (
        "PASSED t.py::a\nFAILED t.py::b - no - way\nSKIPPED [2] t.py:3: why\n",
        {"t.py::a": "PASSED", "t.py::b": "FAILED"},
    ),
    "pytest-paths": ("PASSED t.py::a[/tmp/x/file]\n", {"t.py::a[/file]": "PASSED"}),
    "pytest-long": (
        "PASSED t.py::a[x y]\n\x1b[32mt.py::b PASSED\x1b[0m\n",
        {"t.py::a[x y]": "PASSED", "t.py::b": "PASSED"},
    ),
    "sympy": (
        "test_a ok\ntest_b F\n__ sympy/x.py:test_c __\n",
        {"sympy/x.py:test_c": "FAILED", "test_a": "PASSED", "test_b": "FAILED"},
    ),
    "django": (
        "test_a (m.C) ... printed\nok\ntest_b (m.C) ... FAIL\n",
        {"test_a (m.C)": "PASSED", "test_b (m.C)": "FAILED"},
    ),
    "matplotlib": ("PASSED t.py::a[MouseButton.LEFT]\n", {"t.py::a[1]": "PASSED"}),
    "seaborn": ("t.py::a PASSED [ 3%]\nFAILED t.py::b\n", {"t.py::a": "PASSED", "t.py::b": "FAILED"}),
}


@pytest.mark.parametrize("form", LOGS)
def test_logs_are_read_as_their_harness_reads_them(form):
    log, expected = LOGS[form]
    assert log_check.FORMATS[form](log) == expected


def test_what_had_to_pass_is_missed_by_the_rules_of_the_harness():
    tests = {"format": "pytest", "FAIL_TO_PASS": ["new"], "PASS_TO_PASS": ["old", "cut[a"]}
    assert log_check.find_missing("PASSED new\nSKIPPED old\nXFAIL cut[a-b]\n", tests) == []
    assert log_check.find_missing("SKIPPED new\nPASSED old\n", tests) == ["new", "cut[a"]
    assert log_check.find_missing("PASSED new\nPASSED old\nPASSED cut[a-b]\nFAILED cut[a-c]\n", tests) == ["cut[a"]


@pytest.mark.anyio
async def test_what_was_built_is_given_back_once_no_other_task_begins_with_it(tmp_path, backend):
    """Three tasks begin alike; a fourth state was there before the check, and stays."""
    shared = "FROM host\nRUN echo shared > /srv/shared\n"
    for name in ("a", "b", "c"):
        new_task(tmp_path / "set" / name)
        shutil.rmtree(tmp_path / "set" / name / "solution")
        environment = tmp_path / "set" / name / "environment"
        environment.mkdir(exist_ok=True)
        (environment / "Dockerfile").write_text(f"{shared}RUN echo {name} > /srv/own\n")
    tasks = ry.Taskset.load(tmp_path / "set")
    states, seen = backend.images.root / "builds", []
    others = {file.name for file in states.glob("*")}  # of other tests

    def kept_states():
        return {file.name for file in states.iterdir()} - others

    def tell(check):
        seen.append((check.ok, len(kept_states())))

    earlier = Provision.of(backend)
    await earlier.image(tasks["c"], backend, Deadline.after(60, "test"))

    options = CheckOptions(repeats=1, parallel=1, keep_built=False, filter="[ab]")
    await check_dataset(str(tmp_path / "set"), backend, options, sample=2, tell=tell)
    assert seen == [(True, 2), (True, 2)] and kept_states() == earlier.made_states

    await backend.remove_states(earlier.made_states)
    options = CheckOptions(repeats=1, parallel=1, keep_built=False)
    before = {path.name for path in (backend.images.root / "trees").glob("*")}
    seen.clear()
    await check_dataset(str(tmp_path / "set"), backend, options, sample=3, tell=tell)
    assert seen == [(True, 1), (True, 1), (True, 0)]  # the shared one stays for the others
    assert {path.name for path in (backend.images.root / "trees").glob("*")} <= before
    kept = CheckOptions(repeats=1, parallel=1)
    await check_dataset(str(tmp_path / "set"), backend, kept, sample=3)
    assert len(kept_states()) == 4


@pytest.mark.anyio
async def test_a_state_that_a_sandbox_uses_or_that_has_a_name_is_not_given_back(tmp_path, backend):
    new_task(tmp_path / "task")
    environment = tmp_path / "task" / "environment"
    environment.mkdir(exist_ok=True)
    (environment / "Dockerfile").write_text("FROM host\nRUN echo one > /srv/one\n")
    provision = Provision.of(backend)
    built = await provision.image(ry.Taskset.load(tmp_path / "task")[0], backend, Deadline.after(60, "test"))
    async with backend.open(SandboxSpec(image=built.image)) as sandbox:
        assert await backend.remove_states(provision.made_states) == []
        assert (await sandbox.exec("cat /srv/one", timeout=20)).stdout == b"one\n"
    await backend.images.catalog.name(built.image, ["mine:1"])
    assert await backend.remove_states(provision.made_states) == []
    await backend.images.remove("mine:1")
    assert await backend.remove_states(provision.made_states) == []  # it is gone already


def test_the_reason_of_a_long_log_has_its_end():
    problem = TaskFinding(
        level="error", where="oracle", message=f"gets 0: its log ends: {'line ' * 300}{'=' * 70} E no such host"
    )
    check = TaskCheck(task_id="a", digest="", ok=False, files=0, bytes=0, findings=(problem,))
    (row,) = dataset_table(DatasetCheck(name="n", loaded=1, skipped=(), checks=(check,)))
    assert row["reason"].startswith("oracle: gets 0") and row["reason"].endswith("line E no such host")
    assert len(row["reason"]) < 320
