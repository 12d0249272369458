"""npm and pip into one prefix, and the lock of what came: names, versions, checksums.

npm packages are installed as dependencies of a private package (`lib/package.json`), not globally, because only that writes a
lock with integrity hashes. Install scripts run where the caller chose the packages: several agents copy their native binary into
place with one. For packages that an untrusted task names, none runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.images.host_programs import build_env, run_npm, run_pip

ENV_NODE = re.compile(rb"^#!\s*/usr/bin/env (?:-S )?node\b")


class Locked(msgspec.Struct, frozen=True, omit_defaults=True):
    """One installed package. `integrity` is the checksum its archive had, in the words of its package manager."""

    name: str
    version: str
    integrity: str | None = None


async def npm_install(
    prefix: Path,
    packages: Sequence[str],
    npm: list[str],
    *,
    before: str | None,
    scripts: bool,
    scratch: Path,
    timeout: float,
) -> list[Locked]:
    library = prefix / "lib"
    library.mkdir(exist_ok=True)
    (library / "package.json").write_text(json.dumps({"name": "layer", "private": True}))
    options = [
        "--save-exact", f"--ignore-scripts={str(not scripts).lower()}",
        "--include=optional", "--omit=dev", "--no-audit", "--no-fund",
        "--no-update-notifier", "--omit-lockfile-registry-resolved", "--no-progress", "--loglevel=error", "--json",
    ]  # fmt: skip
    if before is not None:
        options.append(f"--before={before}")
    path = f"{prefix / 'bin'}:{build_env(scratch).get('PATH', '/usr/bin:/bin')}"
    await run_npm(
        [*npm, "install", *options, "--", *packages],
        env=build_env(scratch, {"PATH": path}), cwd=library, timeout=timeout, what=f"npm install {' '.join(packages)}",
    )  # fmt: skip
    wanted = json.loads((library / "package.json").read_bytes()).get("dependencies", {})
    for name in wanted:
        _link_programs(prefix, name)
    return _npm_lock(library)


def _npm_lock(library: Path) -> list[Locked]:
    packages: dict[str, Any] = json.loads((library / "package-lock.json").read_bytes())["packages"]
    locked: dict[tuple[str, str], Locked] = {}
    for place, found in packages.items():
        if place and not found.get("link") and (library / place).is_dir():
            name = found.get("name") or place.rpartition("node_modules/")[2]
            locked[name, found["version"]] = Locked(name, found["version"], found.get("integrity"))
    return [locked[key] for key in sorted(locked)]


def _link_programs(prefix: Path, package: str) -> None:
    """`bin/NAME` for what the package declares, started by the Node beside it whatever the search path is."""
    home = prefix / "lib/node_modules" / package
    declared: str | dict[str, str] = json.loads((home / "package.json").read_bytes()).get("bin") or {}
    programs = {package.rpartition("/")[2]: declared} if isinstance(declared, str) else declared
    for name, relative in programs.items():
        target = (home / relative).resolve()
        if not target.is_relative_to(prefix.resolve()) or not target.is_file():
            raise ConfigError(f"npm package {package!r} declares the program {name!r} but does not hold it")
        content = target.read_bytes()
        if ENV_NODE.match(content):
            target.write_bytes(ENV_NODE.sub(b"#!" + bytes(prefix / "bin/node"), content, count=1))
        target.chmod(target.stat().st_mode | 0o755)
        link = prefix / "bin" / Path(name).name
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..") / target.relative_to(prefix.resolve()))


async def pip_install(
    prefix: Path, packages: Sequence[str], pip: list[str], *, scripts: bool, scratch: Path, timeout: float
) -> list[Locked]:
    report = scratch / "report.json"
    options = ["--no-compile", "--no-warn-script-location", "--no-input", "--quiet", "--report", str(report)]
    if not scripts:
        options += ["--only-binary", ":all:"]
    env = build_env(scratch, {"DEB_PYTHON_INSTALL_LAYOUT": "deb_system", "PYTHONNOUSERSITE": "1"})
    await run_pip(
        [*pip, "--python", str(prefix / "bin/python3"), "install", *options, *packages],
        env=env, cwd=scratch, timeout=timeout, what=f"pip install {' '.join(packages)}",
    )  # fmt: skip
    installed: list[dict[str, Any]] = json.loads(report.read_bytes())["install"]
    return sorted(
        (
            Locked(
                found["metadata"]["name"],
                found["metadata"]["version"],
                _archive_hash(found["download_info"].get("archive_info") or {}),
            )
            for found in installed
        ),
        key=lambda locked: locked.name.lower(),
    )


def _archive_hash(archive: dict[str, Any]) -> str | None:
    hashes: dict[str, str] = archive.get("hashes") or {}
    return f"sha256:{hashes['sha256']}" if "sha256" in hashes else archive.get("hash")
