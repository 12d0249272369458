"""Unpacking an untrusted tar into a directory.

No member leaves the directory: names are cleaned, and links met on the way to a member are followed as the image itself
would follow them, with the directory as `/`. Device nodes and pipes are left out. Hard links stay hard links. The number of
members and the size of their headers are bounded, and no list of members is kept. In an OCI layer the whiteouts of that format
become the ones overlayfs knows. `step_inside` and `clear` are for others who write below a directory in which an archive may
have left links.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import lzma
import os
import shutil
import stat
import subprocess
import tarfile
import zlib
from collections.abc import Generator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import msgspec

from rollyard.core import folders
from rollyard.core.errors import ConfigError

OPAQUE = "user.overlay.opaque"
MAX_LINKS = 40
MAX_MEMBERS = 2_000_000  # of one tar; a root file system has a few hundred thousand
MAX_BLOBS = 100_000  # members of an image archive: layers and their descriptions
_MAX_HEADER = 1 << 20  # bytes of one member's long name or extended header
MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Unpacked(msgspec.Struct, frozen=True, kw_only=True):
    """`digest` is of the uncompressed stream: what OCI calls a layer's diff id."""

    digest: str
    members: int
    bytes: int
    left_out: int


class Hashed:
    """A reader that hashes what passes through it, and ends what is larger than `max_bytes`."""

    def __init__(self, stream: IO[bytes], max_bytes: int | None = None) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self._max_bytes, self._bytes = max_bytes, 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._bytes += len(data)
        if self._max_bytes is not None and self._bytes > self._max_bytes:
            raise ConfigError(f"the tar has more than {self._max_bytes:,} bytes when it is unpacked")
        self._digest.update(data)
        return data

    def drain(self) -> str:
        while self.read(1 << 20):
            pass
        return self._digest.hexdigest()


def compression(stream: IO[bytes]) -> str | None:
    start = stream.read(6)
    stream.seek(0)
    return next((name for magic, name in MAGIC.items() if start.startswith(magic)), None)


@contextlib.contextmanager
def decompress(stream: IO[bytes]) -> Generator[IO[bytes]]:
    """The stream without its compression, whatever that is."""
    kind = compression(stream)
    if kind == "zstd":
        with _zstd(stream) as plain:
            yield plain
    elif kind is None:
        yield stream
    else:
        opener: Any = {"gzip": gzip.GzipFile, "bzip2": bz2.BZ2File, "xz": lzma.LZMAFile}[kind]
        plain = opener(fileobj=stream) if kind == "gzip" else opener(stream)
        with plain:
            yield cast(IO[bytes], plain)


@contextlib.contextmanager
def _zstd(stream: IO[bytes]) -> Generator[IO[bytes]]:
    program = shutil.which("zstd")
    if program is None:
        raise ConfigError("this archive is compressed with zstd", hint="install the program `zstd`, then try again")
    import tempfile

    with tempfile.TemporaryFile() as packed:
        shutil.copyfileobj(stream, packed)
        packed.seek(0)
        with subprocess.Popen([program, "-dcq"], stdin=packed, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            yield process.stdout
        if process.returncode != 0:
            raise ConfigError("zstd could not read this archive: it is damaged")


class _Header(tarfile.TarInfo):
    """A member whose long name or extended header, which tarfile reads whole, is of a size that is no attack."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo | None:
        if self.type not in (*tarfile.REGULAR_TYPES, tarfile.LNKTYPE, tarfile.SYMTYPE) and self.size > _MAX_HEADER:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return cast(Any, super())._proc_member(archive)  # noqa: SLF001 - tarfile's own hook for subclasses


@contextlib.contextmanager
def _damage_named() -> Generator[None]:
    """What the decoders of tars and compressions raise for damaged bytes becomes `ConfigError`; errors of the disk stay."""
    try:
        yield
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise _damage_error(error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise _damage_error(error) from error  # bz2 says it like this


def _damage_error(error: Exception) -> ConfigError:
    hint = "a rootfs tar, `docker save` or OCI archive is wanted"
    return ConfigError(f"not a tar that can be read: {error}", hint=hint)


def _too_many(limit: int) -> ConfigError:
    return ConfigError(f"the tar has more than {limit:,} members", hint="pack large sets of small files into archives")


@contextlib.contextmanager
def open_archive(stream: IO[bytes]) -> Generator[tarfile.TarFile]:
    """A tar that is read by name; not one packed by zstd, which cannot be read from the middle."""
    with (
        _damage_named(),
        decompress(stream) as plain,
        tarfile.open(fileobj=plain, mode="r:", tarinfo=_Header) as archive,
    ):
        yield archive


def list_members(archive: tarfile.TarFile, limit: int = MAX_BLOBS) -> dict[str, tarfile.TarInfo]:
    found: dict[str, tarfile.TarInfo] = {}
    for count, member in enumerate(archive):
        if count >= limit:
            raise _too_many(limit)
        found[member.name.removeprefix("./")] = member
    return found


def unpack(
    stream: IO[bytes],
    root: Path,
    *,
    whiteouts: bool = False,
    passing: bool = False,
    max_members: int = MAX_MEMBERS,
    max_bytes: int | None = None,
) -> Unpacked:
    """Unpack a tar into `root`, which must be ours. A damaged or hostile archive raises `ConfigError`. `passing`: the tree only
    passes through this host, so nothing gets an owner of the archive's choice or a set-user-id bit. `max_bytes` bounds the
    tar without its compression."""
    with _damage_named(), decompress(stream) as plain:
        hashed = Hashed(plain, max_bytes)
        with tarfile.open(fileobj=cast(IO[bytes], hashed), mode="r|", errorlevel=2, tarinfo=_Header) as archive:
            unpacker = _Unpacker(root, whiteouts, passing)
            for member in archive:
                if unpacker.seen >= max_members:
                    raise _too_many(max_members)
                unpacker.take(archive, member)
                cast(Any, archive).members.clear()  # tarfile keeps each one it has given
        unpacker.finish()
        return Unpacked(
            digest=hashed.drain(), members=unpacker.members, bytes=unpacker.bytes, left_out=unpacker.left_out
        )


class _Unpacker:
    def __init__(self, root: Path, whiteouts: bool, passing: bool) -> None:
        self._root = root
        self._whiteouts = whiteouts
        self._owned = os.geteuid() == 0 and not passing
        self._bits = 0o777 if passing else 0o7777
        self._directories: dict[Path, tarfile.TarInfo] = {}
        self.members = self.bytes = self.left_out = self.seen = 0

    def take(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self.seen += 1
        parts = clean(member.name)
        if not parts:
            if member.isdir():
                self._directories[self._root] = member
            return
        place = step_inside(self._root, parts[:-1]) / parts[-1]
        self.members += 1
        if self._whiteouts and parts[-1].startswith(".wh."):
            self._whiteout(place)
        elif member.isdir():
            self._directory(place, member)
        elif member.isreg():
            clear(place)
            source = archive.extractfile(member)
            assert source is not None
            with place.open("xb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            self.bytes += member.size
            self._finish_file(place, member)
        elif member.issym():
            clear(place)
            place.symlink_to(member.linkname)
            self._set_owner(place, member)
        elif member.islnk():
            self._hard_link(place, member)
        else:
            self.left_out += 1

    def finish(self) -> None:
        """Directories get their mode and time last: a read-only one could not have been filled."""
        for place, member in reversed(self._directories.items()):
            self._set_owner(place, member)
            place.chmod(member.mode & self._bits)
            os.utime(place, (member.mtime, member.mtime))

    def _directory(self, place: Path, member: tarfile.TarInfo) -> None:
        if place.is_symlink() or not place.is_dir():
            clear(place)
            place.mkdir()
        self._directories[place] = member

    def _finish_file(self, place: Path, member: tarfile.TarInfo) -> None:
        self._set_owner(place, member)
        place.chmod(member.mode & self._bits)
        os.utime(place, (member.mtime, member.mtime))

    def _set_owner(self, place: Path, member: tarfile.TarInfo) -> None:
        if self._owned:
            os.chown(place, member.uid, member.gid, follow_symlinks=False)

    def _hard_link(self, place: Path, member: tarfile.TarInfo) -> None:
        parts = clean(member.linkname)
        target = step_inside(self._root, parts[:-1]) / parts[-1] if parts else self._root
        if target.is_symlink() or not target.is_file():
            if target.is_symlink():
                clear(place)
                place.symlink_to(target.readlink())
                return
            raise ConfigError(f"{member.name!r} is a hard link to {member.linkname!r}, which is not in the archive")
        clear(place)
        place.hardlink_to(target)

    def _whiteout(self, place: Path) -> None:
        name = place.name.removeprefix(".wh.")
        if name == ".wh..opq":
            os.setxattr(place.parent, OPAQUE, b"y")
        elif name.startswith(".wh.") or name in ("", ".", ".."):
            self.left_out += 1
        else:
            clear(place.with_name(name))
            make_whiteout(place.with_name(name))


def step_inside(root: Path, parts: Sequence[str]) -> Path:
    """The directory these parts lead to with `root` as `/`, made where it is absent. Links never lead out of `root`."""
    todo, place, links = list(reversed(parts)), root, 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            place = place if place == root else place.parent
            continue
        step = place / part
        if step.is_symlink():
            links += 1
            if links > MAX_LINKS:
                raise ConfigError(f"the archive's links never end: {'/'.join(parts)!r}")
            target = os.fspath(step.readlink())
            place = root if target.startswith("/") else place
            todo.extend(reversed(target.split("/")))
            continue
        if not step.is_dir():
            if step.exists():
                raise ConfigError(f"{'/'.join(parts)!r} leads through a file")
            step.mkdir(mode=0o755)
            step.chmod(0o755)
        place = step
    return place


def clear(place: Path) -> None:
    """Whatever has this name is gone afterwards; a link, not what it points to."""
    if place.is_dir() and not place.is_symlink():
        folders.remove(place)
    else:
        place.unlink(missing_ok=True)


def clean(name: str) -> tuple[str, ...]:
    """The parts of a member's name; a name that climbs is refused."""
    parts = tuple(part for part in PurePosixPath(name).parts if part not in ("/", "."))
    if ".." in parts or "\0" in name:
        raise ConfigError(f"the archive holds a name that climbs out of it: {name!r}")
    return parts


def make_whiteout(place: Path) -> None:
    """The character device 0:0 by which overlayfs marks a name as removed; making this one needs no privilege."""
    os.mknod(place, stat.S_IFCHR | 0o000, os.makedev(0, 0))


def is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
