"""The same verifier source run by Fleet's own SDK and here: `verify_detailed` says the same of both, source by source.

Theirs is `execute_verifier_local` of the installed package, ours the program that runs in the sandbox, both over the same two
SQLite files. What is meant to differ stands in `MEANT`, with why.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollyard.envs.fleet.verifier_code import Checked
from rollyard.inside.verifier import archive

theirs = pytest.importorskip("fleet.verifiers.local_executor", reason="the extra `fleet` is not installed")
wrapper = pytest.importorskip("fleet.verifiers.verifier", reason="the extra `fleet` is not installed")

SOURCES = {
    "float": "def f(env): return 1.0",
    "partial": "def f(env): return 0.375",
    "zero": "def f(env): return 0.0",
    "negative": "def f(env): return -2",
    "int": "def f(env): return 1",
    "true": "def f(env): return True",
    "false": "def f(env): return False",
    "constant": "def f(env): return TASK_SUCCESSFUL_SCORE",
    "failed constant": "def f(env): return TASK_FAILED_SCORE",
    "dict": "def f(env): return {'score': 0.5, 'why': 'half'}",
    "answer": "def f(env, final_answer=None): return float(final_answer == 'forty two')",
    "answer, other name": "def f(env, transcript): return float(transcript == 'forty two')",
    "answer contains": "def f(env, final_answer=None): return float(normalized_contains('Forty', final_answer))",
    "numbers": "def f(env): return float(contains_number('it is 1,042.5', '1042.5') and extract_numbers('a 3 b -4')[1] == -4)",
    "no argument": "def f(): return 0.25",
    "async": "async def f(env): return 0.75",
    "prints": "def f(env):\n    print('one', 2)\n    print('three', end='')\n    return 1",
    "prints, then raises": "def f(env):\n    print('before')\n    raise ValueError('no')",
    "raises": "def f(env): raise RuntimeError('broken')",
    "own error": "class Mine(Exception): ...\ndef f(env): raise Mine('mine')",
    "assertion": "def f(env):\n    assert 1 == 2, 'differs'\n    return 1",
    "name error": "def f(env): return missing",
    "division": "def f(env): return 1 / 0",
    "syntax error": "def f(env) return 1",
    "error at import": "x = {}['a']\ndef f(env): return 1",
    "no function": "x = 1",
    "empty": "",
    "imports": "import math, statistics\ndef f(env): return statistics.mean([math.floor(1.7), 0])",
    "import inside": "def f(env):\n    from collections import Counter\n    return Counter('aab')['a'] / 2",
    "imports of fleet": "from fleet.verifiers import DatabaseSnapshot, IgnoreConfig\ndef f(env): return 1",
    "decorated": "from fleet import verifier\n@verifier(key='k')\ndef f(env): return 0.5",
    "missing module": "import no_such_module_here\ndef f(env): return 1",
    "helper after": "def f(env): return half(1)\ndef half(x): return x / 2",
    "nested": "def f(env):\n    def inner(x): return x + 1\n    return inner(0)",
    "class": "class A:\n    v = 0.25\ndef f(env): return A.v",
    "given modules": "def f(env): return float(json.loads('[1]')[0] == 1 and bool(re.match('a', string.ascii_lowercase)))",
    "row": "def f(env): return float(env.db('current').table('users').eq('id', 2).first()['name'] == 'bill')",
    "filters": "def f(env): return len(env.db('seed').table('users').neq('name', 'ada').all()) / 10",
    "diff holds": """
def f(env):
    changed = {'table': 'users', 'pk': 2, 'field': 'name', 'after': 'bill'}
    env.db('seed').diff(env.db('current')).expect_only([changed])
    return 1
""",
    "diff does not": "def f(env):\n    env.db('seed').diff(env.db('current')).expect_only([])\n    return 1",
    "unknown table": "def f(env): return env.db('current').table('nothing').count()",
}
MORE = {  # run here and not there: the SDK takes the first function for the verifier, and its local databases know less
    "helper before": "def half(x): return x / 2\ndef f(env): return half(1)",
    "lambda before": "twice = lambda x: 2 * x\ndef f(env): return twice(0.25)",
    "count as a number": "def f(env): return env.db('current').table('users').count() / 6",
    "sql": "def f(env): return len(env.db('current').query('SELECT * FROM users').rows) / 6",
}
MEANT = {  # source: (what the SDK makes of it as a score, ours, why)
    "none": ("def f(env): return None", 0.0, None, "nothing was scored, so there is no zero"),
    "text": ("def f(env): return 'good'", 0.0, None, "a word is no score"),
    "number as text": ("def f(env): return '0.7'", 0.7, None, "a text is no score"),
    "tuple": ("def f(env): return (1, 'why')", 0.0, None, "a tuple is no score"),
    "list": ("def f(env): return [1]", 0.0, None, "a list is no score"),
    "dict without a score": ("def f(env): return {'reward': 1}", 0.0, None, "it has no score"),
}
COMPARED = "def f(env): return float(env.db('current').table('users').count() == 3)"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("databases")
    made = {"seed": folder / "seed.db", "current": folder / "current.db"}
    for name, path in made.items():
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, age INTEGER)")
            database.executemany(
                "INSERT INTO users VALUES (?, ?, ?)", [(1, "ada", 36), (2, "bob", None), (3, "cyd", 5)]
            )
            if name == "current":
                database.execute("UPDATE users SET name = 'bill' WHERE id = 2")
    program = folder / "check.zip"
    program.write_bytes(archive())
    return {**made, "program": program}


def run_theirs(code, files):
    done = theirs.execute_verifier_local(code, str(files["seed"]), str(files["current"]), "forty two")
    if inspect.iscoroutine(done["result"]):  # which `verify_detailed` awaits
        done["result"] = asyncio.run(done["result"])
    return done


def run_ours(code, files):
    """The sandbox's program, with its questions answered from the files."""
    asked = {"code": code, "final_answer": "forty two", "env": {"databases": ["seed", "current"]}}
    command = [sys.executable, "-I", str(files["program"]), "check"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        program.stdin.write(json.dumps(asked) + "\n")
        program.stdin.flush()
        for line in program.stdout:
            said = json.loads(line)
            if "ended" in said:
                end = said["ended"]
                break
            program.stdin.write(json.dumps(answer(said, files)) + "\n")
            program.stdin.flush()
        program.kill()
    sha256 = hashlib.sha256(code.encode()).hexdigest()
    return Checked(
        score=end["score"], sha256=sha256, seconds=0, result=end["result"], stdout=end["stdout"],
        error=(end["error"] or {}).get("message"), cause=end["error"] or {},
    )  # fmt: skip


def answer(said, files):
    try:
        with sqlite3.connect(files[said["database"]]) as database:
            found = database.execute(said["query"], said["args"])
            columns = [column[0] for column in found.description or ()]
            return {"ok": True, "columns": columns, "rows": [list(row) for row in found.fetchall()]}
    except sqlite3.Error as error:
        return {"ok": False, "error": str(error)}


class Answered:
    """An environment of the SDK whose server answers every execution with one result."""

    instance_id = "i"

    def __init__(self, result):
        self.result = result

    def check_bundle_exists(self, sha256):
        return SimpleNamespace(success=True)

    def execute_verifier_remote(self, **asked):
        return SimpleNamespace(success=True, result=self.result, stdout="")


def sdk_score(done):
    """The number that the SDK makes of a result that came back; None where it raises."""
    if not done["success"]:
        return None
    return wrapper.SyncVerifierFunction(lambda env: 0, "k", raw_code="code").remote(Answered(done["result"]))


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_gives_what_verify_detailed_gives(name, files):
    code = SOURCES[name]
    own, done = run_ours(code, files).detailed, run_theirs(code, files)
    assert (own.success, own.result, own.stdout) == (done["success"], done["result"], done["stdout"]), (own, done)
    assert own.score == sdk_score(done)
    if not done["success"] and ":" in done["error"].splitlines()[0] and name != "unknown table":
        assert own.error is not None and own.error["type"] == done["error"].partition(":")[0]


@pytest.mark.parametrize("name", MEANT)
def test_what_is_no_score_is_none_here_and_some_number_there(name, files):
    code, number, own_score, why = MEANT[name]
    own, done = run_ours(code, files), run_theirs(code, files)
    assert own.detailed.success and done["success"], why
    assert (sdk_score(done), own.score) == (number, own_score)
    assert own.detailed.result == json.loads(json.dumps(done["result"]))


@pytest.mark.parametrize("name", MORE)
def test_what_the_local_runner_there_cannot_run_runs_here(name, files):
    own, done = run_ours(MORE[name], files), run_theirs(MORE[name], files)
    assert (own.score, done["success"]) == (0.5, False)


def test_a_count_is_a_number_here_and_an_object_that_equals_none_there(files):
    own, done = run_ours(COMPARED, files), run_theirs(COMPARED, files)
    assert (own.score, sdk_score(done)) == (1.0, 0.0)


def test_there_are_thirty_sources_and_more_and_the_page_counts_them():
    counted = (
        f"{len(SOURCES)} sources the same, {len(MEANT)} differ on purpose, {len(MORE)} run here alone, 1 other number"
    )
    print(counted)
    assert len(SOURCES) >= 30
    page = (Path(__file__).parents[2] / "docs" / "remote-environments.md").read_text().replace("\n", " ")
    words = {4: "four", 5: "five", 6: "Six", 7: "Seven"}
    assert f"runs {len(SOURCES)} sources of every kind" in page, counted
    assert (
        f"{words[len(MEANT)]} more differ on purpose" in page and f"{words[len(MORE)]} run here and not there" in page
    ), counted
