"""Tars on their way into and out of a sandbox: made and read as streams, never a whole tree in memory."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import posixpath
import shutil
import stat as modes
import struct
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from rollyard.core import folders
from rollyard.images import tree_pipe

TREE_S = 600.0
CHUNK = 2**18


async def single(member: tarfile.TarInfo, data: bytes = b"") -> AsyncIterator[bytes]:
    yield member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    for at in range(0, len(data), CHUNK):
        yield data[at : at + CHUNK]
    yield bytes(-len(data) % 512 + 1024)


@contextlib.asynccontextmanager
async def pipe_chunks(write: Callable[[BinaryIO], None]) -> AsyncGenerator[AsyncGenerator[bytes]]:
    """The bytes a blocking writer makes in a thread, as they come."""
    read, feed = os.pipe()
    loop = asyncio.get_running_loop()

    def work() -> None:
        with os.fdopen(feed, "wb") as out, contextlib.suppress(BrokenPipeError):
            write(out)

    async def chunks() -> AsyncGenerator[bytes]:
        try:
            while data := await asyncio.to_thread(os.read, read, CHUNK):
                yield data
        finally:
            os.close(read)

    writing = loop.run_in_executor(None, work)
    stream = chunks()
    try:
        yield stream
        await asyncio.wait_for(writing, TREE_S)
    finally:
        await stream.aclose()
        await asyncio.wait([writing], timeout=5)


def pack(source: str, prefix: str, owner: tuple[int, int], out: BinaryIO) -> None:
    """Files, directories and links of `source` as a tar; sockets, pipes and devices are left out."""

    def with_owner(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (member.isreg() or member.isdir() or member.issym()):
            return None
        member.uid, member.gid = owner
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        cast(Any, archive).inodes = _NoLinks()
        for name in folders.entries(source):
            archive.add(Path(source, name), f"{prefix}/{name}", recursive=False, filter=with_owner)


class _NoLinks(dict[Any, Any]):
    """Makes tarfile forget inodes: each name becomes a file of its own, and none refers to another member."""

    def __setitem__(self, key: Any, value: Any) -> None:
        return


def unpack(fd: int, target: str, max_bytes: int) -> int:
    """A tar from a pipe into a directory of this host, through the reader that follows no link. Gives how many entries were
    left out."""
    with os.fdopen(fd, "rb") as source, tarfile.open(fileobj=source, mode="r|", errorlevel=2) as archive:
        entries = _Entries(archive)
        left_out = tree_pipe.unpack(cast(BinaryIO, entries), target, max_bytes=max_bytes)
    for name, origin in entries.hard_links:
        place, first = Path(target, name), Path(target, origin)
        if all(path.parent.resolve() == path.parent.absolute() and not path.is_symlink() for path in (place, first)):
            place.unlink(missing_ok=True)
            shutil.copy2(first, place, follow_symlinks=False)
    return left_out


class _Entries(io.RawIOBase):
    """A tar as the stream that `tree_pipe.unpack` reads: for each entry a length, JSON, and a file's bytes. The first part of
    each name, the directory that was asked for, is taken off."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self.hard_links: list[tuple[str, str]] = []
        self._chunks = self._stream(archive)
        self._left = b""

    def read(self, size: int = -1) -> bytes:
        while len(self._left) < size:
            more = next(self._chunks, None)
            if more is None:
                break
            self._left += more
        data, self._left = self._left[:size], self._left[size:]
        return data

    def _stream(self, archive: tarfile.TarFile) -> Iterator[bytes]:
        for member in archive:
            name = _strip_root(member.name)
            if not name:
                continue
            if len(os.fsencode(name)) > tree_pipe.LONGEST:
                yield _head({"kind": tree_pipe.LEFT_OUT, "number": 1})
                continue
            entry: dict[str, Any] = {"path": name, "mode": modes.S_IMODE(member.mode)}
            if member.isreg():
                yield _head({**entry, "kind": "file", "size": member.size})
                source = cast(BinaryIO, archive.extractfile(member))
                while data := source.read(CHUNK):
                    yield data
            elif member.isdir():
                yield _head({**entry, "kind": "dir"})
            elif member.issym():
                yield _head({**entry, "kind": "symlink", "target": member.linkname})
            elif member.islnk():
                self.hard_links.append((name, _strip_root(member.linkname)))
        yield struct.pack(">I", 0)


def _strip_root(name: str) -> str:
    return posixpath.normpath(name).lstrip("/").partition("/")[2]


def _head(entry: dict[str, Any]) -> bytes:
    raw = json.dumps(entry).encode()
    return struct.pack(">I", len(raw)) + raw


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
