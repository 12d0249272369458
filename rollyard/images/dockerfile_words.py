"""Words, quotes and `${VARIABLES}` of a Dockerfile: its own small shell language, not the shell's.

Single quotes hold text as it is; double quotes hold variables; the escape character takes the next character literally.
`${v:-d}`, `${v-d}`, `${v:+a}`, `${v+a}` and `${v:?m}` are understood; pattern forms (`${v#p}`) are refused, not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|\d+|[@*#]")
_BRACED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|\d+)(?:(:?[-+?])(.*))?", re.DOTALL)


def split(text: str, escape: str = "\\") -> list[str]:
    """Words as written, quotes kept, so that each can be expanded afterwards."""
    words: list[str] = []
    word, quote, at = "", "", 0
    started = False
    while at < len(text):
        char = text[at]
        if char == escape and quote != "'" and at + 1 < len(text):
            word += text[at : at + 2]
            at, started = at + 2, True
            continue
        if quote:
            quote = "" if char == quote else quote
            word += char
        elif char in "'\"":
            quote, started = char, True
            word += char
        elif char.isspace():
            if started:
                words.append(word)
            word, started = "", False
        else:
            word, started = word + char, True
        at += 1
    if quote:
        raise ValueError(f"a {quote} is never closed")
    return [*words, word] if started else words


def expand(text: str, values: Mapping[str, str], escape: str = "\\") -> str:
    """`text` with its quotes removed and its variables replaced; an unset variable is empty."""
    out, quote, at = "", "", 0
    while at < len(text):
        char = text[at]
        if quote == "'":
            quote, out = ("", out) if char == "'" else (quote, out + char)
        elif char == escape and at + 1 < len(text):
            following = text[at + 1]
            out += following if not quote or following in f'"${escape}' else escape + following
            at += 1
        elif char == '"':
            quote = "" if quote else char
        elif char == "'" and not quote:
            quote = char
        elif char == "$":
            value, used = _variable(text[at + 1 :], values, escape)
            out += value
            at += used
        else:
            out += char
        at += 1
    return out


def _variable(rest: str, values: Mapping[str, str], escape: str) -> tuple[str, int]:
    """The value of a reference whose `$` was just read, and how many characters after it belong to it."""
    if not rest.startswith("{"):
        match = _NAME.match(rest)
        return (values.get(match[0], ""), match.end()) if match else ("$", 0)
    end = _find_closing(rest)
    match = _BRACED.fullmatch(rest[1:end])
    if match is None:
        raise ValueError(f"${rest[: end + 1]} is a form of substitution that is not supported")
    name, operator, word = match[1], match[2] or "", match[3] or ""
    value = values.get(name)
    absent = value is None or (operator.startswith(":") and value == "")
    if operator.endswith("-"):
        value = expand(word, values, escape) if absent else value
    elif operator.endswith("+"):
        value = "" if absent else expand(word, values, escape)
    elif operator.endswith("?") and absent:
        raise ValueError(f"{name}: {word or 'not set'}")
    return value or "", end + 1


def _find_closing(rest: str) -> int:
    depth = 0
    for at, char in enumerate(rest):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return at
    raise ValueError("a ${ is never closed")


def assignments(text: str, values: Mapping[str, str], escape: str = "\\") -> dict[str, str]:
    """`a=1 b="x y"`, or the old form `a some words`. All values see the environment as it was before this line."""
    words = split(text, escape)
    if not words:
        raise ValueError("nothing is assigned")
    if "=" not in words[0]:
        rest = text.strip()[len(words[0]) :].strip()
        if not rest:
            raise ValueError(f"{words[0]!r} needs a value")
        return {expand(words[0], values, escape): expand(rest, values, escape)}
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"{word!r} is not of the form name=value")
        found[expand(name, values, escape)] = expand(value, values, escape)
    return found
