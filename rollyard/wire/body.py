"""Reading JSON that strangers sent, and reading only what is new in it.

Agents resend their whole history on every turn. A body is therefore parsed one level deep: history items stay raw bytes,
each is hashed, and only an item whose hash the session has never seen is parsed. What comes out of the memo are the very
message objects of the earlier turn, digests included.

Nothing but `BadRequest`, `TooLarge` (agents) and `UpstreamError` (model servers) leaves here, whatever the bytes are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar

import msgspec

from rollyard.core.errors import BadRequest, TooLarge, UpstreamError
from rollyard.wire.codec import MAX_BODY, Memo

T = TypeVar("T")
P = ParamSpec("P")

# a long list of tiny items costs far more memory than its bytes; commas bound the number of items from above
_COUNTED_FROM = 4 * 2**20
_MAX_COMMAS = 2_000_000
_OWN_KEY = 256  # bytes of an item that is its own key

WholeNumber = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # in a request; more could not be stored

malformed = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)

_any = msgspec.json.Decoder()
_object = msgspec.json.Decoder(dict[str, Any])
_raw_object = msgspec.json.Decoder(dict[str, msgspec.Raw])

dump = msgspec.json.Encoder().encode
ABSENT = msgspec.Raw()  # the default of an optional raw member


def _describe(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeError):
        return "not valid UTF-8"
    return str(error)


def from_agent(function: Callable[P, T]) -> Callable[P, T]:
    """Whatever an agent's bytes do to `function`, only a `GateError` leaves it."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except malformed as error:
            raise BadRequest(f"body: {_describe(error)}") from None

    return guarded


def from_upstream(function: Callable[P, T]) -> Callable[P, T]:
    """Whatever a model server's bytes do to `function`, only an `UpstreamError` leaves it."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (*malformed, BadRequest) as error:
            raise UpstreamError(f"the model server's answer cannot be read: {_describe(error)}", status=502) from None

    return guarded


def read(decoder: msgspec.json.Decoder[T], data: bytes | msgspec.Raw, what: str = "body") -> T:
    """Decode an agent's bytes."""
    try:
        return decoder.decode(data)
    except malformed as error:
        raise BadRequest(f"{what}: {_describe(error)}") from None


def check_size(body: bytes) -> None:
    if len(body) > MAX_BODY:
        raise TooLarge(f"the request body has {len(body)} bytes; at most {MAX_BODY} are read")
    if len(body) > _COUNTED_FROM and body.count(b",") > _MAX_COMMAS:
        raise TooLarge(f"the request body holds more than {_MAX_COMMAS} JSON items")


def read_upstream(decoder: msgspec.json.Decoder[T], data: bytes | str) -> T:
    """Decode a model server's bytes."""
    try:
        return decoder.decode(data)
    except malformed as error:
        raise UpstreamError(f"the model server's answer cannot be read: {_describe(error)}", status=502) from None


def read_object(raw: msgspec.Raw | bytes | str, what: str = "body") -> dict[str, Any]:
    try:
        return _object.decode(raw)
    except malformed as error:
        raise BadRequest(f"{what}: {_describe(error)}") from None


def split_object(data: bytes) -> dict[str, msgspec.Raw]:
    """The top-level members of a body that was read before, as raw values."""
    return read(_raw_object, data)


def parse_json(text: str | bytes) -> Any:
    """A JSON value, or None where the text is none."""
    try:
        return _any.decode(text)
    except malformed:
        return None


def parse_object(text: str | bytes) -> dict[str, Any] | None:
    try:
        return _object.decode(text)
    except malformed:
        return None


def raw_text(raw: msgspec.Raw, what: str = "body") -> str:
    try:
        return str(memoryview(raw), "utf-8")
    except UnicodeError as error:
        raise BadRequest(f"{what}: {_describe(error)}") from None


def is_given(raw: msgspec.Raw) -> bool:
    """Whether an optional raw member was there and not null."""
    if raw is ABSENT:
        return False
    size = len(memoryview(raw))
    return size > 0 and (size != 4 or bytes(raw) != b"null")


def digest(space: bytes, data: bytes | msgspec.Raw) -> bytes:
    """`space` (at most 16 bytes) keeps dialects and kinds of item apart."""
    return hashlib.blake2b(data, digest_size=16, person=space).digest()


def recall(memo: Memo, space: bytes, raw: msgspec.Raw, parse: Callable[[msgspec.Raw], T]) -> T:
    """What `raw` means, from the memo or parsed now. What is short is its own key: hashing it would take longer."""
    data = bytes(raw)
    key = space + data if len(data) <= _OWN_KEY else digest(space, data)
    return recall_keyed(memo, key, space, raw, parse)


def recall_same(memo: Memo, space: bytes, raw: msgspec.Raw, parse: Callable[[msgspec.Raw], T]) -> T:
    """As `recall`, for a large part that stays the same from turn to turn: comparing costs a fraction of hashing."""
    data = bytes(raw)
    last: tuple[bytes, T] | None = memo.get(space)
    if last is None or last[0] != data:
        last = memo[space] = data, recall(memo, space, raw, parse)
    return last[1]


def recall_keyed(memo: Memo, key: bytes, space: bytes, raw: msgspec.Raw, parse: Callable[[msgspec.Raw], T]) -> T:
    found = memo.get(key)
    if found is None:
        try:
            found = parse(raw)
        except malformed as error:
            raise BadRequest(f"{space.decode()}: {_describe(error)}") from None
        memo[key] = found
    return found
