"""The sha256 of a session's requests. One that begins with the history of the one before costs what it adds to it."""

from __future__ import annotations

from hashlib import sha256

LEAST = 8192  # bytes of a history below which hashing anew costs less


class BodyDigest:
    def __init__(self) -> None:
        self._text = memoryview(b"")
        self._state = sha256()  # of `_text`

    def digest(self, body: bytes, known: memoryview) -> bytes:
        """`known` is a text with which this body and later ones may begin."""
        if len(known) < LEAST or not body.startswith(known):
            return sha256(body).digest()
        if known is not self._text:
            if len(known) < len(self._text) or not body.startswith(self._text):
                self._text, self._state = memoryview(b""), sha256()
            self._state.update(known[len(self._text) :])
            self._text = known
        state = self._state.copy()
        state.update(memoryview(body)[len(known) :])
        return state.digest()
