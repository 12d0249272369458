"""`BranchPoint`: where a rollout branches off another one. One line of text, so that it travels wherever a run's config does."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from rollyard.core.errors import ConfigError

# What an agent is told where it only has to go on: its resume flag wants words. The policy never sees a part that holds them.
RESUME_MARK = "[[rollyard resume]]"
END = "end"  # the place after the last answer that was recorded


How = Literal["auto", "resume", "replay"]  # by the agent's own session, or by its commands run again; auto: as can be
HOWS: tuple[How, ...] = get_args(How)


class BranchPoint(msgspec.Struct, frozen=True):
    """`call` is the id of the parent's call that the child's policy answers anew, or `end`: all recorded answers are given
    again, and the child goes on from there."""

    rollout: str
    call: str

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
