"""Keys: where a request may carry one, and which rollout it opens.

A key is looked up by its hash, and only the hash is kept after it was handed out. Two keys in one request that disagree are
refused: whichever part of the path between agent and gate looked at the other one, it would have been deceived.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from hmac import compare_digest
from typing import Generic, Protocol, TypeVar
from urllib.parse import parse_qs

from rollyard.core.errors import ConfigError, SessionClosed, Unauthorized
from rollyard.core.ids import secret


def new_key(rollout_id: str) -> str:
    """A rollout's key. Its end tells the processes of a gate whose it is (`processes.py`), and opens nothing."""
    return f"{secret('ry')}{rollout_place(rollout_id):02x}"


def rollout_place(rollout_id: str) -> int:
    """A number below 256, which says which process of a gate serves the rollout, however many there are."""
    return blake2b(rollout_id.encode("utf-8", "surrogatepass"), digest_size=1).digest()[0]


def key_place(key: str) -> int | None:
    """The rollout's number, as its key has it; None where it has none."""
    try:
        return int(key[-2:], 16)
    except ValueError:
        return None


def key_hash(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def check_key(name: str, key: str | None) -> str | None:
    """A key that an operator chose. Empty, blank or short ones are refused: they are mistakes, and they open the door."""
    if key is None:
        return None
    if len(key.strip()) < 16 or key != key.strip():
        raise ConfigError(
            f"{name} must have at least 16 characters and no blanks around it", hint="leave it out to have one made"
        )
    return key


def key_of(headers: Mapping[bytes, bytes], query: bytes) -> str:
    """The one key of a request: Bearer, `x-api-key`, `x-goog-api-key`, or Gemini's `?key=`."""
    found: list[str] = []
    bearer = headers.get(b"authorization")
    if bearer is not None:
        scheme, _, value = bearer.partition(b" ")
        if scheme.lower() == b"bearer":
            found.append(value.decode("latin-1").strip())
    for name in (b"x-api-key", b"x-goog-api-key"):
        value = headers.get(name)
        if value is not None:
            found.append(value.decode("latin-1").strip())
    if query and b"key=" in query:
        found.extend(parse_qs(query.decode("latin-1")).get("key", []))
    if not found or not all(found):
        raise Unauthorized("this endpoint needs a key")
    if any(other != found[0] for other in found[1:]):
        raise Unauthorized("the keys in this request disagree")
    return found[0]


class Keyed(Protocol):
    rollout_id: str
    key_hash: bytes


T = TypeVar("T", bound=Keyed)


class KeyRing(Generic[T]):
    """Hash of a key -> the open session it belongs to; and a bounded memory of keys that were revoked."""

    def __init__(self, remember: int) -> None:
        self._open: dict[bytes, T] = {}
        self._closed: OrderedDict[bytes, None] = OrderedDict()
        self._remember = remember

    def add(self, session: T) -> None:
        self._open[session.key_hash] = session

    def revoke(self, hashed: bytes) -> None:
        self._open.pop(hashed, None)
        self._closed[hashed] = None
        while len(self._closed) > self._remember:
            self._closed.popitem(last=False)

    def session(self, key: str) -> T:
        hashed = key_hash(key)
        session = self._open.get(hashed)
        if session is not None and compare_digest(session.key_hash, hashed):
            return session
        if hashed in self._closed:
            raise SessionClosed("this rollout is over")
        raise Unauthorized("this key opens nothing here")

    def __len__(self) -> int:
        return len(self._open)


def same_key(given: str, kept: str | None) -> bool:
    """Whether an operator's key was given, in time that does not depend on how much of it was right."""
    return kept is not None and compare_digest(key_hash(given), key_hash(kept))
