"""`CallEnv`: one step is one model call, for a trainer that is the policy.

Reset starts the agent; the observation is its first request (chat messages and tools, whatever dialect it speaks, and the
prompt in ids where the server has a renderer). Each action is the answer: an assistant message, text, or sampled tokens. The
last observation is the whole rollout, with the verifier's reward; every earlier reward is None. A step that is cancelled ends
the rollout: half an answer cannot be taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rollyard.core.call import Call
from rollyard.core.errors import EnvError, ReplyRefused, UpstreamError
from rollyard.core.ids import new_id
from rollyard.core.rollout import Rollout
from rollyard.envs.env import StepResult
from rollyard.gate import rollout_json
from rollyard.policy.held_call import HeldCall
from rollyard.policy.queue import Queue, QueueSession
from rollyard.runs.coding_env import TaskedEnv, progress_sink, step_result
from rollyard.runs.coding_request import CodingArguments
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.wire import CODECS

# here the trainer answers, whatever the server has for others
_TRAINERS: CodingArguments = {"base_url": None, "key": None, "key_env": None, "mode": None, "direct": False}


class CallAction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The action. `tokens` are recorded as sampled; without a renderer they need the message they are."""

    message: dict[str, Any] | None = None
    text: str | None = None
    tokens: list[int] | None = None
    logprobs: list[float] | None = None
    version: int | None = None
    finish: Literal["stop", "tool_calls", "length"] | None = None


class CallEnv(TaskedEnv):
    """Holds a coding agent's model calls and lets the trainer answer them, one by one."""

    action = CallAction

    _queue: Queue | None = None
    _calls: QueueSession | None = None
    _rollout: asyncio.Task[Rollout] | None = None
    _held: HeldCall | None = None

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> StepResult:
        await self._stop()
        self._choose(seed, options or {})
        task, pending = self._current()
        self._queue = Queue(self._options.renderer)
        rollout_id = new_id("ro")
        self._calls = self._queue.session(rollout_id)
        arguments: CodingArguments = {
            **pending, "policy": self._queue, **_TRAINERS, "rollout_id": rollout_id, "sink": progress_sink(self._tell),
        }  # fmt: skip
        self._rollout = asyncio.get_running_loop().create_task(run_rollout(task, **arguments))
        return await self._next()

    async def step(self, action: CallAction) -> StepResult:
        held = self._held
        if held is None:
            raise EnvError("no model call waits for an answer: reset")
        try:
            _answer(held, action)
        except ReplyRefused as error:
            if held.open:
                raise  # a better answer may follow
            raise EnvError("the agent did not wait for this answer: reset") from error
        self._held = None
        return await self._next()

    @property
    def state(self) -> Mapping[str, Any]:
        return {**super().state, "waiting": self._held is not None}

    async def close(self) -> None:
        await self._stop()

    async def _tell(self, done: float, total: float | None = None, message: str | None = None) -> None:
        await self.report_progress(done, total, message)

    async def _next(self) -> StepResult:
        """The agent's next request, or the end."""
        assert self._calls is not None and self._rollout is not None
        loop = asyncio.get_running_loop()
        pending = loop.create_task(self._calls.next_request())
        try:
            await asyncio.wait({pending, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            if pending.done() and (held := pending.result()) is not None:
                self._held = held
                return StepResult(observation=_observation(held.call), info={"task_id": self._task_id})
            done = await asyncio.shield(self._rollout)
        except asyncio.CancelledError:
            await self._stop()
            raise
        finally:
            pending.cancel()
        await self._stop()
        return step_result(done)

    async def _stop(self) -> None:
        """End the rollout, if one runs, and leave nothing of it."""
        rollout, queue = self._rollout, self._queue
        self._rollout = self._queue = self._calls = self._held = None
        if rollout is not None:
            rollout.cancel()
            await asyncio.wait({rollout})
        if queue is not None:
            await queue.aclose()


def _observation(call: Call) -> dict[str, Any]:
    """As the gate shows a held call to a trainer in another process."""
    return {
        "call_id": call.id,
        "rollout_id": call.rollout_id,
        "dialect": call.dialect,
        "kind": call.kind,
        **rollout_json.chat_request(call),
        "sampling": {k: v for k, v in msgspec.to_builtins(call.sampling).items() if v is not None},
        "prompt_ids": None if call.prompt_ids is None else list(call.prompt_ids),
    }


def _answer(held: HeldCall, turn: CallAction) -> None:
    if (turn.message is None) == (turn.text is None) and (turn.message is not None or turn.tokens is None):
        raise ReplyRefused("answer with a message, with text, or with tokens")
    message = None
    if turn.message is not None:
        finish = "tool_calls" if turn.message.get("tool_calls") else "stop"
        completion = {"choices": [{"index": 0, "message": turn.message, "finish_reason": finish}]}
        try:
            message = CODECS["chat"].decode_reply(msgspec.json.encode(completion), held.call).message
        except UpstreamError as error:
            raise ReplyRefused(f"message: {error.message}") from error
    held.reply_sync(
        turn.tokens, turn.logprobs, text=turn.text, message=message, version=turn.version, finish=turn.finish
    )
