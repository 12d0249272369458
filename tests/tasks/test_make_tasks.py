"""`make-tasks`: faults by rule, what an agent is given of a package, and tasks that are proved before they are kept."""

import io
import subprocess
import tarfile
import threading
import zipfile
from types import SimpleNamespace

import anyio
import pytest
from typer.testing import CliRunner

from rollyard.cli.main import app
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.runs.rollout.provision import Provision
from rollyard.tasks.harbor.load import load_folder
from rollyard.tasks.synthesis.bug_task import PYTEST, SuiteOptions
from rollyard.tasks.synthesis.mutations import KINDS, Mutation, find_mutations
from rollyard.tasks.synthesis.package import read_package
from rollyard.testing.make_tasks import (
    MadeTasks,
    MakeOptions,
    TriedFault,
    make_tasks,
    open_package,
    order_faults,
    tabulate,
    tabulate_packages,
    try_fault,
)
from rollyard.testing.package_suite import find_stable, open_suite
from rollyard.testing.tasks import CheckOptions, check_task

CALC = '''"""Small sums."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    WIDTH = 1 + 2


def clip(value: int, low: int, high: int) -> int:
    """The nearest value in a range."""
    if value < low:
        return low
    return min(value, high)


def unseen(number):
    return number - 7
'''
TESTS = """import calc


def test_below():
    assert calc.clip(-5, 0, 9) == 0


def test_above():
    assert calc.clip(50, 0, 9) == 9


def test_of_another_machine():
    assert False, "never passes"
"""


def changes(source, kind):
    found = [fault for fault in find_mutations("calc.py", source, [kind]) if fault.is_sound()]
    return [fault.faulty for fault in found]


@pytest.mark.parametrize(
    ("kind", "source", "faulty"),
    [
        ("comparison", "x = (a) < (b)\n", "x = (a) <= (b)\n"),
        ("comparison", "x = a not in b  # why\n", "x = a in b  # why\n"),
        ("boolean", "x = a and b\n", "x = a or b\n"),
        ("boolean", "x = not a\n", "x = (a)\n"),
        ("boolean", "f(é=True)\n", "f(é=False)\n"),
        ("arithmetic", "x = a * (b + 'c')\n", "x = a + (b + 'c')\n"),
        ("arithmetic", "x += 1\n", "x -= 1\n"),
        ("off-by-one", "x = y[0]\n", "x = y[1]\n"),
        ("removed-branch", "x = 1\nif a:\n    x = 2\ny = 3\n", "x = 1\ny = 3\n"),
        ("removed-branch", "if a:\n    x = 2\nelse:\n    x = 3\n", "if a:\n    x = 2\n"),
        (
            "removed-body",
            'def f():\n    "says"\n    a()\n    b()\n',
            'def f():\n    "says"\n    raise NotImplementedError\n',
        ),
        ("swapped-arguments", "f(a, b, c=1)\n", "f(b, a, c=1)\n"),
        ("removed-statement", "if a:\n    f(1)\n", "if a:\n    pass\n"),
        ("lost-result", "def f():\n    return 1, 2\n", "def f():\n    return None\n"),
        ("loop", "for a in b:\n    break\n", "for a in b:\n    continue\n"),
    ],
)
def test_each_kind_changes_one_place_and_nothing_else(kind, source, faulty):
    assert changes(source, kind)[0] == faulty


def test_what_changes_nothing_is_left_alone():
    quiet = 'def f(a: "int" = None, *, b: list[1] | None) -> dict[0]:\n    """1 < 2"""\n    return f"{1 + 2}"\n'
    assert [kind for kind in KINDS if kind != "lost-result" and changes(quiet, kind)] == []
    assert not any("WIDTH = 1 - 2" in faulty for kind in KINDS for faulty in changes(CALC, kind))


def test_the_patch_takes_the_fault_out(tmp_path):
    for source in (CALC, CALC.rstrip("\n"), "x = 1\x0c\ny = '\u2028' < z\n"):
        fault = next(find_mutations("calc.py", source, ["comparison"]))
        (tmp_path / "calc.py").write_text(fault.faulty)
        done = subprocess.run(
            ["patch", "-p1"], input=fault.repair.encode(), cwd=tmp_path, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stdout
        assert (tmp_path / "calc.py").read_text() == source


@pytest.fixture
def sdist(tmp_path):
    root = tmp_path / "calc-1.0"
    files = {
        "calc.py": CALC,
        "setup.py": "1 < 2\n",
        "tests/test_calc.py": TESTS,
        "tests/data/answer.txt": "0 9\n",
        "dist/calc-0.9.tar.gz": "x",
        "calc.py.patch": "-  1\n",
        "__pycache__/calc.cpython-311.pyc": "x",
        ".git/HEAD": "x",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    archive = tmp_path / "calc-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as members:
        members.add(root, "calc-1.0")
    return archive


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "cache"))


def test_an_agent_gets_the_source_and_no_copy_of_it(sdist):
    package = open_package(str(sdist))
    assert (package.name, package.sources, package.roots) == ("calc-1.0", ("calc.py",), ("",))
    assert sorted(package.visible) == ["calc.py", "setup.py"]
    assert sorted(package.tests) == ["tests/data/answer.txt", "tests/test_calc.py"]


def test_a_seed_is_an_order(sdist):
    package = open_package(str(sdist))

    def order(**options):
        return [fault.name for _, fault in order_faults(package, MakeOptions(**options))]

    assert order(seed=1) == order(seed=1) != order(seed=2)
    assert sorted(order(seed=1)) == sorted(order(seed=2))
    first = [fault.function for _, fault in order_faults(package, MakeOptions(seed=1))][:2]
    assert set(first) == {"clip", "unseen"}
    with pytest.raises(UnknownName, match="typo"):
        order(kinds=("typo",))


@pytest.mark.anyio
async def test_only_faults_that_are_proved_are_kept(sdist, backend, tmp_path):
    out = tmp_path / "tasks"
    options = MakeOptions(count=1, kinds=("removed-branch", "arithmetic"), repeats=1)
    (made,) = await make_tasks([str(sdist)], out, backend, options)
    (name,) = made.made
    assert [path.name for path in out.iterdir()] == [name]
    assert (made.tests, made.left_out) == (2, ("tests/test_calc.py::test_of_another_machine",))
    assert {fault.kind: fault.reason for fault in made.tried} == {
        "removed-branch": None,
        "arithmetic": "no test finds it",
    }
    assert [row["left out because"] for row in tabulate(made)] in (
        ["", "no test finds it (1)"],
        ["no test finds it (1)", ""],
    )
    given = {
        path.relative_to(out / name / "environment/package").as_posix()
        for path in (out / name).rglob("environment/package/*")
    }
    assert given == {"calc.py", "setup.py"}
    assert "if value < low" not in (out / name / "environment/package/calc.py").read_text()
    said = (out / name / "instruction.md").read_text()
    assert "tests/test_calc.py::test_below" in said
    assert "another_machine" not in said
    check = await check_task(load_folder(out / name), backend, CheckOptions(repeats=1), Provision.of(backend))
    assert [(proof.agent, proof.rewards) for proof in check.proofs] == [("nop", (0.0,)), ("oracle", (1.0,))]
    assert [finding.message for finding in check.findings if finding.where == "leak"] == []


@pytest.mark.anyio
async def test_of_several_packages_one_that_cannot_be_used_costs_its_own_tasks_alone(sdist, backend, tmp_path):
    failing = tmp_path / "failing"
    (failing / "tests").mkdir(parents=True)
    (failing / "calc.py").write_text(CALC)
    (failing / "tests" / "test_calc.py").write_text("def test_it(): assert False\n")
    options = MakeOptions(count=1, kinds=("removed-branch",), repeats=1)
    first, second = await make_tasks([str(failing), str(sdist)], tmp_path / "tasks", backend, options)
    assert "too few of its tests pass" in first.problem and first.made == ()
    assert second.problem is None and [path.name for path in (tmp_path / "tasks").iterdir()] == list(second.made)
    rows = [(row["package"], row["made"]) for row in tabulate_packages([first, second])]
    assert rows == [("failing", "0"), ("calc-1.0", "1")]
    with pytest.raises(ConfigError, match="too few of its tests pass"):
        await make_tasks([str(failing)], tmp_path / "alone", backend, options)
    with pytest.raises(ConfigError, match="calc-1.0 is named twice"):
        await make_tasks([str(sdist), str(sdist)], tmp_path / "twice", backend, options)


@pytest.mark.slow
@pytest.mark.anyio
async def test_the_same_seed_makes_the_same_tasks(sdist, backend, tmp_path):
    kinds = ("removed-branch", "comparison", "swapped-arguments", "lost-result")
    digests = []
    for parallel in (1, 3):
        out = tmp_path / f"tasks-{parallel}"
        options = MakeOptions(count=2, kinds=kinds, repeats=1, parallel=parallel, seed=5)
        (made,) = await make_tasks([str(sdist)], out, backend, options)
        digests.append([load_folder(out / name).digest for name in made.made])
        assert sorted(path.name for path in out.iterdir()) == sorted(made.made)
    assert len(digests[0]) == 2
    assert digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_fault_whose_answer_lies_about_is_left_out(backend, tmp_path):
    package = tmp_path / "calc"
    (package / "tests").mkdir(parents=True)
    (package / "calc.py").write_text(CALC)
    (package / "NOTES").write_text(CALC)
    (package / "tests/test_calc.py").write_text(TESTS)
    (made,) = await make_tasks(
        [str(package)], tmp_path / "tasks", backend, MakeOptions(count=1, kinds=("removed-branch",), repeats=1)
    )
    assert [fault.reason.partition(" /app")[0] for fault in made.tried] == ["leak: the agent can read its answer:"]
    assert list((tmp_path / "tasks").iterdir()) == []


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_fault_that_never_ends_is_left_out(backend, tmp_path):
    package = tmp_path / "count"
    (package / "tests").mkdir(parents=True)
    (package / "count.py").write_text("def down(n):\n    while n:\n        n -= 1\n    return n\n")
    (package / "tests/test_count.py").write_text("import count\n\ndef test_down():\n    assert count.down(3) == 0\n")
    options = MakeOptions(count=1, kinds=("arithmetic",), repeats=1, timeout_s=15.0)
    (made,) = await make_tasks([str(package)], tmp_path / "tasks", backend, options)
    assert [fault.reason for fault in made.tried] == ["its tests do not end"]


def test_mistakes_are_told_before_anything_runs(sdist, tmp_path):
    def run(*words):
        return CliRunner().invoke(app, ["make-tasks", *map(str, words)], prog_name="rollyard")

    missing = run(sdist.with_name(f"{sdist.name}z"), "--out", tmp_path / "new").exception
    assert "no such file or folder" in str(missing) and f"did you mean {sdist}" in str(missing.hint)
    assert "the .tar.gz of an sdist" in str(run(tmp_path / "q" / "none", "--out", tmp_path / "new").exception.hint)
    (tmp_path / "full" / "x").mkdir(parents=True)
    assert "is not empty" in str(run(sdist, "--out", tmp_path / "full").exception)
    (tmp_path / "full" / "file").write_text("")
    unmade = str(run(sdist, "--out", tmp_path / "full" / "file" / "tasks").exception)
    assert unmade.endswith("file/tasks cannot be made: Not a directory (name another folder)")
    assert "one version exactly" in str(run(sdist, "--out", tmp_path / "new", "--with", "attrs").exception)
    assert not (tmp_path / "new").exists()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "calc.py").write_text(CALC)
    with pytest.raises(ConfigError, match="no tests in it"):
        read_package(tmp_path / "bare", "bare")


def test_an_archive_that_ends_too_soon_is_no_source(sdist, tmp_path):
    cut = tmp_path / "cut-1.tar.gz"
    cut.write_bytes(sdist.read_bytes()[: sdist.stat().st_size // 2])
    with pytest.raises(ConfigError, match=r"cut-1.tar.gz: cannot be unpacked: it ends too soon"):
        open_package(str(cut))


@pytest.mark.parametrize("ending", ["tar.gz", "zip"])
def test_an_archive_that_would_fill_the_disk_is_not_unpacked(tmp_path, ending):
    """Its members say that they hold more than they could; nothing of them is written to tell."""
    bomb = tmp_path / f"bomb-1.{ending}"
    if ending == "zip":
        with zipfile.ZipFile(bomb, "w") as members:
            members.writestr("bomb-1/big", b"")
            members.infolist()[0].file_size = 2**31 - 1
    else:
        with tarfile.open(bomb, "w:gz") as members:
            head = tarfile.TarInfo("bomb-1/big")
            members.addfile(head, io.BytesIO())
            head.size = 2**40
            members.fileobj.write(head.tobuf())
    with pytest.raises(ConfigError, match="holds more than 100 times its own size"):
        open_package(str(bomb))


def test_what_is_wrong_with_an_archive_names_the_archive(tmp_path):
    with tarfile.open(tmp_path / "bare-1.tar.gz", "w:gz") as members:
        members.addfile(tarfile.TarInfo("bare-1/calc.py"), io.BytesIO())
    with pytest.raises(ConfigError, match=r"^bare-1: no tests in it"):
        open_package(str(tmp_path / "bare-1.tar.gz"))


@pytest.mark.parametrize("root", ["", "src/"])
def test_a_package_that_pytest_itself_needs_is_refused(tmp_path, root):
    for name, text in {f"{root}iniconfig/__init__.py": CALC, "tests/test_calc.py": TESTS}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="pytest needs iniconfig itself"):
        read_package(tmp_path, "iniconfig")


@pytest.mark.anyio
async def test_folders_of_tests_with_one_name_are_told_apart(tmp_path, backend):
    """As they lie below packages: `calc/tests` and `calc/deep/tests`."""
    for folder in ("calc", "calc/deep"):
        (tmp_path / folder / "tests").mkdir(parents=True)
        for name in ("__init__.py", "tests/__init__.py"):
            (tmp_path / folder / name).write_text("")
        (tmp_path / folder / "tests" / f"test_{folder[5:] or 'top'}.py").write_text(
            "import calc\n\ndef test_it(): pass\n"
        )
    package = read_package(tmp_path, "calc")
    async with open_suite(package, SuiteOptions(layer=f"pip:{PYTEST}"), backend, Provision.of(backend)) as suite:
        found = await find_stable(suite, 1)
    assert (found.tests, found.left_out) == (2, ())


def test_a_fault_that_was_one_too_many_says_so():
    fault = TriedFault(name="a", kind="loop", path="a.py", function="f", failing=1)
    (row,) = tabulate(MadeTasks(package="p", tests=1, left_out=(), made=(), tried=(fault,)))
    assert row["left out because"] == "enough were made (1)"


@pytest.mark.anyio
async def test_faults_are_parsed_on_one_thread(tmp_path):
    """CPython 3.11 counts the depth of all threads' syntax trees together, and raises SystemError where two parse at once."""
    threads = []

    class Watched(Mutation):
        def is_sound(self):
            threads.append(threading.get_ident())
            return False

    found = list(find_mutations("calc.py", CALC, KINDS))[:8]
    faults = [Watched(fault.kind, fault.path, fault.function, fault.original, fault.edit) for fault in found]
    suite = SimpleNamespace(package=SimpleNamespace(name="p"))
    async with anyio.create_task_group() as tasks:
        for fault in faults:
            tasks.start_soon(try_fault, fault, suite, tmp_path, None, None)
    assert threads and set(threads) == {threading.get_ident()}
