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
import hashlib
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rollyard.core.errors import PathError, VerifierError
from rollyard.core.protocols import Sandbox
from rollyard.tasks.look_scripts import LookScript, need_all, run_looks

_WHAT = "Python's start-up files"
_REMEMBERED = 64 * 2**20  # bytes of contents
_SUM = 64  # characters of a checksum
_GROUP = "pytest11"
_LIBRARY = re.compile(r"(.*)/python3\.?(\d*)$")
_EDITABLE = re.compile(r"import (__editable___\w+_finder); ?\1\.install\(\)$")
_MAPPING = re.compile(r"^MAPPING\b[^=\n]*= (\{.*\})$", re.MULTILINE)

# Directories with a standard library or site packages. /usr is large, and Pythons have known places in it.
_FIND = r"""
for place in /usr/lib*/python3* /usr/local/lib*/python3* /usr/local/*/lib/python3*; do
    if [ -e "$place" ] || [ -L "$place" ]; then printf '%s\n' "$place"; fi
done
for top in /* /.[!.]*; do
    case $top in /usr|/proc|/sys|/dev|/bin|/sbin|/lib*|/etc|/var|/run|/boot|/tmp|/tests|/logs) continue ;; esac
    [ -L "$top" ] || set -- "$@" "$top"
done
[ $# -eq 0 ] || find "$@" -maxdepth 6 \( -name node_modules -o -name .git \) -prune -o \
    -type d -path '*/lib/python3*' -prune -print 2>/dev/null
true
"""

# Files by path and checksum, in blocks: each path ended by NUL, with "+" before it, or "-" where it is no regular file; then NUL,
# what sha256sum says of the regular ones in the same order, and NUL. Few programs are started and few directories read, since
# every rollout does this twice. sha256sum is given files alone: what is none may have no end. Too many go through xargs.
_LIST = r"""
tools='
show() {
    some= odd=
    for file; do
        if [ -f "$file" ]; then some=1; printf "+%s\0" "$file"
        elif [ -e "$file" ] || [ -L "$file" ]; then odd=1; printf "%s%s\0" - "$file"; fi
    done
    printf "\0"
    if [ -n "$some" ]; then
        if [ -z "$odd" ] && [ $# -lt 1000 ]; then sha256sum "$@"
        else for file; do [ ! -f "$file" ] || printf "%s\0" "$file"; done | xargs -0 sha256sum; fi 2>/dev/null
    fi
    printf "\0"
}'
eval "$tools"
workdir=$1; shift
left=$#
while [ "$left" -gt 0 ]; do
    place=$1; shift; left=$((left - 1))
    case $place in *.zip) set -- "$@" "$place"; continue ;; esac
    [ -d "$place" ] || continue
    case $place in
    */site-packages|*/dist-packages)
        set -- "$@" "$place"/*.pth "$place"/.*.pth "$place"/__editable__*_finder.py ;;
    *-[iI][nN][fF][oO]) set -- "$@" "$place"/entry_points.txt ;;
    esac
    set -- "$@" "$place"/sitecustomize* "$place"/usercustomize* "$place"/*-[iI][nN][fF][oO]/entry_points.txt \
        "$place"/.*-[iI][nN][fF][oO]/entry_points.txt
    [ ! -d "$place"/__pycache__ ] ||
        set -- "$@" "$place"/__pycache__/sitecustomize* "$place"/__pycache__/usercustomize*
done
if [ "$workdir" != / ]; then
    for name in conftest.py pytest.ini .pytest.ini pytest.toml .pytest.toml pyproject.toml tox.ini setup.cfg setup.py; do
        set -- "$@" "/$name"
    done
    find "$workdir" \( -name node_modules -o -name .git \) -prune -o \
        \( -type f -name entry_points.txt -o -type l -name '*-[iI][nN][fF][oO]' \) \
        -exec sh -c "$tools"'; show "$@"' sh {} + 2>/dev/null
fi
show "$@"
true
"""


class StartUp(msgspec.Struct, frozen=True, kw_only=True):
    """`libraries` are the directories of the interpreters, `files` what they would load unasked, `digests` their checksums;
    None: no regular file."""

    libraries: tuple[str, ...]
    files: Mapping[str, bytes | None]
    digests: Mapping[str, str | None]


class KnownFiles:
    """What files hold, by their checksums. All sandboxes of an image have the same ones, so that each is read once in a run."""

    def __init__(self) -> None:
        self.libraries: tuple[str, ...] = ()  # those of the last image
        self._contents: dict[str, bytes] = {}
        self._size = 0

    async def read(self, sandbox: Sandbox, path: str, digest: str | None) -> bytes | None:
        """None for what is no regular file or cannot be read. Entry points without a pytest plugin are nothing to look at."""
        if digest is None:
            return None
        if digest not in self._contents:
            try:
                data = await sandbox.read(path)
            except PathError:
                return None
            if self._size + len(data) > _REMEMBERED:
                self._contents, self._size = {}, 0
            digest = hashlib.sha256(data).hexdigest()  # a program that still lives may have changed it meanwhile
            self._contents[digest] = data
            self._size += len(data)
        data = self._contents[digest]
        return b"" if path.endswith("/entry_points.txt") and _GROUP.encode() not in data else data


async def look(sandbox: Sandbox, workdir: str, known: KnownFiles) -> StartUp:
    """What is there now. The caller knows that the agent has not run yet."""
    guess = known.libraries
    found, listed = await run_looks(sandbox, _WHAT, (LookScript(_FIND), list_script(workdir, guess)))
    libraries = tuple(need_all(found, _WHAT).decode("utf-8", "surrogateescape").splitlines())
    if libraries != guess:
        known.libraries = libraries
        (listed,) = await run_looks(sandbox, _WHAT, (list_script(workdir, libraries),))
    digests, files = await _read_listed(sandbox, listed, _places(libraries), known)
    return StartUp(libraries=libraries, files=files, digests=digests)


def list_script(workdir: str, libraries: Sequence[str]) -> LookScript:
    """Prints what `put_back` reads."""
    return LookScript(_LIST, (workdir, *_places(libraries)))


async def put_back(sandbox: Sandbox, before: StartUp, listed: bytes | None, known: KnownFiles) -> list[str]:
    """Undo what the agent added or changed; a note for each file."""
    digests, now = await _read_listed(sandbox, listed, _places(before.libraries), known, before)
    plugins = {plugin for path, data in before.files.items() if data for plugin in _plugins(path, data)}
    notes: list[str] = []
    for path, data in now.items():
        old = before.files.get(path)
        if path.endswith("_finder.py") or (path in before.files and digests[path] == before.digests[path]):
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


_Digests = dict[str, str | None]
_Files = dict[str, bytes | None]


async def _read_listed(
    sandbox: Sandbox, listed: bytes | None, places: Sequence[str], known: KnownFiles, before: StartUp | None = None
) -> tuple[_Digests, _Files]:
    """Checksums and contents; those of files that are as they were before are not read again."""
    digests = _parse(need_all(listed, _WHAT))
    files = await _read(sandbox, digests, known, before)
    more = [place for place in _find_added_paths(files) if place not in places]
    if more:
        (listed,) = await run_looks(sandbox, _WHAT, (LookScript(_LIST, ("/", *more)),))
        added = _parse(need_all(listed, _WHAT))
        digests |= added
        files |= await _read(sandbox, added, known, before)
    return digests, files


async def _read(sandbox: Sandbox, digests: _Digests, known: KnownFiles, before: StartUp | None) -> _Files:
    files: _Files = {}
    for path, digest in digests.items():
        same = before is not None and path in before.files and before.digests[path] == digest
        files[path] = before.files[path] if before is not None and same else await known.read(sandbox, path, digest)
    return files


def _parse(listed: bytes) -> _Digests:
    records = iter(listed.split(b"\0"))
    found: _Digests = {}
    while True:
        paths = list(iter(lambda: next(records, b""), b""))
        sums = next(records, None)
        if sums is None:
            return found
        for record in paths:
            digest = None
            if record.startswith(b"+"):
                digest, sums = _take_sum(sums, record[1:])
            found[record[1:].decode("utf-8", "surrogateescape")] = digest


def _take_sum(sums: bytes, path: bytes) -> tuple[str | None, bytes]:
    """The checksum in the first line, if that line is about this path, and the other lines. Some programs escape a name that is
    not one line and say so by a backslash before the checksum; one that cannot be read has no line."""
    escaped = path.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")
    for mark, name in ((b"", path), (b"\\", escaped), (b"\\", escaped.replace(b"\r", b"\\r"))):
        end = len(mark) + _SUM + 2
        if sums.startswith(mark) and sums[end:].startswith(name + b"\n"):
            return sums[len(mark) : len(mark) + _SUM].decode("ascii", "replace"), sums[end + len(name) + 1 :]
    return None, sums


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
