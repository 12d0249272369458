"""Signed tokens: what a URL allows is written in it and proved by the plane's secret, so nothing has to be kept for it.

A token is its fields and an HMAC over the purpose and the fields. The purpose keeps one kind of token from being shown as
another. The secret is in a file that only its owner reads and never in the database: who may read records must not be able
to sign. Replicas of one plane are given the same file. `rotate_secret` ends everything that was signed before.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Literal

from rollyard.core.ids import new_id, secret
from rollyard.net.key_files import read_or_make_key, state_file, write_key

Purpose = Literal["port", "instance", "upload", "download", "project"]
SECRET_FILE = "plane.signing-secret"  # noqa: S105 - its name
_FIELD = re.compile(r"[A-Za-z0-9_-]+")


def read_secret(path: Path | None) -> str:
    """The signing secret of planes on this machine, made where there is none yet."""
    return read_or_make_key(path or state_file(SECRET_FILE), "sign")


def rotate_secret(path: Path | None) -> Path:
    """A new secret in place of the old one; the file is never without one."""
    kept = path or state_file(SECRET_FILE)
    new = kept.with_name(f"{kept.name}.{new_id('new')}")
    write_key(new, secret("sign"))
    new.replace(kept)
    return kept


def secret_for(purpose: str, signing_secret: str) -> str:
    """A secret of its own for another signer, which follows from this one."""
    return hmac.new(signing_secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()


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
