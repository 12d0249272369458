"""Bundles: archives that environments name by sha256, sent and fetched by expiring signed URLs.

What arrives is counted and hashed while it comes; what is not exactly what the URL was signed for is refused and nothing is kept.
The plane never unpacks one.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable

from rollyard.core.errors import PlaneGone, PlaneInvalid, PlaneNotFound, PlaneTooLarge, PlaneUnauthorized
from rollyard.core.plane import ApiKey
from rollyard.plane.service.signing import Purpose, Signer
from rollyard.plane.storage.protocol import PlaneStore

MAX_BUNDLE = 256 * 2**20
_MAX_MINUTES = 24 * 60.0
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Bundles:
    def __init__(self, store: PlaneStore, signer: Signer, *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._signer, self._clock = store, signer, clock

    async def upload_url(self, sha256: str, size: int, owner: str, minutes: float, base_url: str) -> tuple[str, float]:
        _check(sha256, minutes)
        if not 0 < size <= MAX_BUNDLE:
            raise PlaneTooLarge(f"a bundle has 1 to {MAX_BUNDLE} bytes")
        return self._url("upload", (sha256, str(size), owner.encode().hex()), minutes, base_url)

    async def download_url(self, sha256: str, caller: ApiKey, minutes: float, base_url: str) -> tuple[str, float]:
        _check(sha256, minutes)
        if not (await self._store.has_blob(sha256) if caller.role == "admin" else await self.has(sha256, caller.owner)):
            raise PlaneNotFound(f"there is no bundle {sha256}")
        return self._url("download", (sha256,), minutes, base_url)

    async def has(self, sha256: str, owner: str) -> bool:
        """Whether this owner has sent it. That another one has is not told."""
        _check(sha256, 1.0)
        return owner in await self._store.owners_of("bundle", sha256)

    async def receive(self, signed: str, parts: AsyncIterator[bytes]) -> bool:
        """Take in what an upload URL was signed for; False when it was here already."""
        sha256, size, owner = self._read("upload", signed, 3)
        digest, kept, length = hashlib.sha256(), list[bytes](), 0
        async for part in parts:
            length += len(part)
            if length > int(size):
                raise PlaneTooLarge(f"this URL is for {size} bytes")
            digest.update(part)
            kept.append(part)
        if length != int(size) or digest.hexdigest() != sha256:
            raise PlaneInvalid("what was sent is not what this URL was signed for", hint="send the file unchanged")
        owner = bytes.fromhex(owner).decode()
        new = await self._store.put_blob(sha256, b"".join(kept), owner=owner, at=self._clock())
        await self._store.add_owner("bundle", sha256, owner, at=self._clock())
        return new

    async def send(self, signed: str) -> bytes:
        (sha256,) = self._read("download", signed, 1)
        return await self._store.get_blob(sha256)

    def _url(self, purpose: Purpose, fields: tuple[str, ...], minutes: float, base_url: str) -> tuple[str, float]:
        ends = self._clock() + minutes * 60
        signed = self._signer.sign(purpose, *fields, str(int(ends * 1000)))
        return f"{base_url.rstrip('/')}/bundles/{signed}", ends

    def _read(self, purpose: Purpose, signed: str, count: int) -> tuple[str, ...]:
        fields = self._signer.read(purpose, signed, count + 1)
        if fields is None:
            raise PlaneUnauthorized(f"this URL was not signed by this plane for an {purpose}")
        if self._clock() * 1000 >= int(fields[-1]):
            raise PlaneGone("this URL has expired", hint="ask for another")
        return fields[:-1]


def _check(sha256: str, minutes: float) -> None:
    if not _SHA256.fullmatch(sha256):
        raise PlaneInvalid("a bundle is named by the sha256 of its bytes, in lower case hexadecimal")
    if not 0 < minutes <= _MAX_MINUTES:
        raise PlaneInvalid(f"minutes is above 0 and at most {_MAX_MINUTES:.0f}")
