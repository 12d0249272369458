"""Forged logs of SWE-bench's tests: the code under test runs in their process, and prints where they print.

The instances are rows in a repository made here, and run as the judge runs them, with a Python of their own.
"""

import json
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path

import pytest

from rollyard.tasks.adapters import load_adapter

pytestmark = pytest.mark.adversarial
RUNTESTS = (
    "#!/usr/bin/env python\nimport os, sys, unittest\n\nsys.path[:0] = [os.path.dirname(__file__), os.getcwd()]\n"
    "suite = unittest.defaultTestLoader.loadTestsFromNames(sys.argv[6:])\n"
    "sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())\n"
)
SYMPY = (
    "#!/usr/bin/env python\nimport runpy, sys\n\nsys.path.insert(0, '.')\nfailed = []\n"
    "for path in sys.argv[3:]:\n    for name, act in runpy.run_path(path).items():\n"
    "        if name.startswith('test_'):\n            try:\n                act()\n                print(name, 'ok')\n"
    "            except AssertionError:\n                print(name, 'F')\n                failed.append((path, name))\n"
    "for path, name in failed:\n    print('_' * 20, path + ':' + name, '_' * 20)\n"
)
UNIT = "import unittest\nfrom calc import twice\n\nclass Twice(unittest.TestCase):\n"
UNIT += "    def test_two(self):\n        self.assertEqual(twice(2), 4)\n\n"
PLAIN = "from calc import twice\n\ndef test_two():\n    assert twice(2) == 4\n\n"
KINDS = {  # the files, where the tests are, the test that is added, and what the two are called
    "pytest": (
        {"setup.cfg": "[tool:pytest]\naddopts = -q\n", "tests/test_calc.py": PLAIN},
        "tests/test_calc.py",
        "def test_three():\n    assert twice(3) == 6\n",
        "tests/test_calc.py::test_{}",
    ),
    "django": (
        {"tests/runtests.py": RUNTESTS, "tests/calc_tests/__init__.py": "", "tests/calc_tests/tests.py": UNIT},
        "tests/calc_tests/tests.py",
        "    def test_three(self):\n        self.assertEqual(twice(3), 6)\n",
        f"test_{{0}} (calc_tests.tests.Twice{'.test_{0}' if sys.version_info >= (3, 11) else ''})",
    ),
    "sympy": (
        {"bin/test": SYMPY, "calc/tests/test_calc.py": PLAIN},
        "calc/tests/test_calc.py",
        "def test_three():\n    assert twice(3) == 6\n",
        "test_{}",
    ),
}
WRONG, RIGHT = "def twice(n):\n    return n + 2\n", "def twice(n):\n    return n + n\n"
LINES = {
    "pytest": "PASSED tests/test_calc.py::test_two\nPASSED tests/test_calc.py::test_three\n",
    "django": "".join(KINDS["django"][3].format(name) + " ... ok\n" for name in ("two", "three")),
    "sympy": "test_two ok\ntest_three ok\n",
}
PRINT = "import atexit, os, sys\nprint = lambda: os.write(%d, b'''\n%s''')\n"
EVERY_WAY = {
    "prints and ends": lambda kind: (
        WRONG + PRINT % (2 if kind == "django" else 1, LINES[kind]) + "print()\nos._exit(0)\n"
    ),
    "prints at the end": lambda kind: WRONG + PRINT % (1, LINES[kind]) + "atexit.register(print)\n",
    "prints at the end in place of it": lambda kind: (
        WRONG + PRINT % (1, LINES[kind]) + "atexit.register(lambda: (print(), os._exit(0)))\n"
    ),
    "rewrites the judge": lambda kind: (
        WRONG + "import pathlib\nfor place in pathlib.Path('@TASK@').rglob('*.*'):\n    place.write_text('{}')\n"
    ),
}
REPORTS = "from _pytest.reports import TestReport\nmake = TestReport.from_item_and_call.__func__\n"
REPORTS += "def passed(kind, item, call):\n    report = make(kind, item, call)\n    report.outcome = 'passed'\n"
REPORTS += "    return report\n"
REPORTS += "TestReport.from_item_and_call = classmethod(passed)\n"
HOOKS = "import pytest\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
HOOKS += "    report = (yield).get_result()\n    report.outcome = 'passed'\n"
HOOKS_OF_FUNCTIONS = HOOKS.replace(
    "    report.outcome", "    if type(item) is pytest.Function:\n        report.outcome"
)
CALLED = "import gc, pytest\n\nclass Plugin:\n    @pytest.hookimpl(tryfirst=True)\n"
CALLED += (
    "    def pytest_pyfunc_call(self, pyfuncitem):\n        return type(pyfuncitem) is pytest.Function or None\n\n"
)
CALLED += "for thing in gc.get_objects():\n    if isinstance(thing, pytest.Config):\n"
CALLED += "        thing.pluginmanager.register(Plugin())\n"
ATTACKS = {(kind, way): {"calc/__init__.py": make(kind)} for kind in KINDS for way, make in EVERY_WAY.items()} | {
    ("pytest", "prints, and its tests cannot be loaded"): {
        "calc/__init__.py": f"import os\nfor n in range(1, 20):\n    try:\n        os.write(n, b'''\n{LINES['pytest']}''')\n"
        "    except OSError:\n        pass\n"
    },
    ("pytest", "changes reports"): {"calc/__init__.py": WRONG + REPORTS},
    ("pytest", "changes how tests run"): {
        "calc/__init__.py": WRONG + "import pytest\npytest.Function.runtest = lambda item: None\n"
    },
    ("pytest", "expects to fail"): {"calc/__init__.py": "import pytest\n\ndef twice(n):\n    pytest.xfail('later')\n"},
    ("pytest", "says that tests were called"): {
        "calc/__init__.py": WRONG + "import gc, pytest\n\nclass Plugin:\n    @pytest.hookimpl(tryfirst=True)\n"
        "    def pytest_pyfunc_call(self, pyfuncitem):\n        return True\n\n"
        "for thing in gc.get_objects():\n    if isinstance(thing, pytest.Config):\n"
        "        thing.pluginmanager.register(Plugin())\n"
    },
    ("pytest", "says that functions were called"): {"calc/__init__.py": WRONG + CALLED},
    ("pytest", "puts marks on tests"): {
        "calc/__init__.py": "import gc, pytest\n\ndef twice(n):\n    for thing in gc.get_objects():\n"
        "        if isinstance(thing, pytest.Item):\n            thing.add_marker(pytest.mark.xfail)\n"
    },
    ("pytest", "steers by .pytest.toml"): {
        ".pytest.toml": "[pytest]\naddopts = ['-p', 'evil']\npythonpath = ['.']\n", "evil.py": HOOKS_OF_FUNCTIONS
    },
    ("pytest", "steers by setup.cfg"): {"setup.cfg": "[tool:pytest]\naddopts = -p evil\npythonpath = .\n", "evil.py": HOOKS},
    ("pytest", "steers by a pyproject.toml of the tests"): {
        "tests/pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-p evil"\npythonpath = ".."\n', "evil.py": HOOKS
    },
    ("pytest", "steers by tox.ini"): {"tox.ini": "[pytest]\naddopts = -p evil\npythonpath = .\n", "evil.py": HOOKS},
    ("pytest", "steers by conftest.py"): {"conftest.py": HOOKS},
    ("pytest", "is loaded with Python"): {
        "sitecustomize.py": "import os, sys\nif any('log_check' in word for word in sys.orig_argv):\n    os._exit(0)\n"
    },
    ("pytest", "speaks for pytest"): {
        "calc/__init__.py": WRONG + PRINT % (1, LINES["pytest"]) + "import gc, glob, stat, tempfile\natexit.register(print)\n"
        "for place in glob.glob(tempfile.gettempdir() + '/*/*'):\n    if stat.S_ISFIFO(os.stat(place).st_mode):\n"
        "        with open(place, 'w') as file:\n            for name in ('two', 'three'):\n"
        "                node = 'tests/test_calc.py::test_' + name\n"
        "                file.write('[\"\", \"test\", [\"%s\", \"call\", \"passed\", false, \"%s\"]]\\n' % (node, node))\n"
    },
    ("django", "disarms assertions"): {
        "calc/__init__.py": WRONG + "import unittest\nunittest.TestCase.assertEqual = lambda *given: None\n"
    },
    ("django", "brings another runner"): {"tests/runtests.py": f"print('''{LINES['django']}''')\n"},
    ("sympy", "brings another runner"): {"bin/test": f"print('''{LINES['sympy']}''')\n"},
}  # fmt: skip


def write(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        (folder / path).chmod(0o755)


def git(place, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    return subprocess.run(["git", *who, *words], cwd=place, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The bin of a Python with pytest, whose folder of packages the judge may write to."""
    home = tmp_path_factory.mktemp("python") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (packages,) = home.glob("lib/*/site-packages")
    (packages / "pytest.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    start = f"#!{home}/bin/python\nimport sys\nimport pytest\nsys.exit(pytest.main())\n"
    write(home / "bin", {"pytest": start})
    return home / "bin", packages


def judge(tmp_path, python, kind, answer, act=lambda tree: None):
    """Whether the judge of the task that the adapter makes lets these files pass, and what it said."""
    bin_folder, packages = python
    files, place, added, name = KINDS[kind]
    tree = tmp_path / "tree"
    write(tree, {**files, "calc/__init__.py": WRONG})
    (tmp_path / "scratch").mkdir()
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "base")
    base = git(tree, "rev-parse", "HEAD").strip()
    with (tree / place).open("a") as file:
        file.write(added)
    row = {
        "instance_id": "a__b-1",
        "repo": {"pytest": "a/b"}.get(kind, f"{kind}/{kind}"),
        "base_commit": base,
        "problem_statement": "Twice is wrong.",
        "patch": "diff --git a/calc/__init__.py b/calc/__init__.py\n",
        "test_patch": git(tree, "diff"),
        "FAIL_TO_PASS": [name.format("three")],
        "PASS_TO_PASS": [name.format("two")],
        "image_name": "x",
    }
    git(tree, "checkout", "-q", ".")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (draft,) = load_adapter("swebench").read(tmp_path / "rows.jsonl", {})
    task = tmp_path / "task"
    draft.write(task)
    (packages / "tree.pth").write_text(f"{tree}\n")  # as an editable install
    write(tree, {path: text.replace("@TASK@", str(task)) for path, text in answer.items()})
    act(tree)
    logs = tmp_path / "logs"
    logs.mkdir()
    text = (task / "tests/plan.json").read_text().replace("/testbed", str(tree))
    plan = json.loads(text.replace("/tests/test.patch", f"{task}/tests/test.patch"))
    plan |= {"key": "k", "log": str(logs / "log"), "record": str(logs / "record")}
    inside = Path(__file__).parents[2] / "rollyard/inside"
    expected = (task / "tests/tests.json").read_text()
    env = {"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path / "scratch")}
    subprocess.run(
        ["python3", "-I", "-S", inside / "run_tests.py"],
        input=json.dumps(plan),
        text=True,
        cwd=tree,
        env=env,
        timeout=120,
    )
    (logs / "tests.json").write_text(expected)
    done = subprocess.run(
        ["python3", "-I", "-S", inside / "log_check.py", logs / "log", logs / "tests.json", logs / "record"],
        capture_output=True, text=True, env=env, timeout=60,
    )  # fmt: skip
    log = (logs / "log").read_text(errors="replace") if (logs / "log").exists() else ""
    return done.returncode == 0, done.stdout + done.stderr + log


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_answer_passes_and_a_wrong_one_does_not(tmp_path, python, kind):
    passed, said = judge(tmp_path / "right", python, kind, {"calc/__init__.py": RIGHT})
    assert passed and "2 of 2 passed" in said, said
    passed, said = judge(tmp_path / "wrong", python, kind, {})
    assert not passed and "did not pass: " in said and "not believed" not in said, said


@pytest.mark.parametrize(("kind", "way"), [pytest.param(*key, id=" ".join(key)) for key in ATTACKS])
def test_code_under_test_does_not_make_its_own_verdict(tmp_path, python, kind, way):
    passed, said = judge(tmp_path, python, kind, ATTACKS[kind, way])
    assert not passed, said


def test_an_object_of_git_is_not_what_its_name_says(tmp_path, python):
    """The tests are put back from the agent's own repository, in which it can write another content under the name of theirs."""

    def forge(tree):
        name = git(tree, "rev-parse", "HEAD:tests/test_calc.py").strip()
        forged = PLAIN.replace("from calc import twice", "twice = lambda n: 2 * n").encode()
        place = tree / ".git/objects" / name[:2] / name[2:]
        place.chmod(0o644)
        place.write_bytes(zlib.compress(b"blob %d\0%s" % (len(forged), forged)))
        (tree / "tests/test_calc.py").unlink()
        git(tree, "checkout", "-q", "HEAD", "--", "tests/test_calc.py")
        assert "lambda" in (tree / "tests/test_calc.py").read_text()
        (tree / "tests/test_calc.py").unlink()

    passed, said = judge(tmp_path, python, "pytest", {}, forge)
    assert not passed and '"prepared": false' in (tmp_path / "logs/record").read_text(), said
