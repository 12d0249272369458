"""A test runner that did not start, and how that is seen.

Whose fault it is cannot be read off its output: the same tests are run once on the untouched image (`grade.py`). If they do not
start there either, no verdict is possible; otherwise the agent's files are the reason, and that is judged.
"""

from __future__ import annotations

import re

from rollyard.core.errors import VerifierError
from rollyard.core.rollout import Verdict

NOT_STARTED = (4, 126, 127)  # pytest's usage error; a program that cannot be run, or is not there

_RAN = re.compile(r"^=+ test session starts =+$|^(=+ )?\d+ (passed|failed|error|skipped).* in [\d.]+s", re.MULTILINE)
_SIGNS = re.compile(
    r"""^(
        .*:\ error:\ unrecognized\ arguments:.*
      | ERROR:\ usage:\ .*
      | ERROR:\ (file\ or\ directory\ )?not\ found:\ /tests.*
      | .*No\ module\ named\ '?pytest'?\)?
      | (.*[:\s])?(pytest|py\.test|python[\d.]*|uvx?|pip3?):\ (command\ )?not\ found
      | .*env:\ .?(pytest|python[\d.]*|uvx?|bash|sh).{0,3}:\ No\ such\ file\ or\ directory
      | .*bad\ interpreter:.*
      | \S*sh:\ (line\ )?\d+:\ /tests/\S+:\ (not\ found|No\ such\ file\ or\ directory|cannot\ execute.*)
    )$""",
    re.MULTILINE | re.VERBOSE,
)


class RunnerNotStarted(VerifierError):
    """`cause` is what was seen; `verdict` stands if the agent's files are the reason."""

    def __init__(self, cause: str, verdict: Verdict) -> None:
        super().__init__(f"the test runner did not start: {cause}")
        self.cause, self.verdict = cause, verdict


def not_started(log: str, exit_code: int | None) -> str | None:
    """What in a test's output, or its exit code, says that no test ever ran; None when nothing does."""
    if _RAN.search(log):
        return None
    if match := list(_SIGNS.finditer(log)):
        return match[-1][0].strip()[-300:]
    return f"exit code {exit_code}" if exit_code in NOT_STARTED else None
