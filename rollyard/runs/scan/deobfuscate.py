"""What a command says once the simple ways to hide words are undone: variables, glued strings, word lists, escapes, base64.

It cannot run the program: what a program computes stays hidden here, and shows in files and results alone.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator

_MOST_CHARS = 200_000
_LONGEST_WORD = 500
_LONG_WORD = re.compile(r"\S{600,}")  # an embedded file or key: patterns over words would take their square
_USED = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
_ASSIGNED_OR_USED = re.compile(
    r"(?P<before>^|[;&|\s(])(?P<name>[A-Za-z_]\w*)=(?P<value>'[^']*'|\"[^\"]*\"|[^\s;&|()]+)|\$(?:\{(?P<braced>\w+)\}|(?P<bare>[A-Za-z_]\w*))"
)
_GLUED = re.compile(r"(?<=[\w/.-])(?:'\s*\+\s*'|\"\s*\+\s*\")(?=[\w/.-])|(?<=\w)(?:''|\"\")(?=\w)")
_PERL_QUOTE = re.compile(r"\bq\(([^()]{0,100})\)")
_WORD_LIST = re.compile(r"\[\s*['\"][^\]]{0,300}\]|\bqw\([^()]{0,300}\)")
_BETWEEN_WORDS = re.compile(r"['\"]\s*,\s*['\"]")
_LOOKED_UP = re.compile(r"\$\((?:command\s+-v|which|type\s+-p)\s+(\w+)\)|`(?:command\s+-v|which)\s+(\w+)`")
_ESCAPED = re.compile(r"\\x([0-9a-fA-F]{2})|\\0?([0-7]{3})(?![0-7])")
_BASE64 = re.compile(r"[A-Za-z0-9+/]{12,}={0,2}")
_HEX = re.compile(r"\b(?:[0-9a-fA-F]{2}){8,}\b")
_SAYS_HEX = re.compile(r"\bxxd\b|fromhex|unhexlify|'hex'|\"hex\"")


def reveal(command: str) -> str:
    text = _LONG_WORD.sub(lambda found: found[0][:_LONGEST_WORD], command[:_MOST_CHARS])
    text = _GLUED.sub("", text)
    text = _LOOKED_UP.sub(lambda found: found[1] or found[2], text)
    text = _PERL_QUOTE.sub(r"\1", text)
    text = _fill_in(text)
    text = _WORD_LIST.sub(_spell_list, text)
    return "\n".join([text, *_decode(text)])


def _fill_in(text: str) -> str:
    """Variables by the values that they have at each place; a value may have variables of its own."""
    values: dict[str, str] = {}

    def use(found: re.Match[str]) -> str:
        return values.get(found[1] or found[2], found[0])

    def step(found: re.Match[str]) -> str:
        if found["name"] is None:
            return values.get(found["braced"] or found["bare"], found[0])
        value = _USED.sub(use, found["value"])[:_LONGEST_WORD]
        values[found["name"]] = value.strip("'\"")
        return f"{found['before']}{found['name']}={value}"

    return _ASSIGNED_OR_USED.sub(step, text)


def _spell_list(found: re.Match[str]) -> str:
    """['git', 'log'] is a command, and ['logs', 'verifier'] may be a path."""
    inner = found[0][3:-1] if found[0].startswith("qw") else _BETWEEN_WORDS.sub(" ", found[0])
    path = re.sub(r"\s+", "/", re.sub(r"[\[\]'\"]", " ", inner).strip())
    return f"{inner} {path}"


def _decode(text: str) -> Iterator[str]:
    if _ESCAPED.search(text):
        yield _ESCAPED.sub(lambda found: chr(int(found[1], 16) if found[1] else int(found[2], 8)), text)
    for word in _BASE64.findall(text):
        try:
            said = base64.b64decode(word, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            continue
        if said.isprintable() or said.strip("\n").replace("\n", "").isprintable():
            yield said
    if _SAYS_HEX.search(text):
        yield from (bytes.fromhex(word).decode("ascii", "replace") for word in _HEX.findall(text))
