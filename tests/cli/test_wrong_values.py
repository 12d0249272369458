"""Values that no option can have, and places where nothing can be made: each is refused in a shell's words, with the name of
what was given and the right exit code, and never with a trace."""

import os
import subprocess

import pytest

from rollyard.cli.main import INFRASTRUCTURE, USAGE
from tests.cli.test_surroundings import NOP, ROLLYARD, assert_one_line, run


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with a run of one rollout in a.db."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "script.yaml").write_text("- text: done\n")
    (folder / "said").mkdir()
    assert run("init", "task", "hello", cwd=folder).returncode == 0
    done = run("run", "hello", "--agent", "nop", "--store", "a.db", cwd=folder, HOME=str(folder))
    assert done.returncode == 0, done.stderr
    assert ": 1 attempt to do" in done.stderr
    return folder


NUMBERS = {
    "none at all": (["run", "x", "--workers", "nan"], "'nan' is no whole number"),
    "a part of one": (["run", "x", "--attempts", "1.5"], "'1.5' is no whole number"),
    "nothing": (["serve", "gate", "--processes", ""], "'' is no whole number"),
    "a word": (["store", "prune", "--older-than", "two"], "'two' is no number"),
    "not a number": (["store", "prune", "--older-than", "nan"], "'nan' is no number"),
    "without an end": (["clean", "--older-than", "inf"], "'inf' is no number"),
    "an age below 0": (["clean", "--older-than", "-1"], "must be at least 0, got -1"),
    "a page of none": (["list", "--limit", "0"], "must be at least 1, got 0"),
    "a page before the first": (["list", "--offset", "-1"], "must be at least 0, got -1"),
    "larger than a store can count": (["list", "--offset", "9" * 20], f"{'9' * 20} is too large"),
    "of processes": (["serve", "gate", "--processes", "65"], "must be between 1 and 64, got 65"),
}


@pytest.mark.parametrize(("words", "said"), NUMBERS.values(), ids=NUMBERS.keys())
def test_a_number_that_cannot_be_is_refused_in_words(tmp_path, words, said):
    done = run(*words, cwd=tmp_path, HOME=str(tmp_path))
    assert done.returncode == USAGE and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == f"Error: Invalid value for '{words[-2]}': {said}"


def test_an_argument_is_named_as_help_names_it(tmp_path):
    assert "Missing argument 'TARGET'" in run("store", "backup", cwd=tmp_path).stderr


OPTIONS = {
    "a level": (["--min-isolation", "full"], "no --min-isolation named 'full'; known: container, gvisor, landlock"),
    "a dialect": (["--dialect", "smalltalk"], "no --dialect named 'smalltalk'; known: chat,"),
    "a stage": (["--limits", "bot=3"], "no stage of --limits named 'bot'; did you mean 'boot'?"),
    "a stage's seconds": (["--limits", "boot=soon"], "--limits boot: 'soon' is no number"),
    "a stage of no time": (["--limits", "boot=0"], "limits.boot must be more than 0 s and less than 30 days, got 0 s"),
}


@pytest.mark.parametrize(("words", "said"), OPTIONS.values(), ids=OPTIONS.keys())
def test_an_option_of_rollouts_says_which_values_there_are(tmp_path, words, said):
    assert_one_line(run(*NOP, *words, cwd=tmp_path, HOME=str(tmp_path)), USAGE, said)


# the words of the command, the exit code, what is said
PLACES = {
    "a backup in no folder": (["store", "backup", "no/b.db", "--store", "a.db"], USAGE, "no is not a directory"),
    "a backup without a name": (["store", "backup", "", "--store", "a.db"], USAGE, "the new store has no name"),
    "a backup where none can be": (
        ["store", "backup", "/proc/b.db", "--store", "a.db"],
        INFRASTRUCTURE,
        "cannot make /proc/b.db",
    ),
    "a store in no folder": (["store", "restore", "a.db", "no/b.db"], USAGE, "no is not a directory"),
    "a file without a name": (["export", "last", "--out", "", "--store", "a.db"], USAGE, "names no file"),
    "rows where none can be": (
        ["export", "last", "--out", "/proc/rows.jsonl", "--store", "a.db"],
        INFRASTRUCTURE,
        "cannot make /proc/rows.jsonl: ",
    ),
    "a run without a name": (["show", "", "--store", "a.db"], INFRASTRUCTURE, "an empty text names no run"),
    "a part of a run": (["show", "last", "--part", "calls", "--store", "a.db"], USAGE, "last is a run, and --part is"),
    "the log of a run": (["show", "last", "--log", "--store", "a.db"], USAGE, "last is a run, and --log is"),
    "a display": (["watch", "last", "--display", "tabel", "--store", "a.db"], USAGE, "did you mean 'table'?"),
    "a folder as key file": (
        ["serve", "gate", "--policy", "scripted:script.yaml", "--admin-key-file", "said"],
        USAGE,
        "said is a directory, not a key file",
    ),
    "a key file where none can be": (
        ["serve", "gate", "--policy", "scripted:script.yaml", "--admin-key-file", "/proc/no/key"],
        USAGE,
        "the key file /proc/no/key cannot be made: No such file or directory",
    ),
    "what is no certificate": (
        ["serve", "gate", "--policy", "scripted:script.yaml", "--tls-cert", "script.yaml", "--tls-key", "script.yaml"],
        USAGE,
        "script.yaml and script.yaml are no certificate with its key",
    ),
}


@pytest.mark.parametrize(("words", "code", "said"), PLACES.values(), ids=PLACES.keys())
def test_what_cannot_be_made_or_found_is_named(kept, words, code, said):
    done = run(*words, cwd=kept, HOME=str(kept))
    assert_one_line(done, code, said)
    assert "Errno" not in done.stderr and ".part" not in done.stderr and "[SSL]" not in done.stderr


def test_an_address_of_another_machine_is_refused_in_the_words_of_the_system(kept):
    done = run(
        "serve", "gate", "--policy", "scripted:script.yaml", "--host", "192.0.2.1", cwd=kept, HOME=str(kept)
    )  # fmt: skip
    assert done.returncode == INFRASTRUCTURE
    assert done.stderr.splitlines()[-1] == "rollyard: cannot listen on 192.0.2.1:0: Cannot assign requested address"


def test_tasks_of_a_page_that_starts_nothing_are_refused(kept):
    done = run("view", "a.db", "--tasks", "said", cwd=kept, HOME=str(kept))
    assert done.returncode == USAGE and "add --write" in done.stderr


def test_a_table_without_a_terminal_is_lines(kept):
    done = run("watch", "last", "--display", "table", "--store", "a.db", cwd=kept, HOME=str(kept))
    assert (done.returncode, done.stderr) == (0, "")
    assert "completed" in done.stdout and "\x1b" not in done.stdout


def test_a_reader_that_has_read_enough_ends_a_verb_without_a_word(kept):
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        command = [ROLLYARD, "grep", "", "--store", "a.db"]
        done = subprocess.run(command, cwd=kept, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=120)
    finally:
        os.close(theirs)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("words", [NOP[:-2], ("init", "task", "x")], ids=["run", "init"])
def test_a_folder_that_was_removed_is_named(tmp_path, words):
    line = 'mkdir gone && cd gone && rmdir ../gone && exec "$0" "$@"'
    done = subprocess.run(
        ["sh", "-c", line, ROLLYARD, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env=os.environ | {"HOME": str(tmp_path)},
    )  # fmt: skip
    assert_one_line(done, INFRASTRUCTURE, "the current folder was removed", "cd to another")


def test_doctor_goes_on_where_no_program_tries_namespaces(tmp_path):
    env = os.environ | {"HOME": str(tmp_path), "PATH": os.path.dirname(ROLLYARD)}
    done = subprocess.run([ROLLYARD, "doctor"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    assert "no program unshare" in done.stdout and "cache" in done.stdout
