"""Signed tokens: what a URL allows is written in it and proved by the plane's secret, so nothing has to be kept for it.

A token is its fields and an HMAC over the purpose and the fields. The purpose keeps one kind of token from being shown as
another. The secret is the same for all replicas of a plane, which find it in their database.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from base64 import urlsafe_b64encode
from typing import Literal

Purpose = Literal["port", "instance", "upload", "download"]
_FIELD = re.compile(r"[A-Za-z0-9_-]+")


class Signer:
    def __init__(self, secret: str) -> None:
        if len(secret) < 16:
            raise ValueError("a signing secret has at least 16 characters")
        self._secret = secret.encode()

    def sign(self, purpose: Purpose, *fields: str) -> str:
        if not all(_FIELD.fullmatch(field) for field in fields):
            raise ValueError("a signed field is letters, digits, dashes and underscores")
        return ".".join((*fields, self._proof(purpose, fields)))

    def read(self, purpose: Purpose, token: str, count: int) -> tuple[str, ...] | None:
        """The fields, or None for a token that was not signed here for this purpose."""
        *fields, proof = token.split(".")
        if len(fields) != count or not hmac.compare_digest(proof.encode(), self._proof(purpose, fields).encode()):
            return None
        return tuple(fields)

    def _proof(self, purpose: Purpose, fields: list[str] | tuple[str, ...]) -> str:
        said = "\n".join((purpose, *fields)).encode()
        return urlsafe_b64encode(hmac.new(self._secret, said, hashlib.sha256).digest()).decode().rstrip("=")
