"""A root file system out of this Debian machine's own packages: an image for an engine that reaches no registry.

The files are those of a short list of installed packages and all they depend on, with the `host` image's skeleton around
them. Nothing is downloaded and nothing private is in it: what no package owns stays out. Kept under the cache directory by the
versions it was made from.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

from rollyard.core.cache import cache_home, make_once
from rollyard.core.errors import ConfigError
from rollyard.images.host import host_rootfs

PACKAGES = (
    "bash", "ca-certificates", "coreutils", "dash", "debianutils", "diffutils", "findutils", "git", "grep", "gzip", "hostname",
    "libc-bin", "libstdc++6", "mawk", "patch", "procps", "python3", "sed", "tar", "util-linux",
)  # fmt: skip
LEFT_OUT = (
    "/boot/", "/etc/", "/usr/share/bash-completion/", "/usr/share/doc/", "/usr/share/info/", "/usr/share/lintian/",
    "/usr/share/locale/", "/usr/share/man/", "/usr/share/zoneinfo/", "/var/",
)  # fmt: skip
FORMAT = "1"


def rootfs_tar() -> Path:
    """The tar, made when it is not there yet."""
    names = _closure(PACKAGES)
    key = hashlib.sha256("\n".join([FORMAT, *sorted(f"{name}={version}" for name, version in names.items())]).encode())
    home = cache_home() / "rootfs"

    def make(aside: Path) -> None:
        with tarfile.open(aside, "w") as archive:
            _skeleton(archive, home)
            _files(archive, names)

    return make_once(home / f"{key.hexdigest()[:24]}.tar", make)


def _closure(wanted: Iterable[str]) -> dict[str, str]:
    """The installed ones of these packages and of everything they depend on, with their versions."""
    fields = "${Package}\t${Version}\t${db:Status-Abbrev}\t${Depends}, ${Pre-Depends}\t${Provides}\n"
    try:
        listed = subprocess.run(
            ["dpkg-query", "-W", "-f", fields], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            "no image can be made of this machine's packages", hint="this needs Debian or Ubuntu"
        ) from error
    versions: dict[str, str] = {}
    needs: dict[str, list[str]] = {}
    for line in listed.stdout.splitlines():
        name, version, state, depends, provides = line.split("\t")
        if not state.startswith("ii"):
            continue
        versions[name] = version
        needs[name] = [part.split("|")[0].split("(")[0].split(":")[0].strip() for part in depends.split(",")]
        for alias in provides.split(","):
            needs.setdefault(alias.split("(")[0].strip(), [name])
    todo, found = list(wanted), set[str]()
    while todo:
        name = todo.pop()
        if name in found or name not in needs:
            continue
        found.add(name)
        todo.extend(needs[name])
    return {name: versions[name] for name in found if name in versions}


def _skeleton(archive: tarfile.TarFile, store: Path) -> None:
    skeleton = Path(host_rootfs(store).lowers[0])
    for path in sorted(skeleton.rglob("*")):
        archive.add(path, str(path.relative_to(skeleton)), recursive=False)


def _files(archive: tarfile.TarFile, names: Iterable[str]) -> None:
    listed = subprocess.run(
        ["dpkg-query", "-L", *sorted(names)], capture_output=True, text=True, check=False, timeout=120
    )
    seen: set[str] = set()
    for line in [*listed.stdout.splitlines(), *_alternatives()]:
        if not line.startswith("/") or line.startswith(LEFT_OUT):
            continue
        # /bin is /usr/bin; the last part may be a link to keep
        path = str(Path(line).parent.resolve() / Path(line).name)
        try:
            status = os.lstat(path)
        except OSError:
            continue
        if path in seen or not path.startswith("/usr/"):
            continue
        seen.add(path)
        if stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            archive.add(path, path.lstrip("/"), recursive=False)


def _alternatives() -> list[str]:
    """Links such as awk, which no package owns."""
    return ["/usr/bin/awk", "/usr/bin/which", "/usr/bin/pager"]
