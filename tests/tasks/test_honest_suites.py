"""Suites that do much to the process of their tests, and are honest: the judge gives them what pytest alone would."""

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rollyard.tasks.verifiers.pytest import judge_record
from rollyard.tasks.verifiers.test_record import read_record

INSIDE = Path(__file__).parents[2] / "rollyard/inside"
PASSES = "def test_a():\n    pass\n"
PATCHES = "import json, os\n\ndef test_a(monkeypatch):\n    monkeypatch.setattr('{}', None)\n"
WRAPS = "import pytest\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
WRAPS += "    report = (yield).get_result()\n"
SUITES = {  # the tests, and a conftest.py
    "counts what ran": (
        PASSES,
        "ran = []\n\ndef pytest_runtest_setup(item):\n    ran.append(item)\n\n"
        "def pytest_sessionfinish(session):\n    if len(ran) != 1:\n        session.exitstatus = 1\n",
    ),
    "notes failures": (
        PASSES,
        WRAPS + "    if report.failed:\n        item.session.bad = True\n\n"
        "def pytest_sessionfinish(session):\n    if hasattr(session, 'bad'):\n        session.exitstatus = 1\n",
    ),
    "ends in its last hook": (PASSES, "import os\n\ndef pytest_sessionfinish(exitstatus):\n    os._exit(int(exitstatus))\n"),
    "skips what has no mark": (
        "import pytest\n\n@pytest.mark.slow\ndef test_a():\n    pass\n",
        "import pytest\n\ndef pytest_runtest_setup(item):\n    if not item.get_closest_marker('slow'):\n"
        "        pytest.skip('fast')\n",
    ),
    "expects failures": (PASSES, WRAPS + "    if report.failed:\n        report.outcome, report.wasxfail = 'skipped', 'known'\n"),
    "has another TestCase.run": (
        "import unittest\n\nclass T(unittest.TestCase):\n    def test_a(self):\n        pass\n",
        "import unittest\nrun = unittest.TestCase.run\nunittest.TestCase.run = lambda self, result=None: run(self, result)\n",
    ),
    "forks, and the child comes back": (
        "import os\n\ndef test_a():\n    child = os.fork()\n    assert child\n    os.waitpid(child, 0)\n",
        "",
    ),
    "signals its group": (
        "import os, signal\n\ndef test_a():\n    signal.signal(signal.SIGTERM, lambda *given: None)\n"
        "    os.killpg(os.getpgrp(), signal.SIGTERM)\n",
        "",
    ),
    "closes files it did not open": (
        "import os, stat\n\ndef test_a():\n    for number in range(3, 64):\n        try:\n"
        "            named = os.readlink('/proc/self/fd/%d' % number).startswith('@TMP@')\n        except OSError:\n"
        "            continue\n        if named and stat.S_ISFIFO(os.fstat(number).st_mode):\n"
        "            os.close(number)\n            os.open('/dev/null', os.O_WRONLY)\n",
        "",
    ),
    "leaves parts of os replaced": ("import os\n\ndef test_a():\n    os.read = os.waitpid = os.fork = None\n", ""),
    "asks what the program is": (
        "import sys\n\ndef test_a():\n    assert sys.modules['__main__'].__spec__.name == 'pytest.__main__'\n",
        "",
    ),
    **{
        f"patches {name}": (PATCHES.format(name), "")
        for name in ("os.write", "os.path.relpath", "os.path.abspath", "json.dumps")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SUITES)
def test_an_honest_suite_passes(tmp_path, name):
    tests, scratch = tmp_path / "tests", tmp_path / "scratch"
    tests.mkdir()
    scratch.mkdir()
    test, conftest = SUITES[name]
    (tests / "test_it.py").write_text(test.replace("@TMP@", str(scratch)))
    (tests / "conftest.py").write_text(conftest)
    words = ["-q", "-c", "/dev/null", f"--rootdir={tests}", "-p", "no:cacheprovider", str(tests)]
    given = {"cwd": tmp_path, "env": {"PATH": "/usr/bin:/bin", "TMPDIR": str(scratch)}, "timeout": 120}
    plain = subprocess.run(
        [sys.executable, "-I", "-m", "pytest", *words], capture_output=True, text=True, start_new_session=True, **given
    )
    assert plain.returncode == 0, plain.stdout
    witness, record = tmp_path / "witness.py", tmp_path / "record"
    plan = {"command": [sys.executable, "-I", str(witness), *words], "witness": str(witness), "key": "k", "echo": True}
    plan |= {"log": str(tmp_path / "log"), "record": str(record)}
    command = [sys.executable, "-I", INSIDE / "run_tests.py"]
    done = subprocess.run(
        command, input=json.dumps(plan), capture_output=True, text=True, start_new_session=True, **given
    )
    body = record.read_bytes().partition(b"\n")[2] if record.exists() else b""
    verdict = judge_record(read_record(body), done.returncode, "all", done.stdout)
    assert (verdict.reward, verdict.error) == (1.0, None), done.stdout + done.stderr


@pytest.mark.parametrize("python", ("python2.7", "python3.6"))
def test_the_plugin_is_read_by_old_pythons(tmp_path, python):
    """SWE-bench has instances of Python 2.7, whose grammar knows no comma after a last `**`."""
    found = next(map(str, Path.home().glob(f".pyenv/versions/*/bin/{python}")), None) or shutil.which(python)
    if found is None:
        pytest.skip(f"no {python} here")
    program = "import sys; compile(open(sys.argv[1]).read(), 'pytest_witness.py', 'exec')"
    done = subprocess.run(
        [found, "-c", program, INSIDE / "pytest_witness.py"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_the_plugin_leaves_unittest_unloaded_where_pytest_does(tmp_path):
    """A pytest that tests itself keeps state in a loaded `unittest`, so that tests which should fail pass."""
    program = """
        import sys, pytest, _pytest.unittest
        for name in [name for name in sys.modules if name.partition(".")[0] == "unittest"]:
            del sys.modules[name]
        plugin = {"__name__": "plugin"}
        exec(open(sys.argv[1]).read(), plugin)
        assert ("unittest.case", "TestCase", "run") in plugin["_see_steps"]()
        print([name for name in sys.modules if name.partition(".")[0] == "unittest"])
    """
    line = [sys.executable, "-c", textwrap.dedent(program), INSIDE / "pytest_witness.py"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("[]\n", "")
