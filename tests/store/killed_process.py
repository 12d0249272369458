"""A verb in a process of its own (`killed_step.py`), which is killed inside a transaction."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def start(*words):
    script = str(Path(__file__).with_name("killed_step.py"))
    return subprocess.Popen([sys.executable, script, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def die_inside(process, number):
    """Whether it was killed inside the transaction or read of that number, and had not ended before."""
    for _ in range(number - 1):
        process.stdout.readline()
        os.write(process.stdin.fileno(), b"\n")
    reached = process.stdout.readline() == b"inside\n"
    process.send_signal(signal.SIGKILL if reached else signal.SIGTERM)
    process.communicate()
    return reached
