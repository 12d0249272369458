"""Files of a sandbox, from the host: the supervisor opens them inside and hands over descriptors.

The host never opens a path of the sandbox, so no planted link can lead it anywhere. Directories travel as one stream.
"""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError, PathError, Unsupported
from rollyard.core.sandbox import Stat
from rollyard.images import tree_pipe
from rollyard.sandbox.local.channel import Channel, ChannelRefused
from rollyard.sandbox.local.inner import protocol
from rollyard.sandbox.local.job import ANSWER_S
from rollyard.sandbox.local.journal import SandboxEntry

TREE_S = 600.0
_IN_LOOP = 2**20  # more than this is moved in a thread
_HINTS = {
    "ENOENT": "it does not exist in the sandbox",
    "EISDIR": "it is a directory; use list_dir or download_dir",
    "ENOSPC": "the sandbox's disk is full; raise resources.disk_mb",
    "EFBIG": "raise max_bytes",
    "EACCES": "it is not a regular file, or not permitted",
}


class LocalFiles:
    """The file half of a sandbox."""

    def __init__(self, channel: Channel, entry: SandboxEntry) -> None:
        self._channel = channel
        self._entry = entry

    def _path(self, path: str) -> str:
        if not path or "\0" in path:
            raise PathError(path, "EINVAL", hint="a path is not empty and has no NUL")
        return posixpath.join(self._entry.workdir, path)

    def _owner(self, user: str | None) -> str | None:
        if user not in (None, "root", "0") and not self._entry.capabilities.users:
            raise Unsupported("this sandbox has one user only, root", hint="run as root, or set up /etc/subuid")
        return user or self._entry.user

    @staticmethod
    def _path_error(path: str, refused: ChannelRefused) -> PathError:
        return PathError(refused.path or path, refused.name, hint=_HINTS.get(refused.name, refused.text))

    async def _ask(self, op: str, *, timeout: float = ANSWER_S, **fields: Any) -> tuple[dict[str, Any], list[int]]:
        try:
            return await self._channel.request(op, fields, timeout=timeout)
        except ChannelRefused as refused:
            raise self._path_error(fields.get("path", op), refused) from None

    async def read(self, path: str, *, max_bytes: int = 64 * 2**20) -> bytes:
        reply, (fd,) = await self._ask("open", path=self._path(path), write=False)
        try:
            if reply["size"] <= _IN_LOOP:
                data = protocol.read_at(fd, max_bytes + 1)
            else:
                data = await asyncio.to_thread(protocol.read_at, fd, max_bytes + 1)
        except OSError as error:
            raise PathError(path, errno.errorcode.get(error.errno or 0, "EIO")) from error
        finally:
            os.close(fd)
        if len(data) > max_bytes:
            raise PathError(path, "EFBIG", hint=f"it is larger than max_bytes={max_bytes}")
        return data

    async def read_text(self, path: str, *, max_bytes: int = 64 * 2**20) -> str:
        try:
            return (await self.read(path, max_bytes=max_bytes)).decode()
        except UnicodeDecodeError:
            raise PathError(path, "EILSEQ", hint="it is not UTF-8 text; use read()") from None

    async def write(self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None) -> None:
        """Parents are created. What exists is replaced in place and keeps its mode unless `mode` is given."""
        raw = data.encode() if isinstance(data, str) else data
        owner = self._owner(user)
        _, (fd,) = await self._ask("open", path=self._path(path), write=True, mode=mode, user=owner)
        try:
            if len(raw) <= _IN_LOOP:
                _write_all(fd, raw)
            else:
                await asyncio.to_thread(_write_all, fd, raw)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "EIO")
            raise PathError(path, name, hint=_HINTS.get(name)) from error
        finally:
            os.close(fd)

    async def exists(self, path: str) -> bool:
        reply, _ = await self._ask("exists", path=self._path(path))
        return reply["exists"]

    async def stat(self, path: str) -> Stat:
        reply, _ = await self._ask("stat", path=self._path(path))
        return msgspec.convert(reply, Stat)

    async def list_dir(self, path: str) -> list[Stat]:
        """Up to 50,000 entries; a larger directory is EFBIG."""
        reply, _ = await self._ask("list", path=self._path(path))
        return msgspec.convert(reply["entries"], list[Stat])

    async def mkdir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> None:
        await self._ask("mkdir", path=self._path(path), mode=mode, user=self._owner(user))

    async def remove(self, path: str) -> None:
        """A file, a link, or a directory with all that is in it."""
        await self._ask("remove", path=self._path(path), timeout=TREE_S)

    async def upload_dir(self, source: str, path: str, *, user: str | None = None) -> None:
        """What is in `source` on the host goes into the directory `path`, over what is there."""
        if not Path(source).is_dir():
            raise ConfigError(f"upload_dir: {source!r} is not a directory on this host")
        fields = {"path": self._path(path), "user": self._owner(user)}
        if (stream := tree_pipe.pack_small(source)) is not None:
            await self._request("unpack", {**fields, "small": True}, protocol.memory_file(stream))
            return

        def send(fd: int) -> None:
            with open(fd, "wb") as out:
                tree_pipe.pack(source, out)

        read, write = os.pipe()
        await self._transfer("unpack", {**fields, "small": False}, read, write, send)

    async def download_dir(self, path: str, target: str, *, max_bytes: int = 2**30) -> int:
        """What is in the directory `path` goes into `target` on the host, which is made if it is absent."""
        Path(target).mkdir(parents=True, exist_ok=True)
        inside, left_out = self._path(path), 0

        def take(fd: int) -> None:
            nonlocal left_out
            with open(fd, "rb") as source:
                left_out = tree_pipe.unpack(source, target, max_bytes=max_bytes)

        _, small = await self._ask("pack_small", path=inside, max_bytes=max_bytes)
        if small:
            with _errors_of(inside):
                take(small[0])
            return left_out
        read, write = os.pipe()
        await self._transfer("pack", {"path": inside, "max_bytes": max_bytes}, write, read, take)
        return left_out

    async def _transfer(
        self, op: str, fields: dict[str, Any], theirs: int, ours: int, move: Callable[[int], None]
    ) -> None:
        """One end of a pipe goes to a worker inside, the other to a thread here. Either's end ends the other."""
        moving = asyncio.get_running_loop().run_in_executor(None, move, ours)
        moving.add_done_callback(lambda done: done.cancelled() or done.exception())
        with _errors_of(fields["path"]):
            await self._request(op, fields, theirs)
            await asyncio.wait_for(moving, TREE_S)

    async def _request(self, op: str, fields: dict[str, Any], fd: int) -> None:
        try:
            await self._channel.request(op, fields, fds=[fd], give=True, timeout=TREE_S)
        except ChannelRefused as refused:
            if refused.name != "EPIPE":
                raise self._path_error(fields["path"], refused) from None


@contextmanager
def _errors_of(path: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise PathError(path, errno.errorcode.get(error.errno or 0, "EIO")) from error


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
