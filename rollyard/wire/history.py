"""The history in a request, read where it is new.

An agent's request begins with the bytes of the one before: the same head, the same messages, then more of them. What those
bytes mean is remembered, and only what follows them is parsed.

That is exact, not likely. A parser that has read the same bytes is in the same state, so the known items may be left out
of what is parsed, if the place where they stood is a member that counts in the end: a body may name a member twice, or hold
the same list elsewhere. A mark that nobody can guess is put in their place; where it comes out as the first item of the
member, the known ones stood there, and where it does not, the whole body is parsed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from rollyard.core.errors import GateError
from rollyard.wire.body import check_size, read, split_object
from rollyard.wire.codec import Memo
from rollyard.wire.members import BodyReader

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")

_MARK = b'"' + secrets.token_hex(16).encode() + b'"'
_items = msgspec.json.Decoder(list[msgspec.Raw])
_BLANK = b" \n\r\t"
CHAT_HISTORY = b"chat history"  # its key in a memo


class History(NamedTuple, Generic[T]):
    """Where a dialect keeps it: the member, and what one item of it means. `key` is its place in a memo."""

    key: bytes
    member: str
    parse: Callable[[Memo, msgspec.Raw], T]


class KnownHistory(NamedTuple, Generic[T]):
    head: bytes  # up to the bracket that opens the list
    text: bytes  # up to the end of the last item
    items: tuple[T, ...]


def read_history(
    reader: BodyReader[B], body: bytes, memo: Memo, history: History[T]
) -> tuple[B, tuple[T, ...], tuple[int, int] | None]:
    """A request, the items of its history, and where in the body their list lies, as far as that is known."""
    check_size(body)
    known: KnownHistory[T] | None = memo.get(history.key)
    if known is not None and body.startswith(known.text):
        found = _read_on(reader, body, memo, history, known)
        if found is not None:
            return found
    whole = reader.read(body)
    raw: Any = getattr(whole, history.member)
    items = tuple([history.parse(memo, each) for each in read(_items, raw, history.member)])
    listed = bytes(raw)
    start = body.find(b"[", body.find(b'"%b"' % history.member.encode()))
    if start <= 0 or not body.startswith(listed, start):  # a guess; one that only looks right is found out by a mark
        return whole, items, None
    if listed[:-1].rstrip(_BLANK).endswith(b"}"):
        end = start + len(listed) - 1
        memo[history.key] = KnownHistory(body[: start + 1], body[:end].rstrip(_BLANK), items)
    return whole, items, (start, start + len(listed))


def split_around(body: bytes, member: str, place: tuple[int, int]) -> dict[str, msgspec.Raw]:
    """The top-level members of a body that was read before. The list at `place` is not read again."""
    start, end = place
    found = split_object(b"".join((body[:start], _MARK, body[end:])))
    if member not in found or bytes(found[member]) != _MARK:
        return split_object(body)
    found[member] = msgspec.Raw(body[start:end])
    return found


def _read_on(
    reader: BodyReader[B], body: bytes, memo: Memo, history: History[T], known: KnownHistory[T]
) -> tuple[B, tuple[T, ...], tuple[int, int]] | None:
    """None where the known items are not the beginning of the history after all, or something is wrong with what follows."""
    short = b"".join((known.head, _MARK, body[len(known.text) :]))
    try:
        rest = reader.read(short)
        listed = bytes(getattr(rest, history.member))
        first, *new = read(_items, listed, history.member)
    except (GateError, ValueError):  # said better by who reads it whole
        return None
    if bytes(first) != _MARK:
        return None
    items = known.items + tuple([history.parse(memo, raw) for raw in new])
    end = len(known.text) + len(listed) - len(_MARK) - 2
    if new:
        memo[history.key] = KnownHistory(known.head, body[:end].rstrip(_BLANK), items)
    return rest, items, (len(known.head) - 1, end + 1)
