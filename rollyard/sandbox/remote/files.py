"""Contents of files: small ones in the command itself, large ones by the SDK. The rest is in `paths`.

A write goes to a file of ours first and is then copied to its place: an upload that broke half way is never seen. Where the
SDK reads and writes any file in one call, that is tried first; what it cannot do is done the long way, which knows why.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable

from rollyard.core.errors import ConfigError, PathError, SandboxError
from rollyard.core.ids import new_id
from rollyard.sandbox.paths import ROOT, TREE_S, PathSteps
from rollyard.sandbox.remote.errors import translate_errors
from rollyard.sandbox.remote.programs import RemotePrograms
from rollyard.sandbox.remote.provider import StreamingLink
from rollyard.sandbox.retry import LOOKS, retry_open

# Says the size and, for a small file, what is in it; for a large one, where it really is.
_READ = """p=$1; [ -d "$p" ] && exit 21
[ -e "$p" ] || { while [ ! -e "$p" ]; do p=$(dirname "$p"); done; [ -d "$p" ] || exit 20; exit 2; }
[ -r "$p" ] || exit 13
s=$(($(wc -c <"$p"))); echo $s; [ $s -gt $2 ] && exit 0; if [ $s -le $3 ]; then cat <"$p"; else readlink -f "$p"; fi
"""
_SMALL = 2**18
_WRITE = """p=$1; [ -d "$p" ] && exit 21; d=$(dirname "$p")
[ -d "$d" ] || { q=$d; while [ ! -e "$q" ]; do q=$(dirname "$q"); done; [ -d "$q" ] || exit 20; }
mkdir -p -- "$d" || exit 100
if [ -n "$2" ]; then cat <"$2" >"$p"; else printf %s "$4" | base64 -d >"$p"; fi || exit 100
[ -z "$3" ] || chmod "$3" "$p" || exit 100
"""
_REFUSED = ("never", "configuration")  # an SDK's no to a path; anything else is about the connection or the sandbox
_INLINE = 24_000  # bytes that go in the command itself


class RemoteFiles(RemotePrograms, PathSteps):
    async def read(self, path: str, *, max_bytes: int = 64 * 2**20) -> bytes:
        link, place = self._link_of(None), self._path(path)
        if isinstance(link, StreamingLink):
            try:
                return await self._fetch(lambda: link.read(place, max_bytes=max_bytes))
            except (SandboxError, ConfigError) as error:
                if isinstance(error, PathError) or error.retry not in _REFUSED:
                    raise
        size, _, body = (await self._repeat_step(_READ, path, str(max_bytes), str(_SMALL))).partition(b"\n")
        if int(size) > max_bytes:
            raise PathError(path, "EFBIG", hint=f"it is larger than max_bytes={max_bytes}")
        if int(size) <= _SMALL:
            return body
        real = body.removesuffix(b"\n").decode()
        return await self._fetch(lambda: link.get(real))

    async def _fetch(self, call: Callable[[], Awaitable[bytes]]) -> bytes:
        async def get() -> bytes:
            with translate_errors(self._provider, self.id):
                async with asyncio.timeout(TREE_S):
                    return await call()

        return await retry_open(get, LOOKS, idempotent=True)

    async def write(self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None) -> None:
        """Makes missing parents. A file that is there keeps its mode when none is given."""
        raw = data.encode() if isinstance(data, str) else bytes(data)
        if mode is None and isinstance(self._link, StreamingLink):
            try:
                return await self._put(self._path(path), raw, user)
            except (SandboxError, ConfigError) as error:
                if isinstance(error, PathError) or error.retry not in _REFUSED:
                    raise
        mode_text = f"{mode:o}" if mode is not None else ""
        if len(raw) <= _INLINE:
            await self._repeat_step(_WRITE, path, "", mode_text, base64.b64encode(raw).decode(), user=user)
            return None
        name = new_id("put")
        await self._put(f"{ROOT}/x/{name}", raw, user)
        try:
            await self._repeat_step(_WRITE, path, f"{ROOT}/x/{name}", mode_text, "", user=user, timeout=TREE_S)
        finally:
            await self._discard(name, user=user)
