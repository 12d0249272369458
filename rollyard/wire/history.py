"""The history in a request, read where it is new.

An agent's request begins with the bytes of the one before: the same head, the same messages, then more of them. What those
bytes mean is remembered, and only what follows them is parsed.

That is exact, not likely. A parser that has read the same bytes is in the same state, so the known items may be left out
of what is parsed, if the place where they stood is a member that counts in the end: a body may name a member twice, or hold
the same list elsewhere. A mark that cannot be guessed is put in their place; where it comes out as the first item of the
member, the known ones stood there, and where it does not, the whole body is parsed.

Once that is known of a body, what surrounds its history is known too: where the next one begins and ends with the same bytes,
and what lies between is a list or the rest of one, nothing else of it is parsed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from rollyard.core.errors import GateError
from rollyard.wire.body import check_size, malformed, read, split_object
from rollyard.wire.codec import Memo
from rollyard.wire.members import BodyReader

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")
S = TypeVar("S")

MARK = b'"' + secrets.token_hex(16).encode() + b'"'
_MARKED = b"[" + MARK
_items = msgspec.json.Decoder(list[msgspec.Raw])
_BLANK = b" \n\r\t"
CHAT_HISTORY = b"chat history"  # its key in a memo


class History(NamedTuple, Generic[B, T, S]):
    """Where a dialect keeps it: the member, what one item of it means, and what the other members mean. `key` is its place in a
    memo."""

    key: bytes
    member: str
    parse: Callable[[Memo, msgspec.Raw], T]
    settle: Callable[[Memo, B], S]


class KnownRest(NamedTuple, Generic[S]):
    text: bytes  # from the bracket that closes the list
    settings: S


class KnownHistory(NamedTuple, Generic[T, S]):
    head: bytes  # up to the bracket that opens the list
    text: memoryview  # up to the end of the last item, in the body that it came in
    items: tuple[T, ...]
    rest: KnownRest[S] | None = None  # once a mark has shown that this list is the one that counts
    tail: bytes = b""  # what `rest` would be of, until then


def read_history(
    reader: BodyReader[B], body: bytes, memo: Memo, history: History[B, T, S]
) -> tuple[S, tuple[T, ...], tuple[int, int] | None]:
    """What a request says beside its history, the items of that, and where in the body their list lies, as far as it is known."""
    check_size(body)
    known: KnownHistory[T, S] | None = memo.get(history.key)
    if known is not None and body.startswith(known.head):
        found = _read_on(reader, body, memo, history, known)
        if found is not None:
            return found
    whole = reader.read(body)
    raw: Any = getattr(whole, history.member)
    items = tuple([history.parse(memo, each) for each in read(_items, raw, history.member)])
    settings = history.settle(memo, whole)
    listed = bytes(raw)
    start = body.find(b"[", body.find(b'"%b"' % history.member.encode()))
    if start <= 0 or not body.startswith(listed, start):  # a guess; one that only looks right is found out by a mark
        return settings, items, None
    if listed[:-1].rstrip(_BLANK).endswith(b"}"):
        end = start + len(listed) - 1
        head, tail = body[: start + 1], body[end:]
        again = known is not None and known.head == head and known.tail == tail
        rest = KnownRest(tail, settings) if again and _is_member(reader, history, head, tail) else None
        memo[history.key] = KnownHistory(head, _begin(body, end), items, rest, tail)
    return settings, items, (start, start + len(listed))


def _begin(body: bytes, end: int) -> memoryview:
    """A body up to there, less the blanks before it."""
    while body[end - 1] in _BLANK:
        end -= 1
    return memoryview(body)[:end]


def _is_member(reader: BodyReader[B], history: History[B, T, S], head: bytes, tail: bytes) -> bool:
    """Whether the list between these is the history, whatever it holds."""
    found = reader.read(b"".join((head, MARK, tail)))
    return bytes(getattr(found, history.member)) == b"[%b]" % MARK


def split_around(body: bytes, member: str, place: tuple[int, int]) -> dict[str, msgspec.Raw] | None:
    """The top-level members of a body that was read before, with `MARK` for the list at `place`, which is not read again; None
    where that list is not the member."""
    start, end = place
    found = split_object(b"".join((body[:start], MARK, body[end:])))
    return found if member in found and bytes(found[member]) == MARK else None


def _read_on(
    reader: BodyReader[B], body: bytes, memo: Memo, history: History[B, T, S], known: KnownHistory[T, S]
) -> tuple[S, tuple[T, ...], tuple[int, int]] | None:
    """None where the known items are not the beginning of the history after all, or something is wrong with what follows."""
    goes_on, rest = body.startswith(known.text), known.rest
    before = len(known.text) if goes_on else len(known.head)
    try:
        if rest is not None and len(body) >= before + len(rest.text) and body.endswith(rest.text):
            end = len(body) - len(rest.text)
            new = _items.decode(b"".join((_MARKED if goes_on else b"[", body[before:end], b"]")))
        elif goes_on:
            found = reader.read(b"".join((known.head, MARK, body[before:])))
            listed = bytes(getattr(found, history.member))
            new = _items.decode(listed)
            end = before + len(listed) - len(MARK) - 2
            rest = KnownRest(body[end:], history.settle(memo, found))
        else:
            return None
    except (GateError, *malformed):  # said better by who reads it whole
        return None
    if goes_on:
        if not new or bytes(new[0]) != MARK:
            return None
        del new[0]
    items = known.items if goes_on else ()
    if new:
        items += tuple([history.parse(memo, raw) for raw in new])
        memo[history.key] = KnownHistory(known.head, _begin(body, end), items, rest)
    return rest.settings, items, (len(known.head) - 1, end + 1)
