"""M: the model's moods: errors, silence, a full context, and answers that come back changed."""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import replace

from rollyard.core.call import Call, Reply, Usage
from rollyard.core.limits import Limits
from rollyard.core.message import Message, Part, Text, Thinking, ToolCall
from rollyard.policy import scripted
from rollyard.policy.scripted_policy import finish_actions
from rollyard.policy.toolbox import shell_call
from rollyard.testing.agent.fixture import DONE, WRITE, AgentFixture, AgentRun
from rollyard.testing.suite import Skip, case, check

SILENCE_S = 60.0
_FULL = 120_000  # tokens, as the model counts them, of a context of 128,000


@case("M1", "asks again after an error 500, and goes on", needs=("model", "shell"), timeout=300)
async def error_then_ok(fixture: AgentFixture) -> None:
    seen = await fixture.run([{"error": 500}, {"error": 500}, WRITE, {"error": 500}, DONE])
    seen.check_solved()


@case("M2", "waits through a minute of silence, and asks once", needs=("model", "shell"), slow=True, timeout=600)
async def silence(fixture: AgentFixture) -> None:
    limits = Limits(install=1500, agent=400, idle=30)
    seen = await fixture.run([{"sleep": SILENCE_S, **WRITE}, DONE], limits=limits)
    seen.check_solved()
    check(len(seen.calls) == 2, f"{len(seen.calls)} calls for two turns: it gave up waiting and asked again")


class FullContext:
    """The first answer reports a context that is nearly full; all later ones a small one."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.told = inner, False

    async def __call__(self, call: Call) -> Reply:
        reply = await self.inner(call)
        tokens = 500 if self.told else _FULL
        self.told = self.told or call.kind == "agent"
        return replace(reply, usage=Usage(prompt_tokens=tokens, completion_tokens=reply.usage.completion_tokens))

    async def closed(self, rollout_id: str) -> None:
        await self.inner.closed(rollout_id)

    async def aclose(self) -> None:
        await self.inner.aclose()


@case("M3", "goes on after its context was compacted", needs=("model", "shell"), timeout=300)
async def compaction(fixture: AgentFixture) -> None:
    steps = [{"shell": "echo one > one.txt"}, {"shell": "echo two > two.txt"}, WRITE, DONE]
    seen = await fixture.run(FullContext(scripted(steps)))
    seen.check_solved()
    kinds = [call.kind for call in seen.calls]
    if "compaction" not in kinds:
        raise Skip(f"it did not compact when told that {_FULL} tokens are used; its calls: {', '.join(kinds)}")


@case("M4", "sends answers back so that their branch goes on", needs=("model", "tools"), timeout=300)
async def echo(fixture: AgentFixture) -> None:
    seen = await fixture.run(odd_answers)
    seen.check_solved()
    check(len(seen.rollout.captured.branches) == 1, f"{len(seen.rollout.captured.branches)} branches, not one")


def odd_answers(call: Call) -> Reply:
    """Answers whose spelling agents like to change: white space, reasoning, the spacing of arguments."""
    results = sum(len(message.tool_results) for message in call.messages)
    if results >= 2:
        marker = finish_actions(call)  # agents that end by a command say so in their prompt
        return _reply_oddly(call, marker[0].command or "", results) if marker else _reply(Text("done"))
    return _reply_oddly(call, ["echo one > one.txt", "echo hello > out.txt"][results], results)


def _reply_oddly(call: Call, command: str, number: int) -> Reply:
    found = shell_call(call.tools, command)
    if found is None:
        raise Skip("it offers no shell")
    tool, arguments = found
    spaced = json.dumps(arguments, separators=(" , ", " : "))
    use = ToolCall(f"odd_{number}", tool.name, spaced, namespace=tool.namespace)
    return _reply(Thinking("  First I look.\n"), Text("Now  this: \t\n"), use)


def _reply(*parts: Part) -> Reply:
    message = Message("assistant", parts)
    finish = "tool_calls" if message.tool_calls else "stop"
    return Reply(message=message, finish=finish, usage=Usage(prompt_tokens=9, completion_tokens=9))


def rewrites(seen: AgentRun) -> tuple[str, ...]:
    """Which parts of the answers came back spelled otherwise; `seen` ran on `odd_answers`."""
    found: set[str] = set()
    last = max(seen.calls, key=lambda call: len(call.messages), default=None)
    sent = {use.id: reply.message for reply in seen.replies for use in reply.message.tool_calls}
    for echoed in last.messages if last is not None else ():
        for use in echoed.tool_calls:
            original = sent.get(use.id)
            if original is None:
                found.add("call ids")
                continue
            found.update(_differences(original, echoed))
    return tuple(sorted(found))


def _differences(original: Message, echoed: Message) -> set[str]:
    found: set[str] = set()
    if original.text != echoed.text:
        found.add("text trimmed" if original.text.strip() == echoed.text.strip() else "text")
    if original.thinking != echoed.thinking:
        found.add("reasoning dropped" if not echoed.thinking else "reasoning trimmed")
    if [use.arguments for use in original.tool_calls] != [use.arguments for use in echoed.tool_calls]:
        found.add("arguments re-serialised")
    return found
