"""A simulated user: it answers the agent's last message, and the agent goes on from its own session, until the user is content.

The user is a policy like any other, asked through the rollout's session at the gate. Its calls are of kind `user`: in the same
record, in no row of the agent's, and in rows of their own for training users.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec

from rollyard.core.call import USER_STOP, Call
from rollyard.core.errors import Error, PolicyError
from rollyard.core.ids import new_id
from rollyard.core.message import Message, Text
from rollyard.core.protocols import Policy
from rollyard.core.task import Task
from rollyard.gate import Session
from rollyard.runs.rollout.act import act
from rollyard.runs.rollout.context import Acted, AgentTurn, RolloutContext
from rollyard.runs.rollout.open_policy import open_policy
from rollyard.runs.rollout.options import RolloutOptions
from rollyard.runs.rollout.plan import SessionOptions
from rollyard.runs.rollout.stages import StageFailed

TURNS = 10
SPENT = "user_turns"  # the stop reason of a rollout whose user was not content in time
_PROMPT = """You are the user of an assistant that works for you, and you talk to it in the user's own words. What you want:

{wish}

Answer its last message as the user would, shortly, without doing its work. When you have what you want, say only {stop}"""


async def open_user(session: SessionOptions, options: RolloutOptions, stack: AsyncExitStack) -> SessionOptions:
    """The session with the policy that `user` names, closed with the stack."""
    if options.user is None:
        return session
    user = await open_policy(options.user, model=options.model, key_env=options.key_env)
    stack.push_async_callback(user.aclose)
    return msgspec.structs.replace(session, user=user)


async def converse(context: RolloutContext, acted: Acted) -> Acted:
    """The agent's last turn, once its user is content or has no turns left. One verdict comes after all of them."""
    user, session = context.session.user, acted.prepared.opened.session
    if user is None or session is None:
        return acted
    said = [Message("system", (Text(_describe_wish(context.task)),))]
    for _ in range(context.plan.options.user_turns or TURNS):
        if context.record.rollout.status != "completed":  # it ran out of its budget: there is nobody to answer
            return acted
        said.append(Message("user", (Text(_last_words(session)),)))
        answer = await _ask(context, session, user, tuple(said))
        if USER_STOP in answer.text or not answer.text.strip():
            return acted
        said.append(answer)
        acted = await act(context, acted.prepared, AgentTurn(answer.text, again=True))
    context.record.note(stop_reason=context.record.rollout.stop_reason or SPENT)
    return acted


async def _ask(context: RolloutContext, session: Session, user: Policy, said: tuple[Message, ...]) -> Message:
    call = Call(
        id=new_id("call"),
        rollout_id=context.plan.rollout_id,
        dialect="chat",
        model=context.plan.model,
        messages=said,
        kind="user",
        thread="user",
    )
    async with context.stages.stage("wait"):
        try:
            return (await session.gate.calls.ask_aside(session, user, call)).message
        except Error as error:
            raise StageFailed("wait", "policy", error) from error
        except TimeoutError as error:
            raise StageFailed("wait", "policy", PolicyError("the user's policy took too long")) from error


def _describe_wish(task: Task) -> str:
    """What the user wants and knows is in the task's metadata, or is the instruction itself."""
    return _PROMPT.format(wish=task.metadata.get("user") or task.instruction, stop=USER_STOP)


def _last_words(session: Session) -> str:
    trajectory = session.trajectory
    for record in reversed(trajectory.records):
        answer = trajectory.answer(record.id)
        if record.kind == "agent" and answer is not None and answer.message.text:
            return answer.message.text
    return ""
