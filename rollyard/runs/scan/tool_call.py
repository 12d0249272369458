"""A tool call as what it does, whatever the agent calls its tools: a command, files it reads, files it writes.

Agents change files by Write, Edit, str_replace_editor, replace or apply_patch, the last also as a command in their shell. Of a
command, `run_text` leaves out text that only goes to a file, and `find_written_texts` gives just that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

_COMMANDS = ("command", "cmd", "commands", "script", "code", "input", "keystrokes", "patch", "patchText")
_PATHS = ("file_path", "filePath", "path", "absolute_path", "filename", "notebook_path")
_TEXTS = ("content", "contents", "file_text", "text", "new_content")
_OLD = ("old_string", "oldString", "oldText", "old_str", "old_text", "before")
_NEW = ("new_string", "newString", "newText", "new_str", "new_text", "after", "insert_text", "new_source")
_READS = ("read", "view", "cat", "open", "grep", "search")
_PATCHED = re.compile(r"^\*\*\* (Add|Update|Delete) File: (.+)$")
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_MOST_CHARS = 200_000
_TARGET = re.compile(r"(?<![12&])>>?\s*([\w./~-]+)|\btee\s+(?:-a\s+)?([\w./~-]+)")
_PRINTS_INTO = re.compile(r"\b(?:echo|printf)\s+(?:-\w+\s+)?('[^']*'|\"[^\"]*\")\s*>>?\s*([\w./~-]+)")
_INTO_FILE = re.compile(r"\bcat\b.*>|>.*\bcat\b|\b(?:tee|apply_patch|install)\b")
_INTERPRETER = re.compile(r"(?:^|[|;&]\s*)(?:python3?|node|perl|ruby|sh|bash)\b")
_PRINTED = re.compile(
    r"\b(?:echo|printf)\s+(?:-\w+\s+){0,4}(?:'[^']*'|\"[^\"]*\")(?:\s+(?:'[^']*'|\"[^\"]*\")){0,20}\s{0,5}(?=>)"
)


class FileWrite(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    new: bool = False  # written whole: what was there before is not known
    gone: bool = False


def read_call(name: str, arguments: str) -> tuple[str, tuple[str, ...], tuple[FileWrite, ...]]:
    """The command, or else the arguments; files that it reads; files that it writes."""
    try:
        read: Any = json.loads(arguments)
    except ValueError:
        return arguments, (), tuple(_read_patch(arguments))
    if not isinstance(read, dict):
        return arguments, (), ()
    given: dict[str, Any] = read
    path = _first(given, _PATHS)
    if path is not None:
        writes = tuple(_read_writes(path, given))
        reading = not writes and any(word in name.lower() or word == given.get("command") for word in _READS)
        return arguments, (path,) if reading else (), writes
    for key in _COMMANDS:
        value: Any = given.get(key)
        if isinstance(value, list):
            value = " ".join(str(word) for word in value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if isinstance(value, str):
            return value, (), tuple(_read_patch(value))
    return arguments, (), ()


def _first(given: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((given[name] for name in names if isinstance(given.get(name), str)), None)


def _read_writes(path: str, given: Mapping[str, Any]) -> Iterator[FileWrite]:
    edits: Any = given.get("edits")
    for one in [given, *(edits if isinstance(edits, list) else ())]:
        old, new = _first(one, _OLD), _first(one, _NEW)
        if old is not None or new is not None:
            yield FileWrite(path=path, added=_lines(new), removed=_lines(old))
    if (text := _first(given, _TEXTS)) is not None:
        yield FileWrite(path=path, added=_lines(text), new=True)


def _lines(text: str | None) -> tuple[str, ...]:
    return tuple((text or "").splitlines())


def _read_patch(text: str) -> Iterator[FileWrite]:
    if "*** Begin Patch" not in text:
        return
    kind, path, added, removed = "", "", list[str](), list[str]()
    for line in [*text.splitlines(), "*** Add File: "]:
        if (found := _PATCHED.match(line)) or line == "*** Add File: ":
            if path:
                yield FileWrite(
                    path=path, added=tuple(added), removed=tuple(removed), new=kind == "Add", gone=kind == "Delete"
                )
            kind, path = found.groups() if found else ("", "")
            added, removed = [], []
        elif line.startswith("+"):
            added.append(line[1:])
        elif line.startswith("-"):
            removed.append(line[1:])


def run_text(command: str) -> str:
    """Without the bodies of here-documents that go to a file, and without what is printed into one."""
    kept: list[str] = []
    end: str | None = None
    for line in command[:_MOST_CHARS].splitlines():
        if end is not None:
            end = None if line.strip() == end else end
            continue
        kept.append(line)
        found = _HEREDOC.search(line)
        if found and _INTO_FILE.search(line) and not _INTERPRETER.search(line):
            end = found[1]
    return _PRINTED.sub("echo ", "\n".join(kept))


def find_written_texts(command: str) -> Iterator[tuple[str, str]]:
    """Files that it writes by here-documents or by printing, with their texts."""
    path, end, body = "", None, list[str]()
    for line in command[:_MOST_CHARS].splitlines():
        if end is not None:
            if line.strip() == end:
                yield path, "\n".join(body)
                end = None
            else:
                body.append(line)
            continue
        found, target = _HEREDOC.search(line), _TARGET.search(line)
        if found and target:
            path, end, body = target[1] or target[2], found[1], []
    yield from ((found[2], found[1]) for found in _PRINTS_INTO.finditer(command[:_MOST_CHARS]))
