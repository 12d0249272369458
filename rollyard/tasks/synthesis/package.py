"""A Python package with tests, as a checkout or an sdist has it: which files are its source, which are its tests, and what of all
this an agent may see."""

from __future__ import annotations

import ast
from pathlib import Path, PurePosixPath

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.tasks.adapters.drafts import is_test

_LEFT_OUT = {
    ".git", ".hg", ".svn", ".tox", ".nox", ".venv", "venv", ".eggs", "build", "dist", "node_modules", "__pycache__",
    ".mypy_cache", ".pytest_cache", ".ruff_cache",
}  # fmt: skip
_ARCHIVES = (".whl", ".egg", ".pyc", ".pyo", ".tar", ".gz", ".zip", ".bz2", ".xz", ".patch", ".diff", ".bundle")
_NOT_SOURCE = {
    "setup.py", "noxfile.py", "tasks.py", "conf.py", "fabfile.py", "dodo.py", "docs", "doc", "examples", "example", "benchmarks",
    "bench", "scripts", "tools", "_vendor", "vendor", "_vendored",
}  # fmt: skip

_OF_PYTEST = {"_pytest", "iniconfig", "packaging", "pluggy", "pygments", "pytest"}  # in use before it runs any test


class PackageSource(msgspec.Struct, frozen=True, kw_only=True):
    """`visible` is what an agent gets: no tests, and no copies of the source in archives, history and caches. `tests` are
    laid out as they were. `sources` are the visible files that faults may be laid into, `roots` where imports find them."""

    name: str
    visible: dict[str, bytes]
    tests: dict[str, bytes]
    sources: tuple[str, ...]
    roots: tuple[str, ...]


def read_package(folder: Path, name: str) -> PackageSource:
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and not _LEFT_OUT & set(path.relative_to(folder).parts)
    }
    tests = {path: data for path, data in found.items() if is_test(path) and not path.endswith((".pyc", ".pyo"))}
    visible = {path: data for path, data in found.items() if path not in tests and not path.endswith(_ARCHIVES)}
    roots = ("src", "") if any(path.startswith("src/") and path.endswith(".py") for path in visible) else ("",)
    sources = tuple(path for path, data in visible.items() if _is_source(path, data, roots[0]))
    if not any(path.endswith(".py") for path in tests):
        raise ConfigError(f"{name}: no tests in it", hint="an sdist without its tests cannot be used; take a checkout")
    if not sources:
        raise ConfigError(
            f"{name}: no Python package or module in it", hint="name the folder that holds setup.py or src/"
        )
    if own := _OF_PYTEST & {PurePosixPath(path).relative_to(roots[0]).parts[0].removesuffix(".py") for path in sources}:
        raise ConfigError(
            f"{name}: pytest needs {min(own)} itself, so that tests are of pytest's copy and find no fault in this one",
            hint="take another package",
        )
    return PackageSource(name=name, visible=visible, tests=tests, sources=sources, roots=roots)


def _is_source(path: str, data: bytes, root: str) -> bool:
    parts = PurePosixPath(path).parts
    if not path.endswith(".py") or _NOT_SOURCE & set(parts) or (root and parts[0] != root):
        return False
    try:
        ast.parse(data.decode())
    except (SyntaxError, ValueError):
        return False
    return True
