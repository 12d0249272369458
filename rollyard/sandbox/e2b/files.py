"""Files over the SDK: contents by its file calls, which are exact; everything else by small scripts, which know why."""

from __future__ import annotations

import contextlib
from typing import Literal

from rollyard.core.errors import (
    ConfigError,
    Error,
    PathError,
    SandboxError,
    SandboxGone,
    SandboxInterrupted,
    SandboxUnavailable,
)
from rollyard.sandbox.e2b.faults import speaking
from rollyard.sandbox.e2b.programs import Programs
from rollyard.sandbox.paths import CODES, TREE_S, PathSteps
from rollyard.sandbox.retry import LOOKS, retrying

_WHY = """p=$1; [ -d "$p" ] && exit 21
if [ "$2" = r ]; then
[ -e "$p" ] || { while [ ! -e "$p" ]; do p=$(dirname "$p"); done; [ -d "$p" ] || exit 20; exit 2; }
[ -r "$p" ] || exit 13; exit 5; fi
while [ "$p" != / ] && [ ! -e "$p" ]; do p=$(dirname "$p"); [ -e "$p" ] && [ ! -d "$p" ] && exit 20; done
[ -w "$p" ] || exit 13; exit 5
"""


class Files(Programs, PathSteps):
    async def read(self, path: str, *, max_bytes: int = 64 * 2**20) -> bytes:
        return await retrying(lambda: self._read(path, max_bytes), LOOKS, idempotent=True)

    async def _read(self, path: str, max_bytes: int) -> bytes:
        data = bytearray()
        async with contextlib.AsyncExitStack() as stack:
            try:
                with speaking(self.id, self._key):
                    stream = await self._box.files.read(
                        self._path(path), format="stream", user=self._user, request_timeout=TREE_S
                    )
                    if hasattr(stream, "aclose"):
                        stack.push_async_callback(stream.aclose)
                    async for chunk in stream:
                        data += chunk
                        if len(data) > max_bytes:
                            raise PathError(path, "EFBIG", hint=f"it is larger than max_bytes={max_bytes}")
            except (SandboxError, ConfigError) as error:
                raise await self._why(path, "r", error) from None
        return bytes(data)

    async def write(self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None) -> None:
        """Makes missing parents. A file that is there keeps its mode when none is given."""
        try:
            await self._put(self._path(path), data, user)
        except (SandboxError, ConfigError) as error:
            raise await self._why(path, "w", error) from None
        if mode is not None:
            await self._again('chmod "$2" "$1"', path, f"{mode:o}", user=user)

    async def _put(self, place: str, data: bytes | str, user: str | None) -> None:
        async def put() -> None:
            with speaking(self.id, self._key):
                await self._box.files.write(place, data, user=user or self._user, request_timeout=TREE_S)

        await retrying(put, LOOKS, idempotent=True)

    async def _why(self, path: str, way: Literal["r", "w"], error: Error) -> Error:
        """The reason a file call failed, asked of the sandbox itself."""
        if isinstance(error, PathError | SandboxGone | SandboxInterrupted | SandboxUnavailable):
            return error
        if "NotEnoughSpace" in str(error):
            return PathError(path, "ENOSPC", hint="the disk is full")
        done = await self.script(_WHY, self._path(path), way)
        return PathError(path, CODES.get(done.exit_code or 0, "EIO"), hint=error.message)

    async def alive(self) -> bool:
        try:
            with speaking(self.id, self._key):
                return bool(await self._box.is_running(request_timeout=15))
        except Error:
            return False
