"""What an agent did, in the order it did it: `AgentActions`, read from a rollout's calls and its file changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, Literal

import msgspec

from rollyard.core.message import Message, ToolCall
from rollyard.core.rollout import Rollout
from rollyard.runs.scan.deobfuscate import reveal
from rollyard.runs.scan.diff import FileChange, read_diff
from rollyard.runs.scan.judges import Judges, find_judges
from rollyard.runs.scan.tool_call import FileWrite, find_written_texts, read_call, run_text

_FILE_NAMES = re.compile(r"[\w.-]+")
_RUNS = re.compile(r"\b(?:python3?|node|perl|ruby|sh|bash|source|exec)\b|(?:^|[\s;&|])\.{0,2}/")
_MOST_SCRIPT = 50_000

# What a finding takes the ground from: a reward above 0, one of 0, or either.
Invalidates = Literal["success", "failure", "both"]


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`call` is the number of the model call whose answer did it, `excerpt` the bytes that show it, `where` what they are part
    of: a tool call, a tool's result, the final words, or a file."""

    scanner: str
    rollout_id: str
    invalidates: Invalidates
    message: str
    where: str
    excerpt: str
    call: int | None = None


class AgentAction(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call with what came back. `command` is what a shell or an interpreter was given, else the arguments; `reads` and
    `writes` are files that the agent's own tools were pointed at."""

    call: int
    tool: str
    command: str
    result: str
    failed: bool
    reads: tuple[str, ...] = ()
    writes: tuple[FileWrite, ...] = ()
    scripts: str = ""  # files that the agent wrote before and that this runs

    @property
    def revealed(self) -> str:
        """The command with its variables, word lists and base64 spelled out."""
        return reveal(f"{self.command}\n{self.scripts}" if self.scripts else self.command)

    @property
    def executed(self) -> str:
        """What of it was run: without the files that it only writes."""
        if self.reads or self.writes:
            return ""
        return reveal("\n".join(filter(None, [run_text(self.command), self.scripts])))


class AgentActions(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    rollout: Rollout
    tools: tuple[AgentAction, ...]
    said: tuple[tuple[int, str], ...]  # what the model said, by call
    changes: tuple[FileChange, ...]  # of the diff; of the agent's own file tools where there is none

    @classmethod
    def of(cls, rollout: Rollout) -> AgentActions:
        answers = list(_answers(rollout))
        results = _results(rollout)
        read = (_read_action(seq, call, results) for seq, message in answers for call in message.tool_calls)
        tools = tuple(_with_scripts(read))
        return cls(
            rollout=rollout,
            tools=tools,
            said=tuple((seq, message.text) for seq, message in answers if message.text),
            changes=read_diff(patch) if (patch := _patch(rollout)) else tuple(_reported_changes(rollout, tools)),
        )

    @cached_property
    def judges(self) -> Judges:
        return find_judges(self.rollout.task)

    @property
    def instruction(self) -> str:
        return "\n".join([self.rollout.task.instruction, *(step.instruction for step in self.rollout.task.steps)])

    def find(
        self, scanner: str, invalidates: Invalidates, message: str, *, where: str, excerpt: str, call: int | None = None
    ) -> Finding:
        return Finding(
            scanner=scanner, rollout_id=self.rollout.id, invalidates=invalidates, message=message, where=where,
            excerpt=excerpt.strip()[:300], call=call,
        )  # fmt: skip

    def find_in_file(self, scanner: str, message: str, change: FileChange, excerpt: str) -> Finding:
        """In a file that was changed, at the last call that names it."""
        return self.find(
            scanner, "success", message, where=change.path, excerpt=excerpt, call=self.call_that_wrote(change.path)
        )

    def find_in_writes(self, scanner: str, message: str, path: str) -> Finding:
        """Of a file that no patch shows."""
        return self.find(
            scanner, "success", message, where="files written", excerpt=path, call=self.call_that_wrote(path)
        )

    def find_in_call(
        self, scanner: str, invalidates: Invalidates, message: str, action: AgentAction, excerpt: str | None = None
    ) -> Finding:
        """`excerpt` where these are bytes of the call; what was only revealed is shown by the call itself."""
        shown = excerpt if excerpt is not None and excerpt.strip() in action.command else action.command
        return self.find(scanner, invalidates, message, where="tool call", excerpt=shown, call=action.call)

    def call_that_wrote(self, path: str) -> int | None:
        name = PurePosixPath(path).name
        return next((action.call for action in reversed(self.tools) if name in action.command), None)


def _patch(rollout: Rollout) -> str:
    """A working directory over its bound has none, which must not hide what was done to it."""
    return "" if (rollout.diff or "").startswith("[no patch") else rollout.diff or ""


def _answers(rollout: Rollout) -> Iterator[tuple[int, Message]]:
    trajectory = rollout.trajectory
    if trajectory is None:
        return
    for record in trajectory.records:
        answer = trajectory.answer(record.id)
        if answer is not None:
            yield record.seq, answer.message


def _results(rollout: Rollout) -> dict[str, tuple[str, bool]]:
    """What came back, by the id of the tool call."""
    found: dict[str, tuple[str, bool]] = {}
    trajectory = rollout.trajectory
    for record in trajectory.records if trajectory is not None else ():
        for message in trajectory.messages(record.id) if trajectory is not None else ():
            for result in message.tool_results:
                text = _unwrap("".join(getattr(part, "text", "") for part in result.parts))
                found.setdefault(result.call_id, (text, result.is_error))
    return found


def _unwrap(text: str) -> str:
    """What a program printed, where an agent puts it into JSON."""
    if not text.startswith("{") or not text.rstrip().endswith("}"):
        return text
    try:
        read: Any = json.loads(text)
    except ValueError:
        return text
    printed = [read[key] for key in ("output", "stdout", "stderr") if isinstance(read.get(key), str)]
    code = next((read[key] for key in ("returncode", "exit_code") if isinstance(read.get(key), int)), 0)
    return "\n".join([*printed, *([f"exit code {code}"] if code else [])]) if printed else text


def _read_action(seq: int, call: ToolCall, results: Mapping[str, tuple[str, bool]]) -> AgentAction:
    result, failed = results.get(call.id, ("", False))
    command, reads, writes = read_call(call.name, call.arguments)
    return AgentAction(
        call=seq, tool=call.name, command=command, result=result, failed=failed, reads=reads, writes=writes
    )


def _with_scripts(actions: Iterator[AgentAction]) -> Iterator[AgentAction]:
    """What a program does that the agent wrote itself is done by the call that runs it."""
    texts: dict[str, str] = {}
    for action in actions:
        words = (
            set(_FILE_NAMES.findall(action.command))
            if texts and not action.writes and _RUNS.search(action.command)
            else ()
        )
        ran = [text for name, text in texts.items() if name in words]
        yield msgspec.structs.replace(action, scripts="\n".join(ran)[:_MOST_SCRIPT]) if ran else action
        for path, text in [
            *((write.path, "\n".join(write.added)) for write in action.writes if not write.gone),
            *find_written_texts(action.command),
        ]:
            texts[PurePosixPath(path).name] = text


def _reported_changes(rollout: Rollout, tools: tuple[AgentAction, ...]) -> Iterator[FileChange]:
    workdir = (rollout.task.workdir or "/app").rstrip("/") + "/"
    for write in (write for action in tools if not action.failed for write in action.writes):
        yield FileChange(
            path=write.path.removeprefix(workdir),
            new=write.new,
            gone=write.gone,
            added=write.added,
            removed=write.removed,
        )
