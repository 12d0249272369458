"""Reading commits of a git repository object by object: no filter, attribute or hook of the repository is used."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from rollyard.core.errors import ConfigError

_LINK, _PROGRAM, _MODULE = "120000", "100755", "160000"

# A tree as one new commit. With a threshold of one byte each file goes into one pack at once: nothing is left for gc to do.
ONE_COMMIT = (
    "git init -q && git config gc.auto 0 && git -c core.bigFileThreshold=1 -c core.compression=1 add -A -f"
    " && git -c user.name=base -c user.email=base@localhost commit -q -m base"
)


def is_repository(folder: Path) -> bool:
    return (folder / ".git").exists() or ((folder / "HEAD").is_file() and (folder / "objects").is_dir())


def run_git(repository: Path, *arguments: str, given: bytes = b"") -> bytes:
    quiet = {**os.environ, "GIT_CONFIG_NOSYSTEM": "1", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
    command = ["git", "-c", "safe.directory=*", "-C", str(repository), *arguments]
    done = subprocess.run(command, input=given, env=quiet, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise ConfigError(f"{repository}: git {arguments[0]} failed: {said}")
    return done.stdout


def read_tree(repository: Path, commit: str) -> dict[str, tuple[str, bytes]]:
    """Mode and content of every file of a commit; submodules are not files of it."""
    listed = run_git(repository, "ls-tree", "-r", "-z", "--full-tree", commit).decode("utf-8", "surrogateescape")
    rows = [(*line.partition("\t")[0].split(" "), line.partition("\t")[2]) for line in listed.split("\0") if line]
    files = [(mode, name, path) for mode, _, name, path in rows if mode != _MODULE]
    wanted = "".join(f"{name}\n" for _, name, _ in files).encode()
    data = io.BytesIO(run_git(repository, "cat-file", "--batch", given=wanted))
    found: dict[str, tuple[str, bytes]] = {}
    for mode, name, path in files:
        head = data.readline().split()
        if head[1:] == [b"missing"]:
            raise ConfigError(f"{repository}: {path} of {commit[:12]} is not there: {name}", hint="fetch it whole")
        found[path] = (mode, data.read(int(head[2])))
        data.read(1)
    return found


def pack_tree(files: Mapping[str, tuple[str, bytes]]) -> bytes:
    """As a .tar.gz, whose bytes depend on the files alone."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, (mode, content) in files.items():
            member = tarfile.TarInfo(path)
            member.mode = 0o755 if mode == _PROGRAM else 0o644
            if mode == _LINK:
                member.type, member.linkname = tarfile.SYMTYPE, content.decode("utf-8", "surrogateescape")
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return gzip.compress(packed.getvalue(), compresslevel=1, mtime=0)


def changed_files(before: Mapping[str, tuple[str, bytes]], after: Mapping[str, tuple[str, bytes]]) -> Iterable[str]:
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
