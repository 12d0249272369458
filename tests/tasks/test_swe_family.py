"""SWE-bench Multilingual, SWE-bench Pro and R2E-Gym: what their rows and folders become, and how they are judged.

The rows are written by hand. The shape of Multilingual's folders is that of github.com/SWE-bench/swe-bench-multilingual-tasks; of
Pro's rows that of the columns which `swe_bench_pro_eval.py` and `helper_code` of github.com/scaleapi/SWE-bench_Pro-os read; of
R2E-Gym's that of `DatasetRow` and `ParsedCommit` in github.com/R2E-Gym/R2E-Gym.
"""

import json
import subprocess
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.inside import log_check
from rollyard.runs.rollout.provision import Provision
from rollyard.tasks.adapters import guess_adapter, load_adapter
from rollyard.tasks.adapters.drafts import string_list
from rollyard.tasks.dataset_registry import DatasetEntry, add_dataset
from rollyard.testing.tasks import CheckOptions, check_task

WRONG, RIGHT = "def twice(n):\n    return n + n + 1\n", "def twice(n):\n    return n + n\n"


@pytest.fixture(autouse=True)
def own_registry(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLYARD_DATASETS", str(tmp_path / "registry" / "datasets.toml"))
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "cache"))


def add(name, source, **options):
    return add_dataset(DatasetEntry(name=name, source=str(source), adapter="", options=options))


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def git(place, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    return subprocess.run(
        ["git", *who, *words], cwd=place, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def on_host(folder, workdir, repository):
    """The task on an image of this machine with the repository in it, in place of the public one that it names."""
    file = folder / "task.toml"
    lines = [line for line in file.read_text().splitlines() if not line.startswith("docker_image")]
    file.write_text("\n".join([*lines, ""]))
    (folder / "environment").mkdir()
    subprocess.run(["tar", "cf", folder / "environment/repository.tar", "-C", repository, "."], check=True, timeout=60)
    build = [
        "FROM host",
        f"ADD repository.tar {workdir}/",
        "RUN mkdir /r2e_tests && echo answer > /r2e_tests/test_1.py",
    ]
    (folder / "environment/Dockerfile").write_text("\n".join([*build, f"WORKDIR {workdir}", ""]))
    (task,) = ry.Taskset.load(str(folder))
    return task


async def prove(task, backend):
    done = await check_task(task, backend, CheckOptions(repeats=1, allow_unsafe=True), Provision.of(backend))
    logs = [problem for proof in done.proofs for problem in proof.problems]
    return {proof.agent: proof.rewards for proof in done.proofs}, [*done.findings, *logs]


MULTILINGUAL = {
    "task.yaml": "instance_id: acme__widget-1\nrepo: acme/widget\nimage: acme/widget:1\nlog_parser: parse_log_gotest\n"
    "base_commit: " + "b" * 40 + "\nversion: '1'\n",
    "tests.json": '{"FAIL_TO_PASS": ["TestNew"], "PASS_TO_PASS": []}',
    "gold.patch": "diff --git a/w.go b/w.go\n",
    "test.patch": "diff --git a/w_test.go b/w_test.go\n",
    "problem_statement.md": "The widget is at fault.",
    "Dockerfile": "FROM ubuntu:jammy\n",
    "eval.sh": "#!/bin/bash\nset -uxo pipefail\ngit apply -v - <<'EOF_114329324912'\ndiff --git a/w_test.go b/w_test.go\n"
    "EOF_114329324912\nmake clean\nmake\n: '>>>>> Start Test Output'\n(go test -v ./...) | cat\n: '>>>>> End Test Output'\n"
    "git checkout " + "b" * 40 + " w_test.go\n",
}  # fmt: skip


def write_folder(place, **changed):
    folder = place / "acme__widget-1"
    folder.mkdir(parents=True)
    for name, text in {**MULTILINGUAL, **changed}.items():
        (folder / name).write_text(text)
    return place


def test_an_instance_of_another_language_is_built_before_its_tests_and_read_by_its_own_rules(tmp_path):
    add("swe", write_folder(tmp_path / "tasks"))
    (task,) = ry.Taskset.load("swe")
    tests = Path(task.source) / "tests"
    plan = json.loads((tests / "plan.json").read_text())
    assert task.image == "acme/widget:1" and json.loads((tests / "tests.json").read_text())["format"] == "go"
    assert plan["prepare"].index("git apply") < plan["prepare"].index(
        "{\nmake clean\nmake\n} > /logs/verifier/build.log"
    )
    assert "set -x\n(go test -v ./...) | cat" in plan["command"]  # some readers need the names of the commands
    assert task.verifier.layers  # its image may have no Python to read the log with


def test_programs_in_a_public_image_of_swebench_find_its_conda_environment_first(tmp_path):
    row = {"instance_id": "pallets__flask-5014", "repo": "pallets/flask", "problem_statement": "A fault.", "patch": "p",
           "test_patch": "diff --git a/tests/test_a.py b/tests/test_a.py\n", "base_commit": "b" * 40,
           "FAIL_TO_PASS": ["tests/test_a.py::test_a"], "PASS_TO_PASS": []}  # fmt: skip
    add("public", jsonl(tmp_path / "public.jsonl", row))
    add("own", jsonl(tmp_path / "own.jsonl", row), image="acme/{instance}:1")
    (public,), (own,) = ry.Taskset.load("public"), ry.Taskset.load("own")
    assert public.env["PATH"].startswith("/opt/miniconda3/envs/testbed/bin:") and "PATH" not in own.env


def test_output_between_marks_that_are_echoed_is_found_too(tmp_path):
    text = MULTILINGUAL["eval.sh"].replace("make clean\nmake\n: '>>>>>", "{ set +x; } 2>/dev/null\necho '>>>>>", 1)
    text = text.replace(": '>>>>> End", "echo '>>>>> End")
    add("swe", write_folder(tmp_path / "tasks", **{"eval.sh": text}))
    (task,) = ry.Taskset.load("swe")
    plan = json.loads((Path(task.source) / "tests/plan.json").read_text())
    assert plan["command"].splitlines()[1] == "(go test -v ./...) | cat" and "build.log" not in plan["prepare"]


def test_a_subset_chooses_folders_and_a_misspelt_one_is_an_error(tmp_path):
    add("swe", write_folder(tmp_path / "tasks"))
    add("lite", tmp_path / "tasks", subset="lite")
    add("misspelt", tmp_path / "tasks", subset="verifed")
    assert (len(ry.Taskset.load("swe")), len(ry.Taskset.load("lite"))) == (1, 0)
    with pytest.raises(UnknownName, match="verifed"):
        ry.Taskset.load("misspelt")


def test_a_log_that_nothing_reads_is_a_reason(tmp_path):
    text = MULTILINGUAL["task.yaml"].replace("gotest", "smalltalk")
    add("swe", write_folder(tmp_path / "tasks", **{"task.yaml": text}))
    with pytest.raises(ConfigError, match="no reader for logs of 'parse_log_smalltalk'"):
        ry.Taskset.load("swe")


PASSED_FAILED = {"a": "PASSED", "b c": "FAILED"}
LOGS = {
    "ant": ("   [junit] [PASS] a\n [junit] [ERR] b c\n", PASSED_FAILED),
    "cargo": ("test a ... ok\ntest b ... FAILED\ntest c ... ignored\n", {"a": "PASSED", "b": "FAILED"}),
    "cucumber": ("a ....\nb c ..F\n", PASSED_FAILED),
    "doctest": (
        'x<doctest><TestCase name="t"><SubCase name="a"><Expression success="true"/></SubCase><SubCase name="b">'
        '<Expression success="false"/></SubCase></TestCase></doctest>y',
        {"t > a": "PASSED", "t > b": "FAILED"},
    ),
    "go": ("--- PASS: a (0.00s)\n    --- FAIL: b c (1s)\n--- SKIP: d (0s)\n", {**PASSED_FAILED, "d": "SKIPPED"}),
    "googletest": ("[       OK ] a (0 ms)\n[  FAILED  ] b c (1 ms)\n[  FAILED  ] d\n", PASSED_FAILED),
    "gradle": ("a > b PASSED\nc > d\nwarning\nFAILED\n> Task :x FAILED\n", {"a > b": "PASSED", "c > d": "FAILED"}),
    "jest": ("  ✓ a (3 ms)\n  ✕ b c\n  ○ d\n", {**PASSED_FAILED, "d": "SKIPPED"}),
    "jest-json": ("[PASSED] a\n[FAILED] b c\n", PASSED_FAILED),
    "jq": ("PASS: a\nFAIL: b c\n", PASSED_FAILED),
    "karma": (
        " lost\nStarting browser\n  suite\n    ✔ a\n    ✖ b\nSUMMARY:\n ✔ c\n",
        {"suite > a": "PASSED", "suite > b": "FAILED"},
    ),
    "maven": ("+ mvn -Dtest=a -B\nBUILD SUCCESS\n+ mvn -Dtest=b\n[INFO] BUILD FAILURE\n", {"a": "PASSED", "b": "FAILED"}),
    "micropython": ("pass  a\nFAIL  b c\nskip  d\n", {**PASSED_FAILED, "d": "SKIPPED"}),
    "minitest": ("a. = 0.01 s = .\nb c. = 0.02 s = F\n", PASSED_FAILED),
    "phpunit": ("The Suite (My\\Suite)\n ✔ a\n ✘ b c\n", {"The Suite > a": "PASSED", "The Suite > b c": "FAILED"}),
    "redis": ("[ok]: a (3 ms)\n[err]: b c in tests/x.tcl\n[ignore]: d\n", {**PASSED_FAILED, "d": "SKIPPED"}),
    "rspec": ("a - passed\nb c - failed\nd - pending\n", PASSED_FAILED),
    "ruby-unit": ("test: a:\t.: (0.1)\nb c:\tF\nd:\tO\n", {**PASSED_FAILED, "d": "SKIPPED"}),
    "tap": ("ok 1 a\nnot ok 2 b c\n", PASSED_FAILED),
    "vitest": ("✓ a 3ms\n× b c\n↓ d [skipped]\n", {**PASSED_FAILED, "d": "SKIPPED"}),  # noqa: RUF001 - its own sign
    "results": ('{"tests": [{"name": "a", "status": "PASSED"}, {"name": "b", "status": "SKIPPED"}]}', {"a": "PASSED"}),
    "r2e": (
        "PASSED x::no\n== short test summary info ==\nPASSED r/t.py::C::a\n\x1b[31mFAILED\x1b[0m r/t.py::b - why\n1 failed\n",
        {"C.a": "PASSED", "b": "FAILED"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", LOGS)
def test_logs_of_other_runners_are_read_as_their_harness_reads_them(form):
    log, expected = LOGS[form]
    assert log_check.FORMATS[form](log) == expected


def test_where_every_status_is_expected_another_test_is_a_difference():
    tests = {"format": "r2e", "EXPECTED": {"a": "PASSED", "\x1b[1mb - why": "FAILED"}}
    summary = "short test summary info\nPASSED t::a\nFAILED t::b - x\n"
    assert log_check.find_missing(summary, tests) == []
    assert log_check.find_missing(summary + "PASSED t::c\n", tests) == ["c"]
    assert log_check.find_missing(summary.replace("FAILED t::b", "PASSED t::b"), tests) == ["b"]


def test_lists_in_strings_are_json_or_as_python_writes_them():
    assert string_list('["a b", "c"]') == string_list("['a b', 'c']") == ["a b", "c"]
    with pytest.raises(ConfigError, match="no list of names"):
        string_list("[__import__('os').getcwd()]")


RUN_SCRIPT = "echo wanted $1; PYTHONPATH=. python3 test_twice.py\n"
PARSER = (
    "import json, sys\n"
    "rows = [line.split() for line in open(sys.argv[1]) if line.startswith(('PASSED ', 'FAILED '))]\n"
    "json.dump({'tests': [{'name': name, 'status': status} for status, name in rows]}, open(sys.argv[3], 'w'))\n"
)
OLD_TEST = "from twice import twice\nprint('PASSED' if twice(0) < 9 else 'FAILED', 'old')\n"
NEW_TEST = OLD_TEST + "print('PASSED' if twice(2) == 4 else 'FAILED', 'new')\n"


@pytest.fixture
def pro(tmp_path):
    """A row with its repository, whose later commit has the answer, and its scripts."""
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init", "-q")
    (repository / "twice.py").write_text(WRONG)
    (repository / "test_twice.py").write_text(OLD_TEST)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "base")
    base = git(repository, "rev-parse", "HEAD").strip()
    (repository / "test_twice.py").write_text(NEW_TEST)
    test_patch = git(repository, "diff")
    git(repository, "checkout", "-q", ".")
    (repository / "twice.py").write_text(RIGHT)
    patch = git(repository, "diff")
    git(repository, "commit", "-qam", "later")
    git(repository, "reset", "-q", "--hard", base)
    name = "instance_acme__widget-1-vnan"
    scripts = tmp_path / "run_scripts" / name
    scripts.mkdir(parents=True)
    (scripts / "run_script.sh").write_text(RUN_SCRIPT)
    (scripts / "parser.py").write_text(PARSER)
    row = {
        "instance_id": name,
        "repo": "acme/widget",
        "base_commit": base,
        "problem_statement": "Twice is wrong.",
        "requirements": "It doubles.",
        "interface": "",
        "patch": patch,
        "test_patch": test_patch,
        "fail_to_pass": "['new']",
        "pass_to_pass": '["old"]',
        "before_repo_set_cmd": f"git reset --hard {base}\ngit checkout LATER -- test_twice.py",
        "selected_test_files_to_run": '["test_twice.py", "a b"]',
        "dockerhub_tag": "acme.widget-1",
    }
    return row, scripts.parent, repository


def test_a_row_of_pro_needs_its_scripts_and_says_what_it_lacks(pro, tmp_path):
    row, scripts, _ = pro
    lacking = [{**row, "instance_id": "instance_other"}, {**row, "instance_id": "instance_third", "test_patch": ""}]
    source = jsonl(tmp_path / "pro.jsonl", row, *lacking)
    assert guess_adapter(source) == "swebench-pro"
    with pytest.raises(ConfigError, match="do not say how tests are run"):
        list(load_adapter("swebench-pro").read(source, {}))
    add("pro", source, run_scripts=str(scripts))
    found = ry.Taskset.load("pro")
    (task,) = found
    assert task.image == "jefzda/sweap-images:acme.widget-1" and task.workdir == "/app"
    assert "Requirements:\nIt doubles." in task.instruction and "New interfaces" not in task.instruction
    assert "run_script.sh 'test_twice.py,a b' >" in (Path(task.source) / "tests/run.sh").read_text()
    reasons = [one.reason for one in found.skipped]
    assert "run_script.sh: No such file" in reasons[0] and "no test_patch" in reasons[1]


@pytest.mark.anyio
async def test_an_instance_of_pro_is_judged_by_its_own_script_and_parser(pro, tmp_path, backend):
    row, scripts, repository = pro
    folder = tmp_path / "task"
    (draft,) = load_adapter("swebench-pro").read(jsonl(tmp_path / "pro.jsonl", row), {"run_scripts": str(scripts)})
    draft.write(folder)
    rewards, said = await prove(on_host(folder, "/app", repository), backend)
    assert rewards == {"nop": (0.0,), "oracle": (1.0,)}, said


RUNNER = (
    "import sys\nsys.path.insert(0, '.')\nfrom twice import twice\nprint('== short test summary info ==')\n"
    "for n in (0, 2):\n    print('PASSED' if twice(n) == n + n else 'FAILED', f'r2e_tests/test_1.py::test_{n}')\n"
)


def r2e_row(**changed):
    diff = {"header": {"file": {"path": "twice.py"}, "misc_line": None}, "old_file_content": WRONG,
            "new_file_content": RIGHT, "minus_file": {"path": "a/twice.py"}, "plus_file": {"path": "b/twice.py"}}  # fmt: skip
    notes = {**diff, "header": {"file": {"path": "NEWS.rst"}}, "new_file_content": "the news"}
    gone = {**diff, "header": {"file": {"path": "old.py"}}, "new_file_content": "", "plus_file": {"path": "/dev/null"}}
    return {
        "repo_name": "pillow",
        "docker_image": "namanjain12/pillow_final:0123",
        "commit_hash": "0123",
        "parsed_commit_content": json.dumps({"file_diffs": [diff, notes, gone], "commit_message": "The answer."}),
        "execution_result_content": json.dumps(
            {"test_file_names": ["unittest_custom_runner.py"], "test_file_codes": [RUNNER], "repo_name": "pillow"}
        ),
        "modified_files": ["twice.py"],
        "prompt": "Write an issue for this patch: the answer",
        "problem_statement": "Look:\n[ISSUE]\nTwice is wrong.\n[/ISSUE]\n",
        "expected_output_json": json.dumps({"test_0": "PASSED", "test_2": "PASSED"}),
        **changed,
    }


def test_a_row_of_r2e_gym_keeps_its_answer_from_the_agent(tmp_path):
    bad = [r2e_row(commit_hash="1", expected_output_json="{}"), r2e_row(commit_hash="2", parsed_commit_content="{")]
    source = jsonl(tmp_path / "r2e.jsonl", r2e_row(), *bad, r2e_row(commit_hash="3", problem_statement=""))
    assert add("r2e", source).adapter == "r2e-gym"
    found = ry.Taskset.load("r2e")
    (task,) = found
    assert task.image == "namanjain12/pillow_final:0123" and task.instruction.startswith("Twice is wrong.\n")
    assert "answer" not in task.instruction
    reasons = [one.reason for one in found.skipped]
    assert "no test passes after its commit" in reasons[0]
    assert "parsed_commit_content" in reasons[1] and "no problem_statement" in reasons[2]


@pytest.mark.anyio
async def test_an_instance_of_r2e_gym_is_judged_by_how_every_test_ends(tmp_path, backend):
    repository = tmp_path / "repository"
    (repository / ".venv/bin").mkdir(parents=True)
    (repository / ".venv/bin/python").write_text('#!/bin/sh\nexec python3 "$@"\n')
    (repository / ".venv/bin/python").chmod(0o755)
    git(repository, "init", "-q")
    for name, text in {"twice.py": WRONG, "old.py": "", "run_tests.sh": "the answer"}.items():
        (repository / name).write_text(text)
    git(repository, "add", "twice.py", "old.py")
    git(repository, "commit", "-qm", "base")
    folder = tmp_path / "task"
    (draft,) = load_adapter("r2e-gym").read(jsonl(tmp_path / "r2e.jsonl", r2e_row()), {})
    draft.write(folder)
    rewards, said = await prove(on_host(folder, "/testbed", repository), backend)
    assert rewards == {"nop": (0.0,), "oracle": (1.0,)}, said


def test_several_globs_choose_instances(tmp_path):
    rows = [r2e_row(commit_hash=name) for name in ("aa", "ab", "ba")]
    source = jsonl(tmp_path / "r2e.jsonl", *rows)
    chosen = load_adapter("r2e-gym").read(source, {"instances": "*-b*, pillow-aa"})
    assert [draft.id for draft in chosen] == ["pillow-aa", "pillow-ba"]
