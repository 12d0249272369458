"""A script as data: the turns of a scripted policy, read from YAML, JSON or Python values.

    - shell: "echo hello > out.txt"        # the agent's own shell, whatever it is called
    - write: {path: notes.md, text: "..."}
    - tool: read                           # a tool by its name
      args: {path: notes.md}
    - parallel: [{shell: ls}, {shell: pwd}]
    - thinking: "first I look"             # goes with the next answer
    - sleep: 2                             # before the next answer
    - error: 500                           # instead of the next answer, once
    - text: "done"

`sleep`, `error` and `thinking` may stand alone or beside `shell`, `write`, `tool`, `parallel`, `text`; alone they belong to
the answer that follows. A mapping has `steps`, and may have `subagent` (steps of sub-agents) and `cases` (a list of
`{match: regular expression on the first user message, steps}`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rollyard.core.errors import ConfigError
from rollyard.core.near_path import near_path

ACTIONS = ("shell", "write", "tool", "parallel", "text")
BESIDE = ("sleep", "error", "thinking", "args", "times")


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One tool use: exactly one of `command` (in the agent's shell), `write`, `tool`."""

    command: str | None = None
    write: tuple[str, str] | None = None
    tool: str | None = None
    args: Mapping[str, Any] = {}


class ScriptTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, with what comes before it."""

    actions: tuple[Action, ...] = ()
    text: str = ""
    thinking: str = ""
    sleep: float = 0.0
    errors: tuple[int, ...] = ()


DONE = ScriptTurn(text="done")


class ScriptCase(msgspec.Struct, frozen=True):
    match: str
    turns: tuple[ScriptTurn, ...]


class Script(msgspec.Struct, frozen=True, kw_only=True):
    turns: tuple[ScriptTurn, ...]
    subagent: tuple[ScriptTurn, ...] = (DONE,)
    cases: tuple[ScriptCase, ...] = ()

    def turns_for(self, first_user_text: str) -> tuple[ScriptTurn, ...]:
        return next((c.turns for c in self.cases if re.search(c.match, first_user_text)), self.turns)


def load_script(source: str | Path | Mapping[str, Any] | Sequence[Any]) -> Script:
    if isinstance(source, str | Path):
        try:
            source = yaml.safe_load(Path(source).read_text())
        except OSError as error:
            raise ConfigError(f"cannot read the script {source}: {error.strerror}", hint=near_path(source)) from error
        except yaml.YAMLError as error:
            raise ConfigError(f"the script {source} is not YAML or JSON: {error}") from error
    if isinstance(source, Mapping):
        return mapping_script(source)
    return Script(turns=turns_of(source))


def mapping_script(source: Mapping[str, Any]) -> Script:
    unknown = set(source) - {"steps", "subagent", "cases"}
    if unknown:
        raise ConfigError(f"a script has steps, subagent and cases, not {', '.join(sorted(unknown))}")
    cases = tuple(ScriptCase(str(c["match"]), turns_of(c["steps"])) for c in source.get("cases", ()))
    return Script(
        turns=turns_of(source.get("steps", ())),
        subagent=turns_of(source["subagent"]) if "subagent" in source else (DONE,),
        cases=cases,
    )


def turns_of(steps: Any) -> tuple[ScriptTurn, ...]:
    if isinstance(steps, str | bytes | Mapping) or not isinstance(steps, Sequence):
        raise ConfigError("steps must be a list")
    turns: list[ScriptTurn] = []
    sleep, errors, thinking = 0.0, (), ""
    for number, step in enumerate(steps):
        known = check_step(step, number)
        sleep += float(known.get("sleep", 0))
        if "error" in known:
            errors = (*errors, *([int(known["error"])] * int(known.get("times", 1))))
        thinking += str(known.get("thinking", ""))
        if any(name in known for name in ACTIONS):
            turns.append(
                ScriptTurn(
                    actions=actions_of(known, number),
                    text=str(known.get("text", "")),
                    thinking=thinking,
                    sleep=sleep,
                    errors=errors,
                )
            )
            sleep, errors, thinking = 0.0, (), ""
    if sleep or errors or thinking:
        turns.append(ScriptTurn(text="done", thinking=thinking, sleep=sleep, errors=errors))
    return tuple(turns)


def check_step(step: Any, number: int) -> Mapping[str, Any]:
    if isinstance(step, str):
        return {"text": step}
    if not isinstance(step, Mapping):
        raise ConfigError(f"step {number} is not a mapping")
    unknown = set(step) - {*ACTIONS, *BESIDE}
    if unknown:
        raise ConfigError(
            f"step {number} has unknown keys: {', '.join(sorted(map(str, unknown)))}",
            hint=f"known: {', '.join((*ACTIONS, *BESIDE))}",
        )
    if not any(name in step for name in (*ACTIONS, "sleep", "error", "thinking")):
        raise ConfigError(f"step {number} does nothing", hint=f"one of {', '.join(ACTIONS)}")
    return step


def actions_of(step: Mapping[str, Any], number: int) -> tuple[Action, ...]:
    if "parallel" in step:
        inner = [check_step(one, number) for one in step["parallel"]]
        if any(len([n for n in ("shell", "write", "tool") if n in one]) != 1 for one in inner):
            raise ConfigError(f"step {number}: each of parallel is one shell, write or tool")
        return tuple(action for one in inner for action in actions_of(one, number))
    actions: list[Action] = []
    if "shell" in step:
        actions.append(Action(command=str(step["shell"])))
    if "write" in step:
        write = step["write"]
        if not isinstance(write, Mapping) or set(write) != {"path", "text"}:
            raise ConfigError(f"step {number}: write takes path and text")
        actions.append(Action(write=(str(write["path"]), str(write["text"]))))
    if "tool" in step:
        actions.append(Action(tool=str(step["tool"]), args=step.get("args", {})))
    return tuple(actions)
