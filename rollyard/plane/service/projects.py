"""Files of a project that arrive before its environment does, at a URL that was signed for its name, version and owner.

Its client does not say beforehand what it will send, so what arrives is counted, unpacked from its compression within a bound,
and kept as a bundle. Which bundle a version has is in the plane's storage until its environment is registered, and after.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import time
import zlib
from collections.abc import AsyncIterator, Callable

import msgspec

from rollyard.core.errors import PlaneGone, PlaneInvalid, PlaneTooLarge, PlaneUnauthorized
from rollyard.plane.service.bundles import MAX_BUNDLE
from rollyard.plane.service.signing import Signer
from rollyard.plane.service.typed_records import TypedRecords
from rollyard.plane.storage.protocol import PlaneStore

_MINUTES = 15.0
_GZIP = b"\x1f\x8b"


class PushedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """`context` is the folder of the bundle that holds the project."""

    sha256: str
    context: str = ""


class Projects:
    def __init__(self, store: PlaneStore, signer: Signer, *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._signer, self._clock = store, signer, clock
        self._records = TypedRecords(store, "project", PushedFiles, clock=clock)

    def upload_url(self, owner: str, name: str, version: str, base_url: str) -> str:
        ends = str(int((self._clock() + _MINUTES * 60) * 1000))
        fields = (text.encode().hex() for text in (owner, name, version))
        return f"{base_url.rstrip('/')}/projects/{self._signer.sign('project', *fields, ends)}"

    async def receive(self, signed: str, parts: AsyncIterator[bytes]) -> PushedFiles:
        fields = self._signer.read("project", signed, 4)
        if fields is None:
            raise PlaneUnauthorized("this URL was not signed by this plane for a project")
        if self._clock() * 1000 >= int(fields[3]):
            raise PlaneGone("this URL has expired", hint="push again")
        owner, name, version = (bytes.fromhex(field).decode() for field in fields[:3])
        data = await _read(parts)
        files = PushedFiles(sha256=hashlib.sha256(data).hexdigest(), context=_top_folder(data))
        await self._store.put_blob(files.sha256, data, owner=owner, at=self._clock())
        await self._store.add_owner("bundle", files.sha256, owner, at=self._clock())
        return await self._records.update(owner, f"{name}@{version}", lambda _: files)

    async def find(self, owner: str, name: str, version: str) -> PushedFiles | None:
        kept = await self._records.get(owner, f"{name}@{version}")
        return None if kept is None else kept.value


async def _read(parts: AsyncIterator[bytes]) -> bytes:
    """A tar, out of its gzip where it has one."""
    kept, inflate, first = bytearray(), None, True
    try:
        async for part in parts:
            if first and part:
                inflate, first = zlib.decompressobj(31) if part.startswith(_GZIP) else None, False
            kept += part if inflate is None else inflate.decompress(part, MAX_BUNDLE - len(kept) + 1)
            if len(kept) > MAX_BUNDLE:
                raise PlaneTooLarge(f"a project has at most {MAX_BUNDLE} bytes")
    except zlib.error as error:
        raise PlaneInvalid(f"what was sent is not gzip: {error}") from error
    return bytes(kept)


def _top_folder(data: bytes) -> str:
    """The one folder that everything lies in, if there is one."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            names = [entry.name.removeprefix("./") for entry in tar if not entry.isdir()]
    except tarfile.TarError as error:
        raise PlaneInvalid(f"what was sent is not a tar archive: {error}") from error
    tops = {name.partition("/")[0] for name in names}
    return tops.pop() if len(tops) == 1 and all("/" in name for name in names) else ""
