"""What verbs do about a store that is missing or broken: one line that names it, exit code 3, and no new file."""

import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from rollyard.cli.main import main
from rollyard.store import Store

ROOT = Path(__file__).parents[2]
TASKS, SCRIPT = str(ROOT / "examples/tasks"), f"scripted:{ROOT / 'examples/scripts/bug-fix.yaml'}"
READING = {
    "list": ["list", "--store"],
    "list of a run": ["list", "run_x", "--store"],
    "show": ["show", "run_x", "--store"],
    "view": ["view", "--port", "0"],
    "watch": ["watch", "--store"],
    "compare": ["compare", "run_a", "run_b", "--store"],
    "export": ["export", "run_x", "--out", "out.jsonl", "--store"],
    "export of a page": ["export", "run_x", "--out", "out.html", "--store"],
    "rescore": ["rescore", "run_x", "--store"],
    "replay": ["replay", "ro_x", "--store"],
    "branch": ["branch", "ro_x", "--at", "2", "--parallel", "auto", "--store"],
    "check run": ["check", "run", "run_x", "--store"],
    "run --resume": ["run", "--resume", "run_x", "--store"],
    "eval --resume": ["eval", "any.toml", "--resume", "run_x", "--store"],
    "store backup": ["store", "backup", "copy.db", "--store"],
}


@pytest.fixture
def verb(tmp_path, monkeypatch, capsys):
    """Runs a verb in an empty folder; gives its exit code and the lines it wrote to stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["rollyard", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err.splitlines()

    return run


def files():
    return sorted(os.listdir())


@pytest.mark.parametrize("words", READING.values(), ids=READING)
def test_a_verb_that_reads_says_which_store_is_missing_and_makes_none(verb, words):
    code, lines = verb(*words, "typo.db")
    assert (code, len(lines)) == (3, 1), lines
    assert "no store at typo.db" in lines[0] and "rollyard run" in lines[0]
    assert files() == []


@pytest.mark.parametrize("words", [["store", "backup", "copy.db"], ["list"]])
def test_verbs_that_are_told_no_store_look_for_the_same(verb, words):
    code, lines = verb(*words)
    assert code == 3 and "no store at runs.db" in lines[0]


def test_an_empty_file_is_no_store_and_stays_empty(verb):
    Path("empty.db").touch()
    code, lines = verb("list", "--store", "empty.db")
    assert code == 3 and "no store at empty.db" in lines[0]
    assert Path("empty.db").stat().st_size == 0


def _text(path):
    path.write_text("this is no database " * 100)


def _short_text(path):
    path.write_text("not a database")


def _filled(path):
    async def fill():
        async with Store.open(path) as store:
            await store.create_run({}, id="run_x")

    anyio.run(fill)


def _cut_short(path):
    _filled(path)
    path.write_bytes(path.read_bytes()[:5000])


def _newer(path):
    _filled(path)
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
    raw.close()


def _other_program(path):
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE cookies (name)")
    raw.close()


def _socket(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


BROKEN = {
    "a text": _text,
    "a short text": _short_text,
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "cut short": _cut_short,
    "a newer schema": _newer,
    "another program's database": _other_program,
}
VERBS = {
    "list": ["list"],
    "watch": ["watch"],
    "run": ["run", TASKS, "--agent", "shell-agent", "--policy", SCRIPT, "--display", "plain"],
}


@pytest.mark.parametrize("verb_words", VERBS.values(), ids=VERBS)
@pytest.mark.parametrize("make", BROKEN.values(), ids=BROKEN)
def test_what_is_no_store_is_refused_in_one_line_that_names_it(verb, tmp_path, make, verb_words):
    make(tmp_path / "bad.db")
    before = files()
    code, lines = verb(*verb_words, "--store", "bad.db")
    assert (code, len(lines)) == (3, 1), lines
    assert "bad.db" in lines[0]
    assert set(files()) <= {*before, "bad.db-wal", "bad.db-shm"}


def test_a_directory_is_named_as_one(verb, tmp_path):
    (tmp_path / "runs").mkdir()
    assert "runs is a directory, not a store" in verb("list", "--store", "runs")[1][0]


def test_view_refuses_a_broken_store_before_it_listens(verb, tmp_path):
    _text(tmp_path / "bad.db")
    code, lines = verb("view", "bad.db", "--port", "0")
    assert code == 3 and len(lines) == 1 and "bad.db: file is not a database" in lines[0]


def test_a_restore_of_what_is_not_there_makes_nothing(verb, tmp_path):
    code, lines = verb("store", "restore", "typo.db", "new.db")
    assert code == 3 and "no store at typo.db" in lines[0]
    assert files() == []
    _other_program(tmp_path / "other.db")
    code, lines = verb("store", "restore", "other.db", "new.db")
    assert code == 3 and "other.db" in lines[0]
    assert files() == ["other.db"]


RUN = ["run", TASKS, "--agent", "shell-agent", "--policy", SCRIPT, "--display", "plain"]
REFUSED = {
    "no such tasks": ["run", "nosuch", "--policy", SCRIPT, "--display", "plain"],
    "no such agent": [*RUN, "--agent", "nosuch"],
    "no such sandbox": [*RUN, "--sandbox", "nosuch"],
    "no such script": [*RUN, "--policy", "scripted:nosuch.yaml"],
    "no task matches": [*RUN, "--filter", "nosuch"],
    "no such mode": [*RUN, "--mode", "nosuch"],
    "an instruction for no agent": ["run", "--instruction", "x", "--agent", "nosuch", "--policy", SCRIPT],
    "an instruction in no sandbox": [
        "run", "--instruction", "x", "--agent", "nop", "--sandbox", "nosuch", "--policy", SCRIPT,
    ],
    "no such evaluation": ["eval", "nosuch.toml"],
    "a gate that nobody answers": ["serve", "gate", "--store", "runs.db"],
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_a_refused_run_makes_no_store(verb, words):
    code, lines = verb(*words)
    assert code == 2, lines
    assert files() == []


PLANES = {
    "no such engine": ["--engine", "nosuch"],
    "no such address": ["--aenv", "nosuch.invalid"],
    "no such policy": ["--job-policy", "nosuch:x"],
    "no such tasks": ["--fleet-tasks", "nosuch.json"],
    "a key that others read": ["--admin-key-file", "open-key"],
}


@pytest.mark.parametrize("words", PLANES.values(), ids=PLANES)
@pytest.mark.ordinary("no such engine")
def test_a_refused_plane_makes_no_store(tmp_path, words):
    (tmp_path / "open-key").write_text("x")
    (tmp_path / "open-key").chmod(0o644)
    start = [sys.executable, "-m", "rollyard", "serve", "plane", "--port", "0", "--store", "plane.db", *words]
    done = subprocess.run(start, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 2, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["open-key"]


def test_a_plane_refuses_a_store_of_another_user_that_others_read(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    _filled(tmp_path / "plane.db")
    (tmp_path / "plane.db").chmod(0o644)
    os.chown(tmp_path / "plane.db", 12345, 12345)
    start = [sys.executable, "-m", "rollyard", "serve", "plane", "--port", "0", "--store", "plane.db"]
    done = subprocess.run(start, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 3 and "other users can read or write plane.db" in done.stderr, done.stderr
    assert (tmp_path / "plane.db").stat().st_mode & 0o777 == 0o644


MOUNTED = """
mount -t tmpfs -o size={size} none {at} || exit 77
{before}
{python} -m rollyard {words}
"""


def on_a_disk_of_its_own(at, words, *, size="1m", before=""):
    """A verb in a mount namespace where `at` is a small file system."""
    at.mkdir()
    script = MOUNTED.format(size=size, at=at, before=before, python=sys.executable, words=words)
    done = subprocess.run(["unshare", "-m", "bash", "-c", script], capture_output=True, text=True, timeout=120)
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip(f"this machine makes no mount namespaces: {done.stderr.strip()}")
    return done.returncode, done.stderr.splitlines()


def test_a_full_disk_is_said_in_one_line(tmp_path):
    at = tmp_path / "disk"
    words = f"{' '.join(RUN)} --store {at}/runs.db"
    code, lines = on_a_disk_of_its_own(at, words, size="64k")
    assert (code, len(lines)) == (3, 1), lines
    assert f"{at}/runs.db: database or disk is full" in lines[0]


def test_a_store_on_a_disk_that_takes_no_writes_is_refused_in_one_line(tmp_path):
    at = tmp_path / "disk"
    _filled(tmp_path / "kept.db")
    words = f"{' '.join(RUN)} --store {at}/kept.db"
    before = f"cp {tmp_path}/kept.db {at}/kept.db; chmod 644 {at}/kept.db; mount -o remount,ro {at}"
    code, lines = on_a_disk_of_its_own(at, words, before=before)
    assert (code, len(lines)) == (3, 1), lines
    assert f"{at}/kept.db" in lines[0] and "writable" in lines[0]
