"""Verifier code in a sandbox of its own: what counts as a score, what a failure says, which names the code finds."""

from __future__ import annotations

import asyncio
import os
import sqlite3

import pytest

from rollyard.envs.fleet.databases import SandboxDatabases
from rollyard.envs.fleet.verifier_code import VerifierCode, run_check
from rollyard.sandbox.local.backend import LocalBackend

pytestmark = pytest.mark.anyio


@pytest.fixture
async def backend():
    async with LocalBackend() as made:
        yield made


@pytest.fixture
async def shop_sandbox(backend, tmp_path):
    """The databases of a small shop: `seed`, and `current` with one row changed and one added."""
    for name in ("seed", "current"):
        made = sqlite3.connect(tmp_path / f"{name}.db")
        made.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT, state TEXT, note BLOB)")
        made.executemany("INSERT INTO orders VALUES (?, ?, ?, NULL)", [(1, "tea", "new"), (2, "cup", "new")])
        if name == "current":
            made.execute("UPDATE orders SET state = 'paid' WHERE id = 2")
            made.execute("INSERT INTO orders VALUES (3, 'pot', 'new', x'00ff')")
        made.commit()
        made.close()
    from rollyard.core.sandbox import SandboxSpec

    async with backend.open(SandboxSpec()) as sandbox:
        for name in ("seed", "current"):
            await sandbox.write(f"/srv/{name}.db", (tmp_path / f"{name}.db").read_bytes())
        yield sandbox


@pytest.fixture
def shop(shop_sandbox):
    return SandboxDatabases(shop_sandbox, {"seed": "/srv/seed.db", "current": "/srv/current.db"})


async def scored(backend, code, databases=None, **more):
    return await run_check(backend, VerifierCode(code=code, task_key="task-7", **more), databases, timeout_s=60)


async def test_a_number_of_any_function_is_the_score_and_what_it_prints_is_kept(backend):
    """E6: any function name, the final answer passed, stdout exposed"""
    code = """
import sys, os
def is_it_right(env, final_answer=None):
    print("answer was", final_answer)
    os.write(1, b"and this went past Python\\n")
    return 0.25 if final_answer == "42" else 0
"""
    done = await scored(backend, code, final_answer="42")
    assert done.score == 0.25 and done.error is None
    assert done.stdout == "answer was 42\nand this went past Python\n"
    assert done.functions == ("is_it_right",)
    assert (await scored(backend, code, final_answer="41")).score == 0.0


async def test_the_helper_names_are_there_with_and_without_imports(backend):
    """E6: helper names available"""
    code = """
from fleet import verifier, IgnoreConfig as Ignore
from fleet.verifiers import TASK_FAILED_SCORE as bad
import fleet, fleet.verifiers.db

def _helper(x):
    return x

@verifier(key="check")
def the_one(env, final_answer: Optional[str] = None) -> float:
    assert normalized_contains("Hello, World", "well: hello world!")
    assert normalized_string_comparison("A b", "ab.")
    assert extract_numbers("1,200 and -3.5") == [1200.0, -3.5]
    assert contains_number("it costs 1,200", "1200")
    assert json.loads("[1]") == [1] and re.match("a", "a") and string.digits
    assert bad == TASK_FAILED_SCORE == 0 and IgnoreConfig is Ignore and fleet.verifiers.db.DatabaseSnapshot
    return TASK_SUCCESSFUL_SCORE
"""
    done = await scored(backend, code)
    assert done.score == 1.0, done.error
    assert done.functions == ("_helper", "the_one")


@pytest.mark.parametrize(
    ("gives", "score"),
    [
        ("True", 1.0),
        ("{'score': 0.5, 'why': 'half'}", 0.5),
        ("type('R', (), {'score': 1})()", 1.0),
        ("None", None),
        ("'1.0'", None),
        ("float('nan')", None),
        ("float('inf')", None),
        ("{'points': 3}", None),
        ("[1]", None),
    ],
)
async def test_only_a_score_is_a_score(backend, gives, score):
    """E6"""
    done = await scored(backend, f"def check(env):\n    return {gives}\n")
    assert done.score == score
    if score is None:
        assert done.cause["type"] == "NoScore" and "task-7" in done.error


async def test_an_exception_gives_none_and_the_failure_says_where(backend):
    """E6: failure names task key, code preview, error line and the functions found"""
    code = "def helper(x):\n    return x['missing']\n\ndef check(env):\n    print('so far')\n    return helper({})\n"
    done = await scored(backend, code)
    assert done.score is None, "never 0"
    assert "task task-7" in done.error
    assert "KeyError: 'missing' at line 2: return x['missing']" in done.error
    assert "functions found: helper, check" in done.error
    assert "def helper(x):" in done.error
    assert done.stdout == "so far\n"
    assert "Traceback" in done.cause["traceback"]


async def test_a_syntax_error_gives_none_and_the_failure_says_where(backend):
    """E6"""
    done = await scored(backend, "def check(env):\n    return 1 +\n")
    assert done.score is None
    assert "SyntaxError" in done.error and "line 2" in done.error and "functions found: none" in done.error


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1", "defines no function"),
        ("def check(env):\n    raise SystemExit(0)", "SystemExit"),
        ("import os\ndef check(env):\n    os._exit(0)", "ended without a result"),
        ("def check(env, a, b, c):\n    return 1", "'b' that is never filled in"),
        ("def check(env):\n    print('JUDGE ERROR: no model')\n    return 0.0", "judge failed"),
        ("def check(env):\n    return env.db('current').query('SELECT 1')", "no database"),
    ],
)
async def test_whatever_else_goes_wrong_is_none_with_words(backend, code, words):
    """E6"""
    done = await scored(backend, code)
    assert done.score is None and words in done.error


async def test_a_verifier_that_does_not_end_is_ended(backend):
    """E6: timeouts"""
    done = await run_check(backend, VerifierCode(code="def check(env):\n    while True: pass\n"), timeout_s=3)
    assert done.score is None and "longer than 3 s" in done.error


async def test_a_conversation_is_passed_only_where_the_signature_declares_it(backend):
    """E6"""
    code = "def check(env, final_answer, conversation):\n    return float(conversation[0]['content'] == final_answer)\n"
    conversation = [{"role": "user", "content": "hi"}]
    assert (await scored(backend, code, final_answer="hi", conversation=conversation)).score == 1.0
    assert (await scored(backend, "def check(env):\n    return 1\n", conversation=conversation)).score == 1.0


async def test_databases_are_read_through_the_instance_and_compared(backend, shop):
    """E6, E13: snapshot and diff of seed and current for verifiers"""
    code = """
def check(env, final_answer=None):
    env.instance.load()
    seed, current = env.db("seed"), env.db("current")
    assert current.query("SELECT count(*) FROM orders WHERE state = ?", ["paid"]).rows == [[1]]
    assert current.table("orders").eq("item", "cup").first()["state"] == "paid"
    current.table("orders").count().assert_eq(3).assert_gt(2)
    current.expect_row("orders", {"id": 3}, {"item": "pot"}).expect_absent_row("orders", {"item": "pan"})
    assert seed.tables() == ["orders"]
    frozen = current.snapshot()
    diff = seed.diff(frozen, IgnoreConfig(table_fields={"orders": {"note"}}))
    changed = {"table": "orders", "pk": 2, "field": "state", "after": "paid"}
    added = {"table": "orders", "pk": 3, "type": "insert", "fields": [("id", 3), ("item", "pot"), ("state", ...)]}
    diff.expect_only([changed, added])
    diff.expect_exactly([{**changed}, added])
    for wrong in ([changed], [added], [dict(changed, after="new"), added], []):
        try:
            diff.expect_only(wrong)
        except AssertionError as error:
            assert "Unexpected" in str(error)
        else:
            return 0.0
    try:
        diff.expect_exactly([changed, added, {"table": "orders", "pk": 1, "type": "delete"}])
        return 0.0
    except AssertionError as error:
        assert "did not happen" in str(error)
    try:
        current.exec("DELETE FROM orders")
        return 0.0
    except PermissionError:
        pass
    try:
        current.query("DELETE FROM orders")
        return 0.0
    except RuntimeError as error:
        assert "readonly" in str(error)
    return 1.0
"""
    done = await scored(backend, code, shop)
    assert done.score == 1.0, done.error


async def test_a_verifier_may_be_a_coroutine(backend, shop):
    """E6"""
    code = """
async def check(env):
    current = env.db("current")
    rows = (await current.query("SELECT count(*) FROM orders")).rows
    first = await current.table("orders").eq("id", 1).first()
    diff = await env.db("seed").diff(current)
    await diff.expect_only([
        {"table": "orders", "pk": 2, "type": "modify", "resulting_fields": [("state", "paid")], "no_other_changes": True},
        {"table": "orders", "pk": 3, "field": None, "after": "__added__"},
    ])
    return float(rows == [[3]] and first["item"] == "tea")
"""
    done = await scored(backend, code, shop)
    assert done.score == 1.0, done.error


@pytest.mark.adversarial
async def test_verifier_code_never_runs_in_this_process_nor_reaches_its_files_and_network(backend, tmp_path):
    """E6"""
    (tmp_path / "secret").write_text("of the trainer")
    os.environ["RY_TEST_SECRET"] = "of the trainer"
    served = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = served.sockets[0].getsockname()[1]
    code = f"""
import os, socket
print(os.getpid(), os.environ.get("RY_TEST_SECRET"))
def check(env):
    open({str(tmp_path / "mark")!r}, "w").write("I was here") if os.path.isdir({str(tmp_path)!r}) else None
    try:
        socket.create_connection(("127.0.0.1", {port}), timeout=3)
    except OSError:
        return 1.0
    return 0.0
"""
    try:
        done = await scored(backend, code)
    finally:
        del os.environ["RY_TEST_SECRET"]
        served.close()
    assert done.score == 1.0, done.error
    assert done.stdout.split()[1] == "None" and int(done.stdout.split()[0]) != os.getpid()
    assert not (tmp_path / "mark").exists()


def test_code_is_known_by_its_digest():
    """E6: content-addressed"""
    assert VerifierCode(code="def a(env): ...").sha256 == VerifierCode(code="def a(env): ...", task_key="other").sha256
    assert VerifierCode(code="def a(env): ...").sha256 != VerifierCode(code="def b(env): ...").sha256


async def test_describe_query_and_their_caps(shop, shop_sandbox):
    """E13"""
    (table,) = await shop.describe("current")
    assert table.name == "orders" and table.columns[0] == {
        "name": "id",
        "type": "INTEGER",
        "notnull": False,
        "default_value": None,
        "pk": 1,
    }
    found = await shop.query("current", "SELECT id, note FROM orders WHERE id > ?", [2])
    assert found.columns == ["id", "note"] and found.rows == [[3, "AP8="]] and not found.truncated
    assert (await shop.query("current", "SELECT id FROM orders", max_rows=2)).truncated
    assert (await shop.query("current", "SELECT 9e999, -9e999, 0.5")).rows == [["inf", "-inf", 0.5]]
    from rollyard.core.errors import EnvError

    for sql in ("DELETE FROM orders", "ATTACH '/srv/seed.db' AS s", "PRAGMA query_only = OFF; DELETE FROM orders"):
        with pytest.raises(EnvError):
            await shop.query("current", sql)
    assert (await shop.query("current", "SELECT count(*) FROM orders")).rows == [[3]]
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    with pytest.raises(EnvError, match="interrupted"):
        await SandboxDatabases(shop_sandbox, shop.paths, seconds=1.0).query("current", endless)
    written = await shop.query("current", "UPDATE orders SET item = 'can' WHERE id = 3", read_only=False)
    assert written.rows_affected == 1
    with pytest.raises(EnvError, match="no database 'other'; known: current, seed"):
        await shop.query("other", "SELECT 1")


async def test_snapshot_diff_and_restore(shop):
    """E13"""
    diff = await shop.diff("seed", "current")
    assert diff["orders"]["total_changes"] == 2
    assert diff["orders"]["modified_rows"][0]["changes"] == {"state": {"before": "new", "after": "paid"}}
    await shop.snapshot("current", "/srv/kept.db")
    await shop.restore("current", "seed")
    assert (await shop.diff("seed", "current"))["orders"]["total_changes"] == 0
    shop.paths["kept"] = "/srv/kept.db"
    assert (await shop.query("kept", "SELECT count(*) FROM orders")).rows == [[3]]


async def test_questions_are_answered_one_at_a_time_by_one_program_that_may_be_lost(shop, shop_sandbox):
    """E13"""
    counts = await asyncio.gather(*(shop.query("current", "SELECT ? + count(*) FROM orders", [n]) for n in range(20)))
    assert [found.rows for found in counts] == [[[3 + n]] for n in range(20)]
    await shop_sandbox.kill_processes()
    from rollyard.core.errors import Error

    with pytest.raises(Error):
        await shop.query("current", "SELECT 1")
    assert (await shop.query("current", "SELECT 1")).rows == [[1]], "the next question has a new one"
    asking = asyncio.create_task(shop.query("current", "SELECT 2"))
    await asyncio.sleep(0)
    asking.cancel()
    assert (await shop.query("current", "SELECT 3")).rows == [[3]], "an answer nobody waited for is nobody else's"


FORGED = (
    b"[]",
    b"3",
    b'{"database": 1}',
    b'{"database": "current", "query": "x", "args": 7}',
    b'{"ended": []}',
    b'{"ended": {"score": "much"}}',
    b'{"ended": {"error": {"line": []}, "functions": [1]}}',
    b'{"ended": {"score": 1e999, "stdout": "", "error": null, "functions": [], "result": null}}',
)


@pytest.mark.adversarial
@pytest.mark.parametrize(
    "said", [FORGED[0], FORGED[5], *(pytest.param(one, marks=pytest.mark.slow) for one in (*FORGED[1:5], *FORGED[6:]))]
)
async def test_code_that_lies_to_the_runner_has_no_score(backend, said):
    """The code finds the pipe that its program speaks to the host by."""
    code = f"""
import os
def check(env):
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            os.write(fd, {said + bytes([10])!r})
        except OSError:
            pass
    os._exit(0)
"""
    done = await scored(backend, code)
    assert done.score is None and done.error, done


@pytest.mark.adversarial
async def test_a_program_that_lies_about_databases_is_an_error_with_a_name(backend):
    """The instance's image brings the Python that is asked, and its author may have written it."""
    from rollyard.core.errors import EnvError
    from rollyard.core.sandbox import SandboxSpec

    async with backend.open(SandboxSpec(env={"PATH": "/opt/lies:/usr/bin:/bin"})) as sandbox:
        for said in ("[]", "{}", "nothing", '{"ok": 1}', '{"ok": true, "rows": 3}', '{"ok": true}'):
            lie = f"#!/bin/sh\nwhile read -r _; do printf '%s\\n' '{said}'; done\n"
            await sandbox.write("/opt/lies/python3", lie.encode(), mode=0o755)
            databases = SandboxDatabases(sandbox, {"current": "/srv/current.db"})
            with pytest.raises(EnvError):
                await databases.describe("current")
            if said != '{"ok": true}':
                with pytest.raises(EnvError):
                    await databases.query("current", "SELECT 1")
