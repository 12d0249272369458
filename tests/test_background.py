"""The suite itself, started the way a shell starts what runs in its background."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def ignore_interrupt():
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_tests_that_send_ctrl_c_pass_where_it_is_ignored():
    test = "tests/runs/test_sync.py::test_ctrl_c_waits_until_what_was_begun_is_cleaned_up"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--timeout", "60", test]
    done = subprocess.run(command, cwd=ROOT, preexec_fn=ignore_interrupt, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:]
