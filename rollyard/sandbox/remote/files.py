"""Contents of files: small ones in the command itself, large ones by the SDK. The rest is in `paths`.

A write goes to a file of ours first and is then copied to its place: an upload that broke half way is seen by nobody.
"""

from __future__ import annotations

import asyncio
import base64

from rollyard.core.errors import PathError
from rollyard.core.ids import new_id
from rollyard.sandbox.paths import ROOT, TREE_S, PathSteps
from rollyard.sandbox.remote.link import speaking
from rollyard.sandbox.remote.programs import Programs
from rollyard.sandbox.retry import LOOKS, retrying

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
_INLINE = 24_000  # bytes that go in the command itself


class Files(Programs, PathSteps):
    async def read(self, path: str, *, max_bytes: int = 64 * 2**20) -> bytes:
        size, _, body = (await self._again(_READ, path, str(max_bytes), str(_SMALL))).partition(b"\n")
        if int(size) > max_bytes:
            raise PathError(path, "EFBIG", hint=f"it is larger than max_bytes={max_bytes}")
        if int(size) <= _SMALL:
            return body
        return await self._got(body.removesuffix(b"\n").decode())

    async def _got(self, place: str) -> bytes:
        async def get() -> bytes:
            with speaking(self._provider, self.id):
                async with asyncio.timeout(TREE_S):
                    return await self._link.get(place)

        return await retrying(get, LOOKS, idempotent=True)

    async def write(self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None) -> None:
        """Makes missing parents. A file that is there keeps its mode when none is given."""
        self._as_it_is(user)
        raw = data.encode() if isinstance(data, str) else bytes(data)
        mode_text = f"{mode:o}" if mode is not None else ""
        if len(raw) <= _INLINE:
            await self._again(_WRITE, path, "", mode_text, base64.b64encode(raw).decode())
            return
        name = new_id("put")
        await self._put(f"{ROOT}/x/{name}", raw, None)
        try:
            await self._again(_WRITE, path, f"{ROOT}/x/{name}", mode_text, "", timeout=TREE_S)
        finally:
            await self._not_needed(name)
