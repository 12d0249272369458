"""`Queue`: every call waits until the trainer answers it (`interception_gate`).

The gate awaits `queue(call)` on its own loop. The trainer takes calls and replies from any loop, from a thread without one
(the `_sync` forms), or from another process through the gate's `/calls`. With a renderer each call carries its prompt in
exact ids and the trainer replies with ids alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rollyard.core.call import Call, Reply
from rollyard.core.errors import ConfigError, Error, PolicyClosed, ReplyRefused, UpstreamError
from rollyard.policy.held_call import HeldCall
from rollyard.policy.held_calls import HeldCallTable
from rollyard.policy.prompts import EditedHistory, Prompts
from rollyard.policy.renderers.load import load_shown
from rollyard.policy.renderers.protocol import Renderer, ShowTools, takes_tools
from rollyard.wire import CODECS


class Queue:
    """A `Policy`, and the `HeldCalls` of its trainer. `max_held` bounds the calls that wait: one more is an error that the
    agent sees as 503, never a silent drop. `hold_s` is how long one call may wait; `history` is that of `Prompts`. Trainers
    read in `Call.wanted` what a session's options make of a call."""

    honours = frozenset({"max_tokens_cap", "seed"})

    def __init__(
        self,
        renderer: Renderer | str | None = None,
        *,
        tools: ShowTools = "template",
        max_held: int = 10_000,
        hold_s: float = 3600.0,
        history: EditedHistory = "keep",
    ) -> None:
        if max_held < 1 or hold_s <= 0:
            raise ConfigError(f"max_held and hold_s must be positive, got {max_held} and {hold_s}")
        if renderer is None and history != "keep":
            raise ConfigError(f"history={history!r} needs a renderer: without one the trainer makes the prompts")
        self.renderer = load_shown(renderer, tools)
        self.prompts = None if self.renderer is None else Prompts(self.renderer, history=history)
        self.hold_s = hold_s
        self._calls = HeldCallTable(max_held)

    @property
    def takes_tools(self) -> bool:
        return self.renderer is None or takes_tools(self.renderer)

    # the gate's side

    async def __call__(self, call: Call) -> Reply:
        if self.prompts is not None:
            call = self.prompts.prepare(call)
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Reply | Error] = loop.create_future()

        def post(outcome: Reply | Error) -> None:
            call_in(loop, lambda: None if answered.done() else answered.set_result(outcome))

        started = time.time()
        held = HeldCall(call, self.renderer, self._calls.finish, post)
        self._calls.add(held)
        try:
            async with asyncio.timeout(self.hold_s):
                outcome = await answered
        except TimeoutError:
            raise UpstreamError(f"the trainer did not answer within {self.hold_s:g} s", status=504) from None
        finally:
            self._calls.finish(held)
        if isinstance(outcome, Error):
            raise outcome
        return msgspec.structs.replace(outcome, started_at=outcome.started_at or started)

    async def closed(self, rollout_id: str) -> None:
        """The agent has exited: its held calls end, and a caller that waits for its next one gets None."""
        self._end(self._calls.close(rollout_id))

    async def aclose(self) -> None:
        self._end(self._calls.close(None))

    def _end(self, ending: list[HeldCall]) -> None:
        for held in ending:
            try:
                held.end(PolicyClosed("the rollout was closed"))
            except ReplyRefused:
                continue  # answered in the same moment: that answer stands

    # the trainer's side

    @property
    def held(self) -> int:
        """How many calls wait, taken or not."""
        return len(self._calls)

    def session(self, rollout_id: str) -> QueueSession:
        return QueueSession(self._calls, rollout_id)

    async def take(self, max: int = 64, wait: float = 0.01, timeout: float | None = None) -> list[HeldCall]:
        """Held calls of all rollouts, one of each in turn: waits for a first, then `wait` seconds for more. [] once closed;
        TimeoutError when `timeout` seconds pass first."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            await wait_async(self._calls, None, until)
            if wait > 0 and 0 < self._calls.untaken < max:
                await asyncio.sleep(wait)
            if (batch := self._calls.pop(None, max)) is not None:
                return batch

    def take_sync(self, max: int = 64, wait: float = 0.01, timeout: float | None = None) -> list[HeldCall]:
        """`take` for a thread without a loop."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            wait_blocking(self._calls, None, until)
            if wait > 0 and 0 < self._calls.untaken < max:
                time.sleep(wait)
            if (batch := self._calls.pop(None, max)) is not None:
                return batch

    async def reply(self, call_id: str, reply: Reply) -> None:
        self._find(call_id).reply_sync(reply=reply)

    async def cancel(self, call_id: str, message: str, *, status: int = 500) -> None:
        self._find(call_id).fail_sync(message, status=status)

    def _find(self, call_id: str) -> HeldCall:
        held = self._calls.find(call_id)
        if held is None:
            raise ReplyRefused(f"no call {call_id} is held")
        return held


class QueueSession:
    """The calls of one rollout, in order of arrival."""

    def __init__(self, calls: HeldCallTable, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self._calls = calls

    async def next_request(self, timeout: float | None = None) -> HeldCall | None:
        """The next call; None once the agent has exited; TimeoutError when `timeout` seconds pass first."""
        until = None if timeout is None else time.monotonic() + timeout
        while (batch := self._calls.pop(self.rollout_id, 1)) is None:
            await wait_async(self._calls, self.rollout_id, until)
        return batch[0] if batch else None

    def next_request_sync(self, timeout: float | None = None) -> HeldCall | None:
        """The same for a plain thread; it must not be the one in which the gate's loop runs."""
        until = None if timeout is None else time.monotonic() + timeout
        while (batch := self._calls.pop(self.rollout_id, 1)) is None:
            wait_blocking(self._calls, self.rollout_id, until)
        return batch[0] if batch else None

    async def deliver(self, held: HeldCall, response: Reply | str | Mapping[str, Any]) -> None:
        """Answers with a `Reply`, with text, or with a chat completion as a mapping."""
        self.deliver_sync(held, response)

    def deliver_sync(self, held: HeldCall, response: Reply | str | Mapping[str, Any]) -> None:
        if isinstance(response, str):
            held.reply_sync(text=response)
        elif isinstance(response, Reply):
            held.reply_sync(reply=response)
        else:
            held.reply_sync(reply=CODECS["chat"].decode_reply(msgspec.json.encode(response)))


async def wait_async(calls: HeldCallTable, rollout: str | None, until: float | None) -> None:
    """Sleeps until there is something for this waiter; woken, never polling."""
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()

    def wake() -> None:
        call_in(loop, woken.set)

    if not calls.subscribe(rollout, wake):
        return
    try:
        async with asyncio.timeout(None if until is None else max(0.0, until - time.monotonic())):
            await woken.wait()
    finally:
        calls.unsubscribe(rollout, wake)


def wait_blocking(calls: HeldCallTable, rollout: str | None, until: float | None) -> None:
    woken = threading.Event()
    wake = woken.set
    if not calls.subscribe(rollout, wake):
        return
    try:
        if not woken.wait(None if until is None else max(0.0, until - time.monotonic())):
            raise TimeoutError("no call in time")
    finally:
        calls.unsubscribe(rollout, wake)


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        return  # that loop is closed: no caller waits there any more
