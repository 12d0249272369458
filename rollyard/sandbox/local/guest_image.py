"""The first file system of a virtual machine: this interpreter, the guest's program (`inner/guest.py`) and the kernel's modules.

It is made once for each interpreter, version of this package and kernel, and kept. What is in it is asked of the interpreter
itself: a fresh one imports the program and says which files it has mapped and which modules it has loaded. Modules are
compiled ahead, because a machine starts anew each time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import lzma
import marshal
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollyard.core.cache import make_once
from rollyard.core.errors import IsolationTooWeak
from rollyard.core.home import private_dir
from rollyard.sandbox.local.inner.guest import MODULES
from rollyard.sandbox.local.journal import PACKAGES

Entries = dict[str, bytes | str]  # a file's bytes, or where a link leads
_FORMAT = "1"
_DRIVERS = ("virtio_mmio", "virtio_console", "virtiofs")
_HOME = "/packages"
_CACHE = Path("/etc/ld.so.cache")
_LINKS = ("/lib", "/lib64", "/bin", "/sbin")
_ELF_HEAD = 8192
_UNCHECKED = (1).to_bytes(4, "little") + bytes(8)  # the rest of a compiled module's head: its source is not looked for
_ASK = """
import sys; sys.path.append(sys.argv.pop()); import rollyard.sandbox.local.inner.guest, json, os
with open("/proc/self/maps") as file:
    mapped = {line.split(None, 5)[5].strip() for line in file if "/" in line}
found = {name: getattr(module, "__file__", None) for name, module in sys.modules.items() if name != "__main__"}
print(json.dumps({"program": os.path.realpath(sys.executable), "mapped": sorted(mapped), "modules": found}))
"""
_INIT = """#!{program} -IS
import sys
sys.path.append("{home}")
from rollyard.sandbox.local.inner.guest import main
main()
"""
_LIMIT_S = 60.0


class Interpreter(msgspec.Struct, frozen=True):
    """What a fresh interpreter says: its program, the files it mapped, its modules by name and their files."""

    program: str
    mapped: tuple[str, ...]
    modules: dict[str, str | None]


def make(root: Path, kernel: Path) -> Path:
    """The image's file, made now if there is none of this kind yet."""
    drivers = find_drivers(kernel)
    said = _ask()
    sources = [Path(path) for path in (*said.mapped, *filter(None, said.modules.values()), *drivers)]
    parts = [_FORMAT, *(f"{path} {path.stat().st_mtime_ns}" for path in sources)]
    place = private_dir(root / "microvm") / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.cpio"

    def write(aside: Path) -> None:
        aside.write_bytes(b"".join(_archive({**_programs(said), **_python(said), **_modules(drivers)})))

    return make_once(place, write)


def find_modules(kernel: Path) -> Path:
    """A kernel in PLACE/boot has its modules in PLACE/lib/modules."""
    folder = kernel.resolve().parent.parent / "lib/modules" / kernel.name.partition("-")[2]
    if not folder.is_dir():
        raise IsolationTooWeak(
            f"isolation 'microvm': the modules of the kernel {kernel} are not in {folder}",
            hint="use the kernel of Debian's package linux-image-cloud-amd64",
        )
    return folder


def find_drivers(kernel: Path) -> list[Path]:
    """The modules of a kernel that a guest needs, each after those it depends on."""
    folder = find_modules(kernel)
    known = {_module_name(path): path for path in folder.rglob("*.ko*")}
    found: dict[str, Path] = {}

    def add(name: str) -> None:
        path = known.get(name)
        if path is None:
            with_it = (folder / "modules.builtin").read_text() if (folder / "modules.builtin").exists() else ""
            if f"/{name}.ko" in with_it.replace("-", "_"):
                return
            raise IsolationTooWeak(
                f"isolation 'microvm': the kernel {kernel} has no module {name} below {folder}",
                hint="use the kernel of Debian's package linux-image-cloud-amd64",
            )
        for needed in _depends(_read_module(path)):
            if needed not in found:
                add(needed)
        found[name] = path

    for name in _DRIVERS:
        add(name)
    return list(found.values())


def _module_name(path: Path) -> str:
    return path.name.partition(".ko")[0].replace("-", "_")


def _read_module(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def _depends(module: bytes) -> list[str]:
    said = re.search(rb"\0depends=([^\0]*)\0", module)
    return [name.replace("-", "_") for name in said[1].decode().split(",") if name] if said else []


def _modules(drivers: list[Path]) -> Entries:
    return {f"{MODULES}/{n:02}-{_module_name(path)}.ko": _read_module(path) for n, path in enumerate(drivers)}


def _ask() -> Interpreter:
    argv = [sys.executable, "-I", "-S", "-c", _ASK, str(PACKAGES)]
    done = subprocess.run(argv, env={}, cwd="/", capture_output=True, timeout=_LIMIT_S, check=True)
    return msgspec.json.decode(done.stdout, type=Interpreter)


def _programs(said: Interpreter) -> Entries:
    """The interpreter and its libraries, where they are here and under all their names."""
    found: Entries = {str(_CACHE): _CACHE.read_bytes()} if _CACHE.exists() else {}
    found |= {str(path): str(path.readlink()) for path in map(Path, _LINKS) if path.is_symlink()}
    for file in map(Path, said.mapped):
        data = file.read_bytes()
        if not data.startswith(b"\x7fELF"):
            continue
        found[str(file)] = data
        if str(file) != said.program and "lib-dynload" not in file.parts:
            names = (other for other in file.parent.iterdir() if other.is_symlink() and other.resolve() == file)
            found |= {str(name): str(file) for name in names}
    loader = re.search(rb"\0(/[\w/.-]+/ld-[\w.-]+)\0", Path(said.program).read_bytes()[:_ELF_HEAD])
    if loader is not None:
        path = Path(loader[1].decode())
        found.setdefault(str(path.parent.resolve() / path.name), str(path.resolve()))
    return found


def _python(said: Interpreter) -> Entries:
    found: Entries = {"/init": _INIT.format(program=said.program, home=_HOME).encode()}
    for name, file in said.modules.items():
        if file is None or not file.endswith(".py"):
            continue
        source = Path(file).read_bytes()
        code = marshal.dumps(compile(source, file, "exec", dont_inherit=True))
        own = name.partition(".")[0] == "rollyard"
        place = f"{_HOME}/{Path(file).relative_to(PACKAGES)}" if own else file
        found[f"{place}c"] = importlib.util.MAGIC_NUMBER + _UNCHECKED + code
    return found


def _archive(entries: Entries) -> Iterator[bytes]:
    """A cpio archive in the form `newc`, which the kernel unpacks: directories before what is in them."""
    folders = {str(parent) for name in entries for parent in Path(name).parents if str(parent) != "/"}
    every = {**dict.fromkeys(folders), **entries}
    for number, name in enumerate(sorted(every, key=lambda name: (name.count("/"), name))):
        body = every[name]
        mode = 0o040755 if body is None else 0o120777 if isinstance(body, str) else 0o100755
        yield from _member(
            number + 1, name.lstrip("/"), mode, os.fsencode(body) if isinstance(body, str) else body or b""
        )
    yield from _member(0, "TRAILER!!!", 0, b"")


def _member(number: int, name: str, mode: int, body: bytes) -> Iterator[bytes]:
    raw = os.fsencode(name) + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(body), 0, 0, 0, 0, len(raw), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + raw
    yield head + bytes(-len(head) % 4) + body + bytes(-len(body) % 4)
