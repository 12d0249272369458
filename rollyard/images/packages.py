"""npm and pip into one prefix, and the lock of what came: names, versions, checksums.

npm packages are installed as dependencies of a private package (`lib/package.json`), not globally, because only that writes a
lock with integrity hashes. Install scripts run where the caller chose the packages: several agents copy their native binary into
place with one. Packages that an untrusted task names are downloaded here and installed in a sandbox (`SandboxRun`): a wheel may
bring a `bin/python3` or a module of the standard library, which whatever works on the layer next would run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.sandbox import DEFAULT_PATH
from rollyard.images.host_programs import build_env, run_npm, run_pip, run_program
from rollyard.images.trees import walk

_PIP_OPTIONS = ("--no-compile", "--no-warn-script-location", "--no-input", "--quiet")
_LAYOUT = {"DEB_PYTHON_INSTALL_LAYOUT": "deb_system"}
ENV_NODE = re.compile(rb"^#!\s*/usr/bin/env (?:-S )?node\b")


class SandboxRun(Protocol):
    """Runs programs in a sandbox that has copies of these folders at their own paths; afterwards the first is what they left."""

    async def __call__(
        self, folders: Sequence[Path], commands: Sequence[Sequence[str]], *, env: Mapping[str, str], what: str
    ) -> None: ...


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
    apart: SandboxRun | None,
    scratch: Path,
    timeout: float,
) -> list[Locked]:
    """`apart` runs the install scripts, where there are any."""
    library = prefix / "lib"
    library.mkdir(exist_ok=True)
    (library / "package.json").write_text(json.dumps({"name": "layer", "private": True}))
    options = [
        "--save-exact", f"--ignore-scripts={str(apart is not None).lower()}",
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
    locked = _npm_lock(library)
    if apart is not None and '"hasInstallScript": true' in (library / "package-lock.json").read_text():
        node, cli = str(prefix / "bin/node"), Path(npm[1])
        tools = cli.parent.parent if cli.name.startswith("npm") else cli.parent
        rebuild = ["/usr/bin/env", "-C", str(library), node, str(cli), "rebuild", "--ignore-scripts=false", "--offline"]
        what = f"install scripts of {' '.join(packages)}"
        await _run_apart(
            apart, [prefix, tools], [rebuild], env={"PATH": f"{prefix / 'bin'}:{DEFAULT_PATH}", "CI": "1"}, what=what
        )
    return locked


async def _run_apart(
    apart: SandboxRun,
    folders: Sequence[Path],
    commands: Sequence[Sequence[str]],
    *,
    env: Mapping[str, str],
    what: str,
) -> None:
    """What comes back is another's work. This machine goes on to work in it: a link out of it would lead that astray."""
    prefix = folders[0]
    known = {path: path.readlink() for path in walk(prefix) if path.is_symlink()}
    await apart(folders, commands, env=env, what=what)
    if prefix.is_symlink():
        raise ConfigError(f"{what}: the layer became a link")
    for path in walk(prefix):
        if path.is_symlink() and known.get(path) != path.readlink():
            target = Path(os.path.normpath(path.parent / path.readlink()))
            if not target.is_relative_to(prefix) or (path.is_dir() and path.parent == prefix):
                raise ConfigError(
                    f"{what}: {path.relative_to(prefix)} became a link to {path.readlink()}, out of the layer"
                )


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
    prefix: Path, packages: Sequence[str], pip: list[str], *, apart: SandboxRun | None, scratch: Path, timeout: float
) -> list[Locked]:
    """`apart` installs them, out of wheels that were downloaded here."""
    report = scratch / "report.json"
    into = [*pip, "--python", str(prefix / "bin/python3")]
    env = build_env(scratch, {**_LAYOUT, "PYTHONNOUSERSITE": "1"})
    what = f"pip install {' '.join(packages)}"
    options = [*_PIP_OPTIONS, "--report", str(report)]
    if apart is not None:
        options += ["--dry-run", "--only-binary", ":all:"]
    await run_pip([*into, "install", *options, *packages], env=env, cwd=scratch, timeout=timeout, what=what)
    installed: list[dict[str, Any]] = json.loads(report.read_bytes())["install"]
    locked = [_pip_locked(found) for found in installed]
    if apart is not None:
        wheels, tools = scratch / "wheels", scratch / "tools"
        pinned = scratch / "requirements.txt"
        pinned.write_text("".join(f"{found.name}=={found.version} --hash={found.integrity}\n" for found in locked))
        command = [
            *into,
            "download",
            "--quiet",
            "--no-input",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            str(wheels),
        ]
        await run_pip(
            [*command, "--require-hashes", "-r", str(pinned)], env=env, cwd=scratch, timeout=timeout, what=what
        )
        own = await _copy_pip(pip, tools, env, timeout)
        install = [str(prefix / "bin/python3"), "-I", str(own), "install", *_PIP_OPTIONS, "--no-index"]
        install += ["--find-links", str(wheels), *packages]
        await _run_apart(apart, [prefix, wheels, tools], [install], env={**_LAYOUT, "PATH": DEFAULT_PATH}, what=what)
    return sorted(locked, key=lambda found: found.name.lower())


async def _copy_pip(pip: list[str], target: Path, env: Mapping[str, str], timeout: float) -> Path:
    """pip as something that another Python can run."""
    target.mkdir()
    if pip[1] != "-m":
        wheel = Path(pip[1]).parent
        shutil.copyfile(wheel, target / wheel.name)
        return target / wheel.name / "pip"
    ask = [pip[0], "-c", "import os, pip; print(os.path.dirname(pip.__file__))"]
    found = await run_program(ask, env=env, cwd=target, timeout=timeout, what="asking for pip")
    shutil.copytree(found.decode().strip(), target / "pip", ignore=shutil.ignore_patterns("__pycache__"))
    return target / "pip"


def _pip_locked(found: dict[str, Any]) -> Locked:
    metadata, archive = found["metadata"], found["download_info"].get("archive_info") or {}
    return Locked(metadata["name"], metadata["version"], _archive_hash(archive))


def _archive_hash(archive: dict[str, Any]) -> str | None:
    hashes: dict[str, str] = archive.get("hashes") or {}
    return f"sha256:{hashes['sha256']}" if "sha256" in hashes else archive.get("hash")
