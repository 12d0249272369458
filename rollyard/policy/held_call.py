"""`HeldCall`: one call that waits for the trainer. It ends exactly once: answered, failed, or gone (its reader left, its
rollout closed). A second or late reply is refused and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollyard.core.call import Call, Reply
from rollyard.core.errors import Error, ReplyRefused, UpstreamError
from rollyard.policy.renderers.protocol import Renderer
from rollyard.policy.trainer_reply import answer, reply_of


class HeldCall:
    """`reply` and `fail` may be called from any thread and never block; the `_sync` forms need no loop."""

    def __init__(
        self,
        call: Call,
        renderer: Renderer | None,
        finish: Callable[[HeldCall], bool],
        post: Callable[[Reply | Error], None],
    ) -> None:
        self.call = call
        self.open = True  # guarded by the table's lock
        self._renderer = renderer
        self._finish = finish
        self._post = post

    async def reply(self, *args: Any, **fields: Any) -> None:
        """`reply(ids, logprobs, version=...)`, `reply(text=...)`, `reply(message=...)` or `reply(reply=Reply(...))`."""
        self.reply_sync(*args, **fields)

    def reply_sync(self, *args: Any, **fields: Any) -> None:
        self.end(reply_of(self.call, answer(*args, **fields), self._renderer))

    async def fail(self, message: str, *, status: int = 500) -> None:
        self.fail_sync(message, status=status)

    def fail_sync(self, message: str, *, status: int = 500) -> None:
        """The agent gets a generic error of its dialect; `message` stays on the host's side."""
        self.end(UpstreamError(message, status=status))

    def end(self, outcome: Reply | Error) -> None:
        if not self._finish(self):
            raise ReplyRefused(f"call {self.call.id} is already answered, cancelled or closed")
        self._post(outcome)
