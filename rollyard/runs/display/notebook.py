"""A run in a notebook: a bar, the mean reward and the failures so far, in one output that is drawn over itself.

IPython is not imported here: where a notebook runs us, it is there already.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import IO, Any

from rollyard.core.errors import ConfigError
from rollyard.core.failure_groups import FailureGroup, group_failures
from rollyard.core.html import bar, block, escape, line, table
from rollyard.core.rollout import Rollout
from rollyard.runs.display.progress import SilentDisplay


class EndedCounts:
    """What the rollouts that ended come to, without keeping any of them."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._rewards, self._scored = 0.0, 0
        self._failures: tuple[FailureGroup, ...] = ()

    def add(self, rollout: Rollout) -> None:
        self.statuses[rollout.status] += 1
        self._tokens.update({name: rollout.usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")})
        if rollout.reward is not None:
            self._rewards, self._scored = self._rewards + rollout.reward, self._scored + 1
        if (failure := rollout.failure) is not None:
            one = FailureGroup(boundary=failure.boundary, cause=failure.cause, message=failure.message, count=1)
            self._failures = group_failures([*self._failures, one])

    def draw(self, run_id: str, owed: int, done: int) -> str:
        """`owed` and `done` are those of the run when it began."""
        ended = self.statuses.total()
        mean = f"mean reward {self._rewards / self._scored:.3f}" if self._scored else "no reward yet"
        words = [f"{ended}/{owed} attempts", *([f"{done} done before"] if done else []), mean]
        words += [f"{status} {count}" for status, count in sorted(self.statuses.items())]
        tokens = self._tokens
        words.append(f"{tokens['prompt_tokens']} tokens in, {tokens['completion_tokens']} out")
        failed = [(group.count, group.boundary, group.message) for group in self._failures]
        pieces = [line(run_id), f"<div>{bar(ended, owed)} {escape(', '.join(words))}</div>"]
        return block(*pieces, *([table((), failed)] if failed else []))


class NotebookDisplay(SilentDisplay):
    def __init__(self, out: IO[str]) -> None:
        super().__init__(out)
        if "IPython" not in sys.modules:
            raise ConfigError("the display 'notebook' is for notebooks", hint="here use plain or rich")
        self._owed, self._done = 0, 0
        self._ended = EndedCounts()
        self._handle: Any = None

    def begin(self, run_id: str, owed: int, done: int) -> None:
        super().begin(run_id, owed, done)
        self._owed, self._done = owed, done
        self._handle = sys.modules["IPython"].display.display(self, display_id=True)

    def rollout(self, rollout: Rollout) -> None:
        self._ended.add(rollout)
        if self._handle is not None:
            self._handle.update(self)

    def _repr_html_(self) -> str:
        return self._ended.draw(self.run_id, self._owed, self._done)


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this program: it can show HTML, which a terminal cannot."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")
