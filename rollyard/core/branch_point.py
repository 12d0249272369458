"""`BranchPoint`: where a rollout branches off another one. One line of text, so that it travels wherever a run's config does."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from rollyard.core.errors import ConfigError

# The prompt of an agent that only has to continue: its resume flag requires one. The policy never sees a part that contains it.
RESUME_MARK = "[[rollyard resume]]"
END = "end"  # the place after the last answer that was recorded
AFTER = "after:"  # before a call's id: the place after its answer, for a parent that goes on meanwhile


How = Literal["auto", "resume", "replay"]  # by the agent's own session, or by its commands run again; auto: as can be
HOWS: tuple[How, ...] = get_args(How)


class BranchPoint(msgspec.Struct, frozen=True):
    """`call` is the id of the parent's call that the child's policy answers anew; or `end`, or `after:` and an id: all recorded
    answers, or those up to that one, are given again, and the child goes on from there."""

    rollout: str
    call: str

    @property
    def is_behind(self) -> bool:
        """Whether it lies behind an answer and not at a call: what the policy saw there is not known."""
        return self.call == END or self.call.startswith(AFTER)

    @classmethod
    def parse(cls, text: str) -> BranchPoint:
        rollout, mark, call = text.partition("@")
        if not (rollout and mark and call):
            raise ConfigError(
                f"{text!r} names no branch point", hint="ROLLOUT@CALL, or ROLLOUT@end to go on from its end"
            )
        return cls(rollout, call)

    def __str__(self) -> str:
        return f"{self.rollout}@{self.call}"
