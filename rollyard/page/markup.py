"""Text that agents and models wrote, as HTML that can do nothing: Markdown, code in colour, a terminal's colours.

What comes in is hostile. Markdown is read without HTML, without pictures, and with links to http and https alone; code and
terminal output are escaped piece by piece. Nothing here makes a script, a style attribute or a request.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.util import ClassNotFound
from rich.ansi import AnsiDecoder
from rich.color import Color, ColorSystem
from rich.style import Style

_CODE = 20_000  # characters that are coloured; more is shown plain
_MARKS = 3000  # beyond so many, reading them takes longer than a page may
_LINK = re.compile(r"https?://", re.IGNORECASE)
# Control characters, and those that turn text round
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\u202a-\u202e\u2066-\u2069]")
_OTHER_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-ln-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[()][0-9A-B]|[=>78cDEHM])")


def markdown(text: str) -> Markup:
    if sum(map(text.count, "[*_")) > _MARKS:
        return Markup('<pre class="said">{}</pre>').format(visible(text))
    return Markup(_reader().render(visible(text)))  # noqa: S704 - its own tags around escaped text


def visible(text: str) -> str:
    """Control characters as pictures of themselves, so that no text hides in them."""
    return _ODD.sub(lambda found: chr(0x2400 + ord(found[0])) if ord(found[0]) < 0x20 else "\ufffd", text)


def code(text: str, *, language: str = "", name: str = "") -> Markup:
    """In the colours of a language, or of the language that a file of this name has; plain where neither is known."""
    text = visible(text)
    lexer = _lexer(language, name) if len(text) <= _CODE else None
    if lexer is None:
        return escape(text)
    return Markup(highlight(text, lexer, HtmlFormatter(nowrap=True, classprefix="t-")).rstrip("\n"))  # noqa: S704 - Pygments escapes


def _lexer(language: str, name: str) -> Any:
    options: dict[str, Any] = {"stripnl": False, "ensurenl": False}
    try:
        if language:
            return get_lexer_by_name(language, **options)
        return get_lexer_for_filename(name, **options) if name else None
    except ClassNotFound:
        return None


def terminal(text: str) -> Markup:
    """What a terminal would show: colours and weight as classes; a line that was written over shows its last state."""
    text = text.replace("\r\n", "\n")
    if "\x1b" not in text and "\r" not in text and "\b" not in text:
        return escape(visible(text))
    decoder, lines = AnsiDecoder(), list[Markup]()
    for line in _OTHER_SEQUENCE.sub("", text).split("\n"):
        lines.append(_line(decoder, _overwrite(line)))
    return Markup("\n").join(lines)


def _overwrite(line: str) -> str:
    """A progress bar goes back to the line's start and writes again."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def _line(decoder: AnsiDecoder, line: str) -> Markup:
    found = decoder.decode_line(line)
    edges = sorted({0, len(found.plain), *(at for span in found.spans for at in (span.start, span.end))})
    out = list[Markup]()
    for start, end in pairwise(edges):
        styles = [s.style for s in found.spans if s.start <= start and end <= s.end and isinstance(s.style, Style)]
        names = _classes(Style.combine(styles)) if styles else ""
        piece = escape(visible(found.plain[start:end]))
        out.append(Markup('<span class="{}">{}</span>').format(names, piece) if names else piece)
    return Markup("").join(out)


def _classes(style: Style) -> str:
    names = [name for name in ("bold", "dim", "italic", "underline", "strike") if getattr(style, name)]
    front, back = (style.bgcolor, style.color) if style.reverse else (style.color, style.bgcolor)
    names += [f"{kind}{number}" for kind, colour in (("fg", front), ("bg", back)) if (number := _number(colour)) >= 0]
    return " ".join(f"a-{name}" for name in names)


def _number(colour: Color | None) -> int:
    """One of a terminal's sixteen colours; -1 for its own."""
    if colour is None or colour.is_default:
        return -1
    found = colour.downgrade(ColorSystem.STANDARD).number
    return -1 if found is None else found


@cache
def _reader() -> MarkdownIt:
    reader = MarkdownIt("commonmark", {"html": False, "breaks": True}, renderer_cls=_Renderer)
    reader.enable(["table", "strikethrough"]).disable("image")
    reader.validateLink = lambda url: _LINK.match(url) is not None  # type: ignore[method-assign]
    return reader


class _Renderer(RendererHTML):
    """Without style attributes; code in colour; a link shows where it leads and sends no referrer."""

    def fence(self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]) -> str:
        language = tokens[idx].info.split(maxsplit=1)[0] if tokens[idx].info.strip() else ""
        return Markup('<pre class="code">{}</pre>\n').format(code(tokens[idx].content, language=language))

    def code_block(self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return Markup('<pre class="code">{}</pre>\n').format(tokens[idx].content)

    def link_open(self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]) -> str:
        token = tokens[idx]
        token.attrs = {"href": token.attrs["href"], "title": token.attrs["href"], "rel": "noopener noreferrer nofollow"}
        return self.renderToken(tokens, idx, options, env)

    def td_open(self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]) -> str:
        tokens[idx].attrs = {"class": "n"} if "right" in str(tokens[idx].attrs.get("style", "")) else {}
        return self.renderToken(tokens, idx, options, env)

    th_open = td_open

    def table_open(self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return '<div class="scroll"><table>\n'

    def table_close(self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return "</table></div>\n"
