"""A Dockerfile as a plan: stages of instructions, each with the line it stands on. Reading only; `build.py` carries it out.

Continuations, comments inside them, the `escape` directive, exec and shell forms and here-documents are read as the
reference describes. What this project cannot honour is refused here where that is already certain, with file and line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.images import dockerfile_words

_DIRECTIVE = re.compile(r"#\s*(escape|syntax|check)\s*=\s*(\S.*?)\s*$", re.IGNORECASE)
_HEREDOC = re.compile(r"<<(-?)\s*(?:\"([^\"\s/]+)\"|'([^'\s/]+)'|([A-Za-z_][A-Za-z0-9_.]*))")
_FLAG = re.compile(r"--([a-z][a-z-]*)(?:=(\S*))?(?:\s+|$)")
_FILES = ("ADD", "COPY", "FROM", "RUN", "WORKDIR")
_SETTINGS = ("ARG", "CMD", "ENTRYPOINT", "ENV", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER")
_MORE_SETTINGS = ("SHELL", "STOPSIGNAL", "USER", "VOLUME")
_KNOWN = frozenset((*_FILES, *_SETTINGS, *_MORE_SETTINGS))
_JSON_FORMS = frozenset({"RUN", "CMD", "ENTRYPOINT", "SHELL", "COPY", "ADD", "VOLUME"})
_WITH_HEREDOC = frozenset({"RUN", "COPY", "ADD"})
_FLAGS = {
    "FROM": {"platform"},
    "RUN": {"mount", "network"},
    "COPY": {"from", "chown", "chmod", "link", "exclude"},
    "ADD": {"chown", "chmod", "link", "exclude", "unpack"},
    "HEALTHCHECK": {"interval", "timeout", "start-period", "start-interval", "retries"},
}


class Heredoc(msgspec.Struct, frozen=True):
    name: str
    text: str
    literal: bool  # quoted: variables in it are not replaced


class Instruction(msgspec.Struct, frozen=True, kw_only=True):
    """`text` is everything after the flags; `argv` is set when it was a JSON list (the exec form)."""

    kind: str
    line: int
    text: str
    argv: tuple[str, ...] | None = None
    flags: tuple[tuple[str, str], ...] = ()
    heredocs: tuple[Heredoc, ...] = ()

    def flag(self, name: str) -> str | None:
        return next((value for flag, value in self.flags if flag == name), None)


class BuildStage(msgspec.Struct, frozen=True, kw_only=True):
    name: str | None
    base: str  # after global arguments were put in
    line: int
    instructions: tuple[Instruction, ...]


class BuildPlan(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    escape: Literal["\\", "`"]
    stages: tuple[BuildStage, ...]
    globals: Mapping[str, str]

    def fail(self, line: int, message: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{self.file}:{line}: {message}", hint=hint)

    def index(self, name: str) -> int | None:
        """A stage by its name (any case) or its number."""
        for number, stage in enumerate(self.stages):
            if stage.name is not None and stage.name.lower() == name.lower():
                return number
        return int(name) if name.isdigit() and int(name) < len(self.stages) else None


class _Reader:
    """Physical lines to instructions."""

    def __init__(self, text: str, file: str) -> None:
        self.lines, self.file, self.at = text.splitlines(), file, 0
        self.escape: Literal["\\", "`"] = "\\"
        self._directives()

    def fail(self, line: int, message: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{self.file}:{line}: {message}", hint=hint)

    def _directives(self) -> None:
        while self.at < len(self.lines):
            match = _DIRECTIVE.fullmatch(self.lines[self.at].strip())
            if match is None:
                return
            if match[1].lower() == "escape":
                if match[2] not in ("\\", "`"):
                    raise self.fail(self.at + 1, f"the escape character is \\ or `, not {match[2]!r}")
                self.escape = "`" if match[2] == "`" else "\\"
            self.at += 1

    def instructions(self) -> list[Instruction]:
        found: list[Instruction] = []
        while self.at < len(self.lines):
            if not self.lines[self.at].strip() or self.lines[self.at].lstrip().startswith("#"):
                self.at += 1
                continue
            found.append(self._instruction())
        return found

    def _logical_line(self) -> str:
        """One instruction's text, continuations joined, comment and empty lines between them dropped."""
        text = ""
        while self.at < len(self.lines):
            line = self.lines[self.at]
            self.at += 1
            if text and (not line.strip() or line.lstrip().startswith("#")):
                continue
            stripped = line.rstrip()
            if stripped.endswith(self.escape) and not stripped.endswith(self.escape * 2):
                text += stripped[:-1]
                continue
            return text + line
        return text

    def _instruction(self) -> Instruction:
        number = self.at + 1
        keyword, _, rest = self._logical_line().strip().partition(" ")
        kind = keyword.strip().upper()
        if "\t" in keyword:
            kind, _, tail = keyword.partition("\t")
            kind, rest = kind.upper(), f"{tail} {rest}"
        if kind == "ONBUILD":
            raise self.fail(number, "ONBUILD only matters to images built from this one, which are not built here")
        if kind not in _KNOWN:
            raise self.fail(number, f"unknown instruction {keyword!r}")
        flags, text = self._flags(kind, rest.strip(), number)
        if not text and kind != "CMD":
            raise self.fail(number, f"{kind} says nothing")
        heredocs = self._heredocs(text, number) if kind in _WITH_HEREDOC else ()
        argv = None if heredocs or kind not in _JSON_FORMS else _json_list(text)
        return Instruction(kind=kind, line=number, text=text, argv=argv, flags=flags, heredocs=heredocs)

    def _flags(self, kind: str, rest: str, line: int) -> tuple[tuple[tuple[str, str], ...], str]:
        flags: list[tuple[str, str]] = []
        while match := _FLAG.match(rest):
            name = match[1]
            if name not in _FLAGS.get(kind, set()):
                raise self.fail(line, f"{kind} --{name} is not supported")
            flags.append((name, match[2] or "true"))
            rest = rest[match.end() :]
        return tuple(flags), rest

    def _heredocs(self, text: str, line: int) -> tuple[Heredoc, ...]:
        found: list[Heredoc] = []
        for match in _HEREDOC.finditer(text):
            name = match[2] or match[3] or match[4]
            if name in (".", ".."):  # it becomes the name of a file on this host; a slash ends a here-document's name
                raise self.fail(line, f"a here-document cannot be named {name!r}")
            body: list[str] = []
            while True:
                if self.at >= len(self.lines):
                    raise self.fail(line, f"the here-document {name} never ends")
                content = self.lines[self.at]
                self.at += 1
                if match[1]:
                    content = content.lstrip("\t")
                if content == name:
                    break
                body.append(content + "\n")
            found.append(Heredoc(name, "".join(body), match[4] is None))
        return tuple(found)


def _json_list(text: str) -> tuple[str, ...] | None:
    if not text.startswith("["):
        return None
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except msgspec.MsgspecError:
        return None  # not JSON: then it is the shell form, as Docker has it


def parse(text: str, *, file: str, args: Mapping[str, str] | None = None) -> BuildPlan:
    """`args` are build arguments, which set `ARG`s before the first FROM as well."""
    reader = _Reader(text, file)
    given = dict(args or {})
    globals_: dict[str, str] = {}
    stages: list[BuildStage] = []
    current: list[Instruction] = []
    opened: tuple[str | None, str, int] | None = None

    def close() -> None:
        if opened is not None:
            name, base, line = opened
            stages.append(BuildStage(name=name, base=base, line=line, instructions=tuple(current)))

    for item in reader.instructions():
        if item.kind == "FROM":
            close()
            opened, current = _from(item, globals_, reader), []
        elif opened is not None:
            current.append(item)
        elif item.kind == "ARG":
            globals_ |= arguments(item, globals_, given, reader.escape, reader.file)
        else:
            raise reader.fail(item.line, f"{item.kind} stands before any FROM")
    close()
    if not stages:
        raise reader.fail(1, "there is no FROM")
    return BuildPlan(file=file, escape=reader.escape, stages=tuple(stages), globals=globals_)


def _from(item: Instruction, values: Mapping[str, str], reader: _Reader) -> tuple[str | None, str, int]:
    try:
        words = [
            dockerfile_words.expand(word, values, reader.escape)
            for word in dockerfile_words.split(item.text, reader.escape)
        ]
    except ValueError as error:
        raise reader.fail(item.line, f"FROM: {error}") from error
    if len(words) == 3 and words[1].upper() == "AS" and words[0]:
        return words[2], words[0], item.line
    if len(words) != 1 or not words[0]:
        raise reader.fail(item.line, f"FROM wants an image, and a name after AS: {item.text!r}")
    return None, words[0], item.line


def arguments(
    item: Instruction, values: Mapping[str, str], given: Mapping[str, str], escape: str, file: str
) -> dict[str, str]:
    """What an ARG line sets: the given value, its default, or nothing."""
    found: dict[str, str] = {}
    try:
        for word in dockerfile_words.split(item.text, escape):
            name, equals, default = word.partition("=")
            if name in given:
                found[name] = given[name]
            elif equals:
                found[name] = dockerfile_words.expand(default, {**values, **found}, escape)
    except ValueError as error:
        raise ConfigError(f"{file}:{item.line}: ARG: {error}") from error
    return found


def read(path: Path, *, args: Mapping[str, str] | None = None) -> BuildPlan:
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error
    return parse(text, file=str(path), args=args)
