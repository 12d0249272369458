"""`Env`: the Gym API of a task, and `StepResult`, what each of its moves gives.

It is for infrastructure: the trainer calls it. What an agent may do is `tools()`, served to it over MCP under a key of
its own; a tool can never be named like a verb of this class. One instance is one session, so an instance may keep state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from rollyard.core.progress import Progress, ignore_progress

if TYPE_CHECKING:
    from rollyard.tools.tool import Tool

RESERVED = ("reset", "step", "state", "close")


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """`reward` is None where nothing was scored, never 0 for want of a score. `terminated`: the task ended; `truncated`: a
    limit ended it."""

    observation: Any
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = {}

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Env:
    """Subclass it and write `reset` and `step`. `action` and `observation` are the types that clients see; an
    action is converted to its type before `step` sees it. `splits` are the tasks that clients may look through, by name;
    one of them is chosen by `options={"split": NAME, "index": N}` of `reset`. A step that takes long may say
    `await self.report_progress(done, total, message)`. `max_sessions` is how many may live in one server, whatever its
    capacity; `schemas` stand before those of the types."""

    action: ClassVar[Any] = dict[str, Any]
    observation: ClassVar[Any] = dict[str, Any]
    splits: ClassVar[Mapping[str, Sequence[Any]]] = {}
    max_sessions: ClassVar[int | None] = None
    schemas: ClassVar[Mapping[str, Any]] = {}
    counts_itself: ClassVar[bool] = False
    """Written for OpenEnv: `reset` gets `episode_id` among its options, `state` has an id and a count of its own, and a tool
    call that comes as an action is a step."""
    report_progress: Progress = staticmethod(ignore_progress)

    async def prepare(self) -> None:
        """Called once and first; whatever takes long when an environment is made goes here. `close` follows a failure."""

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> StepResult:
        """Begin an episode; the reward of this result is None."""
        raise TypeError(f"{type(self).__name__} has no reset")

    async def step(self, action: Any) -> StepResult:
        raise TypeError(f"{type(self).__name__} has no step")

    @property
    def state(self) -> Mapping[str, Any]:
        """What infrastructure may look at between steps; `episode_id` and `step_count` are added by the server."""
        return {}

    def tools(self) -> Sequence[Tool]:
        """What the agent may call over MCP. A tool may run while a step does."""
        return ()

    def save(self) -> Any:
        """JSON values from which `restore` goes on in another process, or None: this episode cannot outlive its server."""
        return None

    async def restore(self, saved: Any) -> None:
        """Called instead of `reset` on a new instance, with what `save` gave."""
        raise TypeError(f"{type(self).__name__} has no restore")

    async def close(self) -> None:
        """Called once, also when the episode was abandoned."""
