"""What Python and pytest load by themselves, put back to what the task's environment brought.

A plugin that the image, the task's setup or the test script installs has to work; one that the agent planted must not. So what is
loaded unasked is looked at before the agent starts (`look`) and again before the tests run (`put_back`):

- `sitecustomize` and `usercustomize`, and a zip before the standard library: the earlier file again, or none;
- `.pth` files in site directories: lines that import something are taken out unless they were there; added paths stay, and an
  editable install becomes the path it stands for;
- `entry_points.txt` of installed packages and in the working directory: pytest plugins that were not there are taken out, all
  else stays;
- pytest's configuration files and `conftest.py` in `/`, above the tests.

Only interpreters that were there before the agent count: an interpreter that the agent brought is its own work. Nothing else an
agent installed is touched. It does not undo a changed library or program: that needs a sealed verdict.
"""

from __future__ import annotations

import ast
import base64
import binascii
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rollyard.core.errors import PathError, VerifierError
from rollyard.core.protocols import Sandbox

_TIMEOUT_S = 60.0
_GROUP = "pytest11"
_LIBRARY = re.compile(r"(.*)/python3\.?(\d*)$")
_EDITABLE = re.compile(r"import (__editable___\w+_finder); ?\1\.install\(\)$")
_MAPPING = re.compile(r"^MAPPING\b[^=\n]*= (\{.*\})$", re.MULTILINE)

# Directories with a standard library or site packages. /usr is large, and Pythons have known places in it.
_FIND = r"""
ls -d /usr/lib*/python3* /usr/local/lib*/python3* /usr/local/*/lib/python3* 2>/dev/null
for top in /* /.[!.]*; do
    case $top in /usr|/proc|/sys|/dev|/bin|/sbin|/lib*|/etc|/var|/run|/boot|/tmp|/tests|/logs) continue ;; esac
    [ -L "$top" ] || find "$top" -maxdepth 6 \( -name node_modules -o -name .git \) -prune -o \
        -type d -path '*/lib/python3*' -prune -print 2>/dev/null
done
true
"""

# For each file: its path, NUL, its content in base64, NUL. What is not a regular file has "-" for its content.
_LIST = r"""
show() {
    if [ -f "$1" ]; then printf '%s\0' "$1"; base64 < "$1"; printf '\0'
    elif [ -e "$1" ] || [ -L "$1" ]; then printf '%s\0-\0' "$1"; fi
}
show_all() { while IFS= read -r found; do show "$found"; done; }
workdir=$1; shift
if [ "$workdir" != / ]; then
    for name in conftest.py pytest.ini .pytest.ini pytest.toml .pytest.toml pyproject.toml tox.ini setup.cfg setup.py; do
        show "/$name"
    done
    find "$workdir" \( -name node_modules -o -name .git \) -prune -o -type f -name entry_points.txt \
        -exec grep -l pytest11 {} + 2>/dev/null | show_all
    find "$workdir" \( -name node_modules -o -name .git \) -prune -o -type l -name '*-[iI][nN][fF][oO]' -print \
        2>/dev/null | show_all
fi
for place; do
    case $place in
    *.zip) show "$place"; continue ;;
    */site-packages|*/dist-packages)
        for file in "$place"/*.pth "$place"/.*.pth "$place"/__editable__*_finder.py; do show "$file"; done ;;
    esac
    for file in "$place"/sitecustomize* "$place"/usercustomize* "$place"/__pycache__/sitecustomize* \
        "$place"/__pycache__/usercustomize*; do show "$file"; done
    find -L "$place" -maxdepth 2 -type f -path '*-[iI][nN][fF][oO]/entry_points.txt' -exec grep -l pytest11 {} + \
        2>/dev/null | show_all
done
true
"""


class StartUp(msgspec.Struct, frozen=True, kw_only=True):
    """`libraries` are the directories of the interpreters, `files` what they would load unasked; None: no regular file."""

    libraries: tuple[str, ...]
    files: Mapping[str, bytes | None]


async def look(sandbox: Sandbox, workdir: str) -> StartUp:
    """What is there now. The caller knows that the agent has not run yet."""
    found = await _run(sandbox, _FIND, ())
    libraries = tuple(found.decode("utf-8", "surrogateescape").splitlines())
    return StartUp(libraries=libraries, files=await _list(sandbox, workdir, _places(libraries)))


async def put_back(sandbox: Sandbox, before: StartUp, workdir: str) -> list[str]:
    """Undo what the agent added or changed; a note for each file."""
    now = await _list(sandbox, workdir, _places(before.libraries))
    plugins = {plugin for path, data in before.files.items() if data for plugin in _plugins(path, data)}
    notes: list[str] = []
    for path, data in now.items():
        old = before.files.get(path)
        if path.endswith("_finder.py") or (path in before.files and data == old):
            continue
        kept = _keep(path, data, old, plugins, now)
        if kept == data and data is not None:
            continue
        try:
            await sandbox.remove(path)
            if kept is not None:
                await sandbox.write(path, kept, mode=0o644)
        except PathError as error:
            raise VerifierError(f"{path} was left by the agent and cannot be put back: {error}") from error
        what = "put back as it was" if old is not None and kept == old else "kept in part" if kept else "taken out"
        notes.append(f"left by the agent, loaded unasked by Python or pytest, {what}: {path}")
    return notes


def _places(libraries: Iterable[str]) -> list[str]:
    """Where each interpreter looks; Debian's also looks below /usr/local, whether or not that is there."""
    found: dict[str, None] = {}
    for library in libraries:
        match = _LIBRARY.match(library)
        parent = match[1] if match else posixpath.dirname(library)
        for root in (parent, "/usr/local/lib") if parent == "/usr/lib" else (parent,):
            name = f"{root}/{posixpath.basename(library)}"
            found |= dict.fromkeys((name, f"{name}/site-packages", f"{name}/dist-packages"))
        if match and match[2]:
            found[f"{parent}/python3{match[2]}.zip"] = None
    return list(found)


async def _list(sandbox: Sandbox, workdir: str, places: Sequence[str]) -> dict[str, bytes | None]:
    files = await _list_places(sandbox, workdir, places)
    more = [place for place in _find_added_paths(files) if place not in places]
    return files | (await _list_places(sandbox, workdir, more) if more else {})


async def _list_places(sandbox: Sandbox, workdir: str, places: Sequence[str]) -> dict[str, bytes | None]:
    parts = (await _run(sandbox, _LIST, (workdir, *places))).split(b"\0")
    found: dict[str, bytes | None] = {}
    for path, content in zip(parts[::2], parts[1::2], strict=False):
        try:
            data = None if content == b"-" else base64.b64decode(content)
        except binascii.Error as error:
            raise VerifierError(f"the sandbox cannot say what is in {path!r}: {error}") from error
        found[path.decode("utf-8", "surrogateescape")] = data
    return found


async def _run(sandbox: Sandbox, script: str, words: Sequence[str]) -> bytes:
    user = "0" if sandbox.capabilities.users else None
    command = ["/bin/sh", "-c", script, "look", *words]
    done = await sandbox.exec(command, cwd="/", user=user, env={"LC_ALL": "C"}, timeout=_TIMEOUT_S)
    if not done.ok:
        raise VerifierError(f"looking at Python's start-up files failed: {done.text.strip()[-400:]}")
    return done.stdout


def _keep(
    path: str, data: bytes | None, old: bytes | None, plugins: set[tuple[str, str]], now: Mapping[str, bytes | None]
) -> bytes | None:
    """What stays of a file that is new or changed; None: nothing."""
    if data is not None and path.endswith(".pth"):
        return _without_imports(path, data, old or b"", now)
    if data is not None and path.endswith("/entry_points.txt"):
        return _without_plugins(data, plugins)
    return old


def _without_imports(path: str, data: bytes, old: bytes, now: Mapping[str, bytes | None]) -> bytes:
    allowed = set(old.splitlines())
    lines: list[bytes] = []
    for line in data.removeprefix(b"\xef\xbb\xbf").splitlines():
        if line in allowed or not line.startswith((b"import ", b"import\t")):
            lines.append(line)
        elif match := _EDITABLE.match(line.decode("latin-1").strip()):
            finder = now.get(f"{posixpath.dirname(path)}/{match[1]}.py")
            lines += [place.encode() for place in _editable_paths((finder or b"").decode("utf-8", "replace"))]
    return b"".join(line + b"\n" for line in lines) if lines != data.splitlines() else data


def _editable_paths(finder: str) -> list[str]:
    """The directories that setuptools' finder of an editable install makes importable, where a path says the same."""
    match = _MAPPING.search(finder)
    try:
        mapping = ast.literal_eval(match[1]) if match else {}
    except (ValueError, SyntaxError):
        return []
    places = {str(place): str(name) for name, place in mapping.items()} if isinstance(mapping, dict) else {}
    return sorted({posixpath.dirname(place) for place, name in places.items() if posixpath.basename(place) == name})


def _find_added_paths(files: Mapping[str, bytes | None]) -> list[str]:
    """Directories that `.pth` files put on the search path."""
    found: dict[str, None] = {}
    for path, data in files.items():
        if data is None or not path.endswith(".pth"):
            continue
        for line in data.decode("utf-8", "surrogateescape").splitlines():
            if line.strip() and not line.startswith(("#", "import ", "import\t")) and "\0" not in line:
                found[posixpath.normpath(posixpath.join(posixpath.dirname(path), line.strip()))] = None
    return list(found)


def _entries(data: bytes) -> list[tuple[str, tuple[str, str] | None]]:
    """Each line with the pytest plugin that it names, read as `importlib.metadata` reads it."""
    found: list[tuple[str, tuple[str, str] | None]] = []
    group = ""
    for line in data.decode("utf-8", "surrogateescape").splitlines():
        text = line.strip()
        if text.startswith("[") and text.endswith("]"):
            group, text = text.strip("[]"), ""
        name, _, value = text.partition("=")
        plugin = (name.strip(), value.strip()) if group == _GROUP and text and not text.startswith("#") else None
        found.append((line, plugin))
    return found


def _plugins(path: str, data: bytes) -> set[tuple[str, str]]:
    if not path.endswith("/entry_points.txt"):
        return set()
    return {plugin for _, plugin in _entries(data) if plugin is not None}


def _without_plugins(data: bytes, allowed: set[tuple[str, str]]) -> bytes:
    """The same entry points less pytest plugins that are not allowed."""
    lines = _entries(data)
    kept = [line for line, plugin in lines if plugin is None or plugin in allowed]
    return data if len(kept) == len(lines) else "\n".join([*kept, ""]).encode("utf-8", "surrogateescape")
