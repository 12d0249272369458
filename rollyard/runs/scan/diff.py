"""A unified diff as the files it changes."""

from __future__ import annotations

import re

import msgspec

_NAMED = re.compile(r"(?:Large|Binary) file (.+) (is new|is gone|differs)$")


class FileChange(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    new: bool
    gone: bool
    added: tuple[str, ...]
    removed: tuple[str, ...]
    shown: bool = True  # False: it is large or binary, and was only named


def read_diff(text: str) -> tuple[FileChange, ...]:
    changes: list[FileChange] = []
    before, lines = "", text.splitlines()
    added: list[str] = []
    removed: list[str] = []
    path: str | None = None

    def end() -> None:
        if path is not None:
            gone = path == "/dev/null"
            changes.append(
                FileChange(
                    path=_name(before if gone else path),
                    new=before == "/dev/null",
                    gone=gone,
                    added=tuple(added),
                    removed=tuple(removed),
                )
            )
        added.clear()
        removed.clear()

    for number, line in enumerate(lines):
        if (only := _NAMED.match(line)) is not None and line[:1] not in "+-":
            end()
            path = None
            kind = only[2]
            changes.append(
                FileChange(
                    path=only[1], new=kind == "is new", gone=kind == "is gone", added=(), removed=(), shown=False
                )
            )
            continue
        if line.startswith("--- ") and number + 1 < len(lines) and lines[number + 1].startswith("+++ "):
            end()
            before, path = line[4:].split("\t")[0], None
        elif line.startswith("+++ ") and path is None:
            path = line[4:].split("\t")[0]
        elif line.startswith("+"):
            added.append(line[1:])
        elif line.startswith("-"):
            removed.append(line[1:])
    end()
    return tuple(changes)


def _name(path: str) -> str:
    return path[2:] if path.startswith(("a/", "b/")) else path
