"""A person at a terminal: a command under a pseudo-terminal of some size, what is written there, and the screen it leaves.

The screen is drawn by a terminal emulator, so a display that moves the cursor is seen as a person sees it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import select
import struct
import subprocess
import sys
import termios
import time
from typing import NamedTuple

import pyte

CTRL_C = b"\x03"
ROLLYARD = str(pathlib.Path(sys.executable).with_name("rollyard"))
# Gives the command the terminal as its own, so that Ctrl-C and a closed terminal reach it, also where the tests ignore both.
_SEAT = """
import fcntl, os, signal, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>78]")
_OF_THE_TESTS = ("CI", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "COLUMNS", "LINES", "TERM", "TTY_")


class Shown(NamedTuple):
    """`screen` is what a person can read at the end, scrolled up or not; `written` is everything that was sent."""

    code: int | None
    screen: str
    written: str
    columns: int

    @property
    def wide_lines(self) -> list[str]:
        """Lines that the terminal had to break."""
        lines = re.split(r"[\r\n]+", _CONTROL.sub("", self.written))
        return [line for line in lines if len(line.rstrip()) > self.columns]

    @property
    def coloured(self) -> bool:
        return re.search(r"\x1b\[(?:\d+;)*3[0-9]", self.written) is not None


class Terminal:
    """`with Terminal(argv, ...) as terminal: terminal.wait_for("ready"); terminal.press(CTRL_C); shown = terminal.end()`"""

    def __init__(self, argv, *, cwd, env, columns=80, rows=24):
        self.columns = columns
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._child = subprocess.Popen(
            [sys.executable, "-c", _SEAT, *argv], cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self._screen = pyte.HistoryScreen(columns, rows, history=100_000)
        self._stream = pyte.ByteStream(self._screen)
        self._written = bytearray()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        if self._ours >= 0:
            os.close(self._ours)

    @property
    def written(self) -> str:
        return self._written.decode(errors="replace")

    @property
    def screen(self) -> str:
        above = ["".join(line[x].data for x in range(self.columns)) for line in self._screen.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self._screen.display]).rstrip()

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def signal(self, number: int) -> None:
        self._child.send_signal(number)

    def hang_up(self, limit: float = 120) -> int:
        """Closes the terminal, as one that closes its window does; the command's exit code."""
        os.close(self._ours)
        self._ours = -1
        return self._child.wait(limit)

    def wait_for(self, words: str, limit: float = 60) -> None:
        """Until the words stand on the screen."""
        until = time.monotonic() + limit
        while words not in self.screen:
            if not self._read(until):
                raise AssertionError(f"{words!r} was not shown; this was:\n{self.screen}")

    def end(self, limit: float = 120) -> Shown:
        """Reads until the command has ended; `code` is None when it had not ended in time."""
        until = time.monotonic() + limit
        while self._read(until):
            pass
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(max(0.0, until - time.monotonic()))
        return Shown(self._child.poll(), self.screen, self.written, self.columns)

    def _read(self, until: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return False
        try:
            block = os.read(self._ours, 65536)
        except OSError:  # every holder of the other side has closed it
            return False
        self._written += block
        self._stream.feed(block)
        return bool(block)


def environment(home, **more) -> dict[str, str]:
    """What a person's shell has: a terminal that knows colours, a home of their own, and nothing of a test run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_TESTS)}
    return {**kept, "HOME": str(home), "TERM": "xterm-256color", **more}


def on_terminal(*argv, cwd, columns=80, limit=120, **env) -> Shown:
    """`rollyard ARGV...` from its first word to its last."""
    with Terminal([ROLLYARD, *map(str, argv)], cwd=cwd, env=environment(cwd, **env), columns=columns) as terminal:
        return terminal.end(limit)
