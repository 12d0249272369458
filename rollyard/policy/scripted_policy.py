"""`scripted`: a model that does what a script says. For tests, demonstrations, and checking agents.

It keeps no place of its own in the script: the place is read from the history that the agent sends, so branches, retries
and restarts answer alike. Tool-call ids carry the turn's number (`s3_1_...`), which holds even where an agent splits
parallel calls or drops text.

Its tokens are real in the sense that they can be recorded, exported and compared: the UTF-8 bytes of what it says, in the
vocabulary of the byte model, with logprob 0.0, since a script says the same with probability one. They come from no
network; a trainer that wants those uses another policy.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollyard.core.call import USER_STOP, Call, Reply, Usage, floats
from rollyard.core.errors import PolicyError, Unsupported, UpstreamError
from rollyard.core.message import Message, Part, Text, Thinking, ToolCall
from rollyard.policy.evidence import examine
from rollyard.policy.prompts import Check, Prompts
from rollyard.policy.renderers.bytelevel import ByteRenderer
from rollyard.policy.renderers.load import renderer as load_renderer
from rollyard.policy.renderers.protocol import Renderer, takes_tools
from rollyard.policy.script import DONE, Action, Script, ScriptTurn, load_script, turns_of
from rollyard.policy.toolbox import find_tool, shell_call, write_call

AnswerFunction = Callable[[Call], Any | Awaitable[Any]]
STEP = re.compile(r"^s(\d+)_\d+_")
RESUME = re.compile(r"\[script turn (\d+)\]")  # in a summary, so that a compacted history goes on where it was
# Agents that end by a command, not by text, say so in their prompt
FINISH_BY_SHELL = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
ONLY_WRITES = re.compile(r"^echo (?P<text>[^|&;<>`$]*?) ?> ?(?P<path>[\w./-]+)$")


class SpeakingRenderer(Renderer, Protocol):
    """A renderer that can also say a message in tokens."""

    def completion_of(self, message: Message) -> array[int]: ...


def scripted(
    source: str | Path | Mapping[str, Any] | Sequence[Any] | AnswerFunction,
    *,
    renderer: SpeakingRenderer | str | None = None,
    check: Check = "never",
) -> Scripted:
    """From a YAML or JSON file, its value, or a function of the call that returns a step, text or a `Reply`. With a
    `renderer` (or its name) it speaks in that model's tokens; `check` is that of `Prompts`."""
    speaker = load_speaker(renderer) if isinstance(renderer, str) else renderer
    if callable(source):
        return Scripted(source, speaker, check)
    script = load_script(source)
    return Scripted(lambda call: turn_for(script, call), speaker, check, honours=frozenset({"seed"}))


def load_speaker(name: str) -> SpeakingRenderer:
    found: Any = load_renderer(name)
    if not hasattr(found, "completion_of"):
        raise Unsupported(f"a script cannot speak in the tokens of the renderer {name!r}: it only reads them")
    return found


class Scripted:
    """A `Policy`. `prompts.counts` says how its prompts were made. A script says the same whatever the seed, and acts on no
    other option of a call; a function finds them all in `Call.options`."""

    text: str | None = None  # that `parse` read

    def __init__(
        self,
        answering: AnswerFunction,
        renderer: SpeakingRenderer | None = None,
        check: Check = "never",
        honours: frozenset[str] = frozenset({"seed", "disable_thinking", "max_tokens_cap", "top_logprobs"}),
    ) -> None:
        self._answering, self.honours = answering, honours
        self._renderer: SpeakingRenderer = renderer or ByteRenderer()
        self.prompts = Prompts(self._renderer, check=check)
        self.takes_tools = takes_tools(self._renderer)
        self._failed: dict[str, Counter[tuple[str | None, int]]] = {}

    async def __call__(self, call: Call) -> Reply:
        started = time.time()
        answer = self._answering(call)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, Reply):
            return examine(answer)
        turn = as_turn(answer)
        place = place_in(call)
        self._refuse(call, turn, place)
        if turn.sleep:
            await asyncio.sleep(turn.sleep)
        message = message_for(turn, call, place)
        return self._reply(self.prompts.prepare(call), message, started)

    def _refuse(self, call: Call, turn: ScriptTurn, place: int) -> None:
        """The turn's errors, one for each time it is asked, before its answer."""
        seen = self._failed.setdefault(call.rollout_id, Counter())
        count = seen[call.thread, place]
        if count < len(turn.errors):
            seen[call.thread, place] += 1
            status = turn.errors[count]
            raise UpstreamError(f"the script answers {status} here", status=status)

    def _reply(self, call: Call, message: Message, started: float) -> Reply:
        sampled = self._renderer.completion_of(message)
        assert call.prompt_ids is not None
        return examine(
            Reply(
                message=message,
                finish="tool_calls" if message.tool_calls else "stop",
                usage=Usage(prompt_tokens=len(call.prompt_ids), completion_tokens=len(sampled)),
                model=call.model,
                prompt_ids=call.prompt_ids,
                completion_ids=sampled,
                logprobs=floats([0.0]) * len(sampled),
                inserted=call.inserted,
                prompt_source=call.prompt_source,
                break_reason=call.break_reason,
                sampling=call.sampling,
                engine={"kind": "scripted", "renderer": self._renderer.name},
                started_at=started,
                finished_at=time.time(),
            )
        )

    async def closed(self, rollout_id: str) -> None:
        self._failed.pop(rollout_id, None)

    async def aclose(self) -> None:
        return None


def place_in(call: Call) -> int:
    """How many turns of the script the history holds."""
    place = 0
    for message in call.messages:
        if message.role == "assistant":
            steps = [STEP.match(c.id) for c in message.tool_calls]
            numbers = [int(found.group(1)) for found in steps if found]
            place = max(numbers) + 1 if numbers else place + 1
        elif message.role == "user" and (resumed := RESUME.search(message.text)):
            place = int(resumed.group(1))
    return place


def turn_for(script: Script, call: Call) -> ScriptTurn:
    place = place_in(call)
    if call.kind == "auxiliary":
        return ScriptTurn(text="scripted")
    if call.kind == "compaction":
        return ScriptTurn(text=f"Summary of the work so far. [script turn {place}]")
    turns = script.subagent if call.kind == "subagent" else script.turns_for(first_user_text(call))
    if place < len(turns):
        return turns[place]
    return ScriptTurn(text=USER_STOP) if call.kind == "user" else DONE


def first_user_text(call: Call) -> str:
    return next((m.text for m in call.messages if m.role == "user"), "")


def as_turn(answer: Any) -> ScriptTurn:
    if isinstance(answer, ScriptTurn):
        return answer
    if isinstance(answer, str | Mapping):
        turns = turns_of([answer])
        return turns[0] if turns else DONE
    raise PolicyError(f"a scripted function gave {type(answer).__name__}; it may give a step, text or a Reply")


def message_for(turn: ScriptTurn, call: Call, place: int) -> Message:
    parts: list[Part] = []
    if turn.thinking:
        parts.append(Thinking(turn.thinking))
    if call.tools:
        actions = turn.actions or finish_actions(call)
        if turn.text:
            parts.append(Text(turn.text))
        parts.extend(tool_call(action, call, place, n) for n, action in enumerate(actions))
    elif types_keys(call):
        parts.append(Text(keystrokes(turn)))
    else:
        said = [turn.text] if turn.text else []
        parts.append(Text("\n\n".join([*said, *(whole_file(action) for action in turn.actions)])))
    return Message("assistant", tuple(parts))


def finish_actions(call: Call) -> tuple[Action, ...]:
    """Agents that end by a command rather than by text name it in their prompt."""
    if any(FINISH_BY_SHELL in m.text for m in call.messages if m.role in ("system", "user")):
        return (Action(command=f"echo {FINISH_BY_SHELL}"),)
    return ()


def tool_call(action: Action, call: Call, place: int, number: int) -> ToolCall:
    tool, args = resolve_action(action, call)
    identity = f"s{place}_{number}_{call.id[-8:]}"
    spelled = json.dumps(args, ensure_ascii=False)  # spaced, as models write it
    return ToolCall(identity, tool.name, spelled, namespace=tool.namespace)


def resolve_action(action: Action, call: Call) -> tuple[Any, Mapping[str, Any]]:
    found = None
    if action.command is not None:
        found = shell_call(call.tools, action.command)
    elif action.write is not None:
        found = write_call(call.tools, *action.write)
    elif action.tool is not None:
        exact = next((t for t in call.tools if t.name == action.tool), None)
        tool = exact or find_tool(call.tools, (action.tool.lower(),))
        found = None if tool is None else (tool, action.args)
    if found is None:
        offered = ", ".join(t.name for t in call.tools)
        raise PolicyError(f"the script wants {action.tool or 'a shell'}; the agent offers {offered}")
    return found


def types_keys(call: Call) -> bool:
    """Whether the agent asks for keystrokes as JSON in the text, as Terminus does."""
    return any('"keystrokes"' in m.text for m in call.messages if m.role in ("system", "user"))


def keystrokes(turn: ScriptTurn) -> str:
    commands = [a.command for a in turn.actions if a.command is not None]
    typed = [{"keystrokes": f"{command}\n", "duration": 1.0} for command in commands]
    answer = {"analysis": turn.text, "plan": turn.thinking, "commands": typed, "task_complete": not typed}
    return json.dumps(answer)


def whole_file(action: Action) -> str:
    """For agents without tools: the file listing that they apply as an edit, or a command to read."""
    if action.write is not None:
        path, text = action.write
    elif action.command is not None and (writes := ONLY_WRITES.match(action.command)):
        path, text = writes["path"], writes["text"].strip("'\"") + "\n"
    elif action.command is not None:
        return f"```bash\n{action.command}\n```"
    else:
        raise PolicyError(f"the script wants {action.tool}; the agent offers no tools")
    return f"{path}\n```\n{text if text.endswith(chr(10)) else text + chr(10)}```"
