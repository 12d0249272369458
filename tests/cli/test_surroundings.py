"""A verb in odd surroundings: no home directory, output that is full or closed, folders that cannot be written, few open files.
Each ends in one line that says what happened, and in no trace."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.cli.main import INFRASTRUCTURE, USAGE

ROOT = Path(__file__).parents[2]
ROLLYARD = str(Path(sys.executable).with_name("rollyard"))
NOP = ("run", "--instruction", "x", "--agent", "nop", "--store", "a.db")
NO_USER = 54_321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user that is in no list")


def run(*words, cwd, shell=None, unset=(), **variables):
    """`shell` is what stands after the command on a shell's line."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLYARD_", "XDG_")) and k not in unset}
    line = ["sh", "-c", f'exec "$0" "$@" {shell or ""}', ROLLYARD, *words]
    return subprocess.run(line, cwd=cwd, env=env | variables, capture_output=True, text=True, timeout=120)


def assert_one_line(done, code, *parts):
    assert done.returncode == code, (done.stdout, done.stderr)
    (line,) = done.stderr.splitlines()
    assert line.startswith("rollyard: ") and all(part in line for part in parts), line


@pytest.mark.parametrize("home", ["/dev/null/home", "/proc/no/home"])
@pytest.mark.parametrize("words", [["doctor"], ["run", "--instruction", "x", "--agent", "nop"]], ids=" ".join)
def test_a_home_that_cannot_be_made_is_named(tmp_path, home, words):
    assert_one_line(run(*words, cwd=tmp_path, HOME=home), USAGE, home, "ROLLYARD_HOME")


@as_root
def test_a_user_without_a_home_is_told_so(tmp_path):
    code = f"import os, pwd; from rollyard.core.home import data_home; os.setuid({NO_USER}); data_home()"
    done = subprocess.run([sys.executable, "-c", code], env={}, capture_output=True, text=True, timeout=120)
    told = done.stderr.splitlines()[-1]
    assert f"the user {NO_USER} has no home directory" in told and "set HOME" in told


@pytest.mark.parametrize("words", [["--help"], ["datasets", "list"], ["doctor"]], ids=" ".join)
def test_output_that_cannot_be_written_is_told(tmp_path, words):
    done = run(*words, cwd=tmp_path, shell=">/dev/full", HOME=str(tmp_path))
    assert_one_line(done, INFRASTRUCTURE, "cannot write the output: No space left on device")


@pytest.mark.parametrize("closed", [">&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing(tmp_path, closed):
    done = run(*NOP, cwd=tmp_path, shell=closed, HOME=str(tmp_path))
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    listed = run("list", "--store", "a.db", cwd=tmp_path, HOME=str(tmp_path))
    assert " nop " in listed.stdout and "completed" in listed.stdout
    assert run("list", "--store", "a.db", cwd=tmp_path, shell=closed, HOME=str(tmp_path)).returncode == 0


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    assert_one_line(run("init", "task", "/dev/null/x", cwd=tmp_path), INFRASTRUCTURE, "/dev/null/x", "Not a directory")
    done = run("init", "task", "/dev/null/x", "--json", cwd=tmp_path)
    assert done.returncode == INFRASTRUCTURE and '"error": "Error"' in done.stdout and done.stderr == ""


def test_the_next_command_can_be_copied_into_a_shell(tmp_path):
    done = run("init", "task", "my tasks/one", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "next: rollyard check tasks 'my tasks/one'"
    done = run("init", "script", "my script", cwd=tmp_path)
    assert done.stdout.splitlines()[-1].endswith(" --policy 'scripted:my script.yaml'")


def test_an_export_to_a_dash_makes_no_file(tmp_path):
    done = run("export", "last", "--out", "-", cwd=tmp_path)
    assert done.returncode == USAGE and "--out" in done.stderr
    assert os.listdir(tmp_path) == []


def test_an_address_without_a_scheme_is_shown_and_a_password_is_not(tmp_path):
    words = ("run", "--instruction", "x", "--agent", "shell-agent", "--model", "m", "--base-url")
    assert_one_line(run(*words, "localhost:8000", cwd=tmp_path), USAGE, "'localhost:8000'", "http://localhost:8000/v1")
    assert "secret" not in run(*words, "me:secret@host:80", cwd=tmp_path).stderr


def test_what_is_tried_again_is_told_with_its_cause(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLYARD_", "XDG_"))} | {"HOME": str(tmp_path)}
    line = ["sh", "-c", 'ulimit -n 20; exec "$0" "$@"', ROLLYARD, *NOP]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert "cannot make a sandbox" in done.stderr and "; trying again" in done.stderr and "stamina" not in done.stderr


def test_a_rollout_of_no_run_is_listed_and_the_command_that_shows_it_is_printed(tmp_path):
    done = run(*NOP, cwd=tmp_path, HOME=str(tmp_path))
    command = done.stdout.splitlines()[-1].split()
    assert command[:2] == ["rollyard", "show"] and command[3:] == ["--store", "a.db"]
    assert command[2] in run("list", "--store", "a.db", cwd=tmp_path).stdout
    assert command[2] in run(*command[1:], cwd=tmp_path).stdout


def test_a_machine_without_datasets_says_how_to_add_one(tmp_path):
    done = run("datasets", "list", cwd=tmp_path, HOME=str(tmp_path))
    assert "no dataset is added yet" in done.stdout and "rollyard datasets add" in done.stdout
    assert_one_line(run("datasets", "show", "x", cwd=tmp_path, HOME=str(tmp_path)), USAGE, "rollyard datasets list")


def test_an_evaluation_without_matplotlib_is_reported_without_plots(tmp_path):
    assert run("init", "eval", "ev", cwd=tmp_path).returncode == 0
    code = "import sys; sys.modules['matplotlib'] = None; from rollyard.cli.main import main; main()"
    line = [sys.executable, "-c", code, "eval", "eval.toml", "--out", "report", "--display", "none"]
    env = os.environ | {"HOME": str(tmp_path), "ROLLYARD_STORE": "runs.db"}
    done = subprocess.run(line, cwd=tmp_path / "ev", env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "pass@2" in done.stdout and "rollyard[report]" in done.stdout.splitlines()[-1]
    assert sorted(os.listdir(tmp_path / "ev" / "report")) == ["report.html", "report.json", "report.txt"]


def test_ctrl_c_while_modules_are_imported_ends_without_a_trace(tmp_path):
    (tmp_path / "typer.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from runpy import run_module; "
    line = [sys.executable, "-c", code + "run_module('rollyard', run_name='__main__')"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        assert started.stdout.readline() == "importing\n"
        started.send_signal(signal.SIGINT)
        _, told = started.communicate(timeout=60)
    assert (started.returncode, told) == (-signal.SIGINT, "")
