"""The files a Dockerfile may copy: its folder less `.dockerignore`, and how sources become a tree at a destination.

Everything is assembled on the host first, so that a sandbox only ever receives a finished tree. Nothing outside the folder
can be named: not by `..`, not through a link; and nothing in it, an archive's links included, makes this host read or write
outside the tree that is being assembled.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import msgspec

from rollyard.images.archives import clear, step_inside, unpack


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """Go's path patterns as Docker uses them: `*` and `?` stay inside one name, `**` crosses names."""
    out, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        if pattern.startswith("**/", at):
            out, at = out + r"(?:.*/)?", at + 3
            continue
        if pattern.startswith("**", at):
            out, at = out + ".*", at + 2
            continue
        if char == "[" and "]" in pattern[at + 1 :]:
            end = pattern.index("]", at + 1)
            out, at = out + pattern[at : end + 1].replace("[!", "[^"), end + 1
            continue
        if char == "\\" and at + 1 < len(pattern):
            out, at = out + re.escape(pattern[at + 1]), at + 2
            continue
        out += {"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char))
        at += 1
    return re.compile(out)


class Ignore:
    """`.dockerignore`: later lines win, `!` brings back, a matched folder takes all below it."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.rules: list[tuple[bool, re.Pattern[str]]] = []
        for line in lines:
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            keep = text.startswith("!")
            path = str(PurePosixPath(text.removeprefix("!").strip().lstrip("/"))).rstrip("/")
            self.rules.append((keep, glob_pattern(path)))

    def __call__(self, relative: str) -> bool:
        out = False
        parts = relative.split("/")
        ways = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        for keep, pattern in self.rules:
            if any(pattern.fullmatch(way) for way in ways):
                out = not keep
        return out


class ContextSource(msgspec.Struct, frozen=True):
    """A source in the context: its path relative to it, and on the host."""

    name: str
    path: Path


class Context:
    def __init__(self, root: Path, dockerfile: str = "Dockerfile") -> None:
        self.root, self.dockerfile = root.resolve(), dockerfile
        rules = [self.root / f"{dockerfile}.dockerignore", self.root / ".dockerignore"]
        file = next((rule for rule in rules if rule.is_file()), None)
        self.ignored = Ignore(file.read_text().splitlines() if file is not None else ())

    def find(self, pattern: str) -> list[ContextSource]:
        """What a source names; at least one thing, or an error."""
        clean = pattern.strip().lstrip("/").removeprefix("./").rstrip("/") or "."
        if ".." in clean.split("/"):
            raise ValueError(f"{pattern!r} leads out of the build folder")
        if clean == ".":
            return [ContextSource(".", self.root)]
        if not re.search(r"[*?\[]", clean):
            path = self.root / clean
            if not os.path.lexists(path) or (not path.is_dir() and self.ignored(clean)):
                raise ValueError(f"{pattern!r} is not in the build folder")
            self._refuse_outside(path)
            return [ContextSource(clean, path)]
        wanted = glob_pattern(clean)
        found = [
            ContextSource(name, path)
            for path in sorted(self.root.rglob("*"))
            if wanted.fullmatch(name := path.relative_to(self.root).as_posix()) and not self.ignored(name)
        ]
        if not found:
            raise ValueError(f"{pattern!r} matches nothing in the build folder")
        for item in found:
            self._refuse_outside(item.path)
        return found

    def _refuse_outside(self, path: Path) -> None:
        if not path.resolve().is_relative_to(self.root):
            raise ValueError(f"{path.relative_to(self.root)} is a link that leads out of the build folder")

    def pack(self) -> io.BytesIO:
        """The context as a tar without owners and times, so that equal folders are equal bytes. It always has the Dockerfile."""
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(self.root.rglob("*")):
                name = path.relative_to(self.root).as_posix()
                kept = path.is_symlink() or path.is_dir() or path.is_file()  # neither sockets nor devices
                if not kept or (name != self.dockerfile and self.ignored(name)):
                    continue
                member = archive.gettarinfo(str(path), name)
                member.uid = member.gid = member.mtime = 0
                member.uname = member.gname = ""
                if member.isreg():
                    with path.open("rb") as file:
                        archive.addfile(member, file)
                else:
                    archive.addfile(member)
        return made

    def copy(self, item: ContextSource, root: Path, name: str = "", *, exclude: Sequence[str] = ()) -> None:
        """A file to `name` below `root`; a folder's content into `root`. Links inside folders stay links, and what an earlier
        source left in `root` is never written through."""
        if not item.path.is_dir():
            clear(root / name)
            shutil.copy(item.path.resolve(), root / name)
            return
        out = [glob_pattern(pattern) for pattern in exclude]
        for folder, folders, files in os.walk(item.path):
            here = Path(folder)
            place = step_inside(root, here.relative_to(item.path).parts)
            shutil.copymode(here, place)
            for entry in [*files, *(f for f in folders if (here / f).is_symlink())]:
                source = here / entry
                relative = source.relative_to(self.root).as_posix()
                inner = source.relative_to(item.path).as_posix()
                if not self.ignored(relative) and not any(p.fullmatch(inner) for p in out):
                    clear(place / entry)
                    shutil.copy2(source, place / entry, follow_symlinks=False)
        _prune_empty(item.path, root, self)

    def key(self, item: ContextSource, *, exclude: Sequence[str] = ()) -> str:
        """A hash of what `copy` makes of a source, found without copying: names, kinds, modes and contents."""
        if not item.path.is_dir():
            return _file_key(item.path)
        out = [glob_pattern(pattern) for pattern in exclude]
        lines: list[str] = []
        holding: set[Path] = set()  # folders with something in them that is copied
        for folder, folders, files in os.walk(item.path, topdown=False):
            here = Path(folder)
            for entry in [*files, *(f for f in folders if (here / f).is_symlink())]:
                source = here / entry
                inner = source.relative_to(item.path).as_posix()
                if self.ignored(source.relative_to(self.root).as_posix()) or any(p.fullmatch(inner) for p in out):
                    continue
                lines.append(f"{inner}\0{_entry_key(source)}")
                holding.add(here)
            if here == item.path or here in holding or not self.ignored(here.relative_to(self.root).as_posix()):
                lines.append(f"{here.relative_to(item.path).as_posix()}\0dir\0{here.stat().st_mode:o}")
                holding.add(here.parent)
        return _hash_lines(sorted(lines))


def _prune_empty(source: Path, target: Path, context: Context) -> None:
    """Folders that only hold ignored things are not copied."""
    for root, _, _ in os.walk(target, topdown=False):
        here = Path(root)
        original = source / here.relative_to(target)
        if (
            here != target
            and not any(here.iterdir())
            and context.ignored(original.relative_to(context.root).as_posix())
        ):
            here.rmdir()


def unpack_local(archive: Path, target: Path) -> None:
    """Extract a local tar as ADD does."""
    with archive.open("rb") as stream:
        unpack(stream, target, passing=True)


def is_archive(path: Path) -> bool:
    """Whether ADD extracts it: a local tar, plain or compressed by gzip, bzip2 or xz."""
    return path.is_file() and tarfile.is_tarfile(path)


def tree_key(root: Path) -> str:
    """Names, kinds, modes and contents of a tree, as a hash: the cache key of a copy out of another image."""
    paths = sorted(root.rglob("*"), key=lambda p: p.relative_to(root).as_posix())
    return _hash_lines([f"{path.relative_to(root).as_posix()}\0{_entry_key(path)}" for path in paths])


def _entry_key(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"link\0{path.readlink()}"
    return f"dir\0{mode:o}" if stat.S_ISDIR(mode) else _file_key(path)


def _file_key(path: Path) -> str:
    """Its mode and content. What is no file (a socket, a pipe) has none, and is not opened."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        return f"{mode:o}"
    with path.open("rb") as handle:
        return f"{mode:o}\0{hashlib.file_digest(handle, 'sha256').hexdigest()}"


def _hash_lines(lines: Sequence[str]) -> str:
    """A name may have line breaks in it: each line counts by its own hash."""
    outer = hashlib.sha256()
    for line in lines:
        outer.update(hashlib.sha256(os.fsencode(line)).digest())
    return outer.hexdigest()
