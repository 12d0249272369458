"""What git does unasked in a repository that the agent had: put back to what a checkout needs.

A repository's own configuration can name programs (`filter.*`, `diff.*.textconv`, `core.fsmonitor`, aliases), other files
(`include.path`) and make changes invisible (`info/attributes`, `info/exclude`, grafts, flags and times in the index). Before the
agent starts, these files are read (`read_listed`); before the tests run, a changed configuration keeps the settings that it
had and those that say where things come from, the other files become what they were, and a changed index is made anew out of its
own entries, so that git compares every file by its content.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping

import msgspec

from rollyard.core.errors import PathError, VerifierError
from rollyard.core.protocols import Sandbox
from rollyard.tasks.look_scripts import LookScript, need_all
from rollyard.tasks.verifiers.sandbox import CLEAN

_TIMEOUT_S = 120.0
_CONFIGS = ("config", "config.worktree")
_FILES = ("info/attributes", "info/exclude", "info/grafts", "info/sparse-checkout")

# Git directories below $1, those that its `.git` files and links lead to, and any above it. For each: the directory, then name
# and content (base64; `index` has its checksum), each ended by NUL, then an empty name.
_LIST = r"""
workdir=$1
tools='
show() {
    [ -e "$1/HEAD" ] || [ -L "$1/HEAD" ] || return 0
    printf "%s\0" "$1"
    for name in config config.worktree info/attributes info/exclude info/grafts info/sparse-checkout; do
        if [ -f "$1/$name" ]; then printf "%s\0" "$name"; base64 < "$1/$name"; printf "\0"; fi
    done
    if [ -f "$1/index" ]; then printf "index\0"; sha256sum < "$1/index"; printf "\0"; fi
    printf "\0"
}
show_outside() { case $1 in "$workdir"/*) ;; *) show "$1" ;; esac; }
lead() {
    [ -e "$1" ] || return 0
    to=$1
    if [ -f "$1" ]; then
        IFS= read -r line < "$1" || true
        to=${line#gitdir: }
        case $to in /*) ;; *) to=${1%/*}/$to ;; esac
    fi
    to=$(cd "$to" 2>/dev/null && pwd -P) || return 0
    show_outside "$to"
    [ -f "$to/commondir" ] || return 0
    IFS= read -r line < "$to/commondir" || true
    to=$(cd "$to" && cd "$line" 2>/dev/null && pwd -P) || return 0
    show_outside "$to"
}'
export workdir
find "$workdir" -name node_modules -prune -o -name HEAD ! -path '*/logs/HEAD' ! -path '*/refs/*' \
    -exec sh -c "$tools"' ; for head; do show "${head%/HEAD}"; done' sh {} + \
    -o -name .git \( -type f -o -type l \) \
    -exec sh -c "$tools"' ; for link; do lead "$link"; done' sh {} + 2>/dev/null
eval "$tools"
above=$workdir
while [ -n "$above" ]; do above=${above%/*}; lead "$above/.git"; done
true
"""

# $1 is a git directory: its index again, out of its entries, without flags and times; $2: the checkout is sparse.
_INDEX = r"""
GIT_DIR=$1 && export GIT_DIR && cd "$1" || exit 0
case $1 in
*/.git) GIT_WORK_TREE=${1%/.git} ;;
*) if [ -f gitdir ]; then IFS= read -r GIT_WORK_TREE < gitdir; GIT_WORK_TREE=${GIT_WORK_TREE%/.git}; fi ;;
esac
[ -n "$GIT_WORK_TREE" ] && [ -d "$GIT_WORK_TREE" ] && export GIT_WORK_TREE && cd "$GIT_WORK_TREE"
new=$GIT_DIR/index.made-anew
git ls-files --stage -z > "$new.list" &&
    GIT_INDEX_FILE=$new git update-index -z --index-info < "$new.list" &&
    if [ -f "$new" ]; then mv -f "$new" "$GIT_DIR/index"; fi
rm -f "$new" "$new.list"
[ -n "$GIT_WORK_TREE" ] || exit 0
[ "$2" = sparse ] && git sparse-checkout reapply
git update-index -q --refresh
exit 0
"""

_KEPT = re.compile(
    r"core\.(repositoryformatversion|filemode|bare|logallrefupdates|ignorecase|precomposeunicode|symlinks"
    r"|autocrlf|eol|safecrlf|abbrev|quotepath|sparsecheckout|sparsecheckoutcone)"
    r"|extensions\.(objectformat|refstorage|compatobjectformat|worktreeconfig|noop)"
    r"|(user|author|committer)\.(name|email)|init\.defaultbranch|pull\.(rebase|ff)|push\.default"
    r"|remote\.[^\n]*\.(url|pushurl|fetch|tagopt)|branch\.[^\n]*\.(remote|merge|rebase)|submodule\.[^\n]*\.(url|active)"
)
_SECTION = re.compile(r'\[\s*([A-Za-z0-9.-]+)(?:[ \t]+"((?:\\.|[^"\\\n])*)")?\s*\]')
_NAME = re.compile(r"([A-Za-z][A-Za-z0-9-]*)[ \t]*(=?)")
_BACKSLASH, _PLAIN = re.compile(r"\\(.)"), r"\1"
_ESCAPES = {"n": "\n", "t": "\t", "b": "\b", '"': '"', "\\": "\\"}


class Repository(msgspec.Struct, frozen=True, kw_only=True):
    """Files of one git directory that steer git, by name; `index` is a checksum."""

    files: Mapping[str, bytes] = {}


def list_script(workdir: str) -> LookScript:
    """Prints what `read_listed` reads."""
    return LookScript(_LIST, (workdir.rstrip("/"),))


def read_listed(listed: bytes | None) -> dict[str, Repository]:
    parts = iter(need_all(listed, "the repositories").split(b"\0"))
    found: dict[str, Repository] = {}
    for directory in parts:
        files: dict[str, bytes] = {}
        while name := next(parts, b"").decode():
            content = next(parts, b"")
            files[name] = content if name == "index" else base64.b64decode(content)
        if directory:
            found[directory.decode("utf-8", "surrogateescape")] = Repository(files=files)
    return found


async def restore_repositories(
    sandbox: Sandbox, before: Mapping[str, Repository], found: Mapping[str, Repository]
) -> list[str]:
    """Undo what steers git and was not there before the agent; a note for each file."""
    notes: list[str] = []
    for directory, now in found.items():
        old = before.get(directory, Repository()).files
        sparse = any(b"sparsecheckout" in old.get(name, b"").lower() for name in _CONFIGS)
        for name in (*_CONFIGS, *_FILES):
            data = now.files.get(name)
            if data == old.get(name) or (name == "info/sparse-checkout" and not sparse):
                continue
            kept = _reduce(data, old.get(name)) if name in _CONFIGS else old.get(name)
            if kept is not None and kept == data:
                continue
            await _replace(sandbox, f"{directory}/{name}", data, kept)
            if not (data and kept and _settings(data) == _settings(kept)):
                notes.append(f"left by the agent, reduced to what a checkout needs: {directory}/{name}")
        if "index" in now.files and now.files["index"] != old.get("index"):
            await _make_index(sandbox, directory, sparse=sparse)
    return notes


async def _replace(sandbox: Sandbox, path: str, data: bytes | None, kept: bytes | None) -> None:
    try:
        if data is not None:
            await sandbox.remove(path)
        if kept is not None:
            await sandbox.write(path, kept, mode=0o644)
    except PathError as error:
        raise VerifierError(f"{path} was left by the agent and cannot be put back: {error}") from error


async def _make_index(sandbox: Sandbox, directory: str, *, sparse: bool) -> None:
    user = "0" if sandbox.capabilities.users else None
    command = ["/bin/sh", "-c", _INDEX, "git", directory, "sparse" if sparse else "whole"]
    done = await sandbox.exec(command, cwd="/", user=user, env={**CLEAN, "LC_ALL": "C"}, timeout=_TIMEOUT_S)
    if not done.ok or done.truncated:
        raise VerifierError(f"making the index of {directory} anew failed: {done.text.strip()[-400:]}")


def _reduce(data: bytes | None, old: bytes | None) -> bytes | None:
    """The settings of a changed configuration that were there before, or that a checkout needs, always in the plainest
    spelling: a file that git reads otherwise than we do must not stay."""
    if data is None:
        return old
    allowed = set(_settings(old or b""))
    kept = [pair for pair in _settings(data) if pair in allowed or _KEPT.fullmatch(pair[0])]
    return "".join(_write_setting(*pair) for pair in kept).encode("utf-8", "surrogateescape")


def _settings(data: bytes) -> list[tuple[str, str]]:
    return list(read_config(data.decode("utf-8", "surrogateescape")))


def _write_setting(key: str, value: str) -> str:
    section, _, rest = key.partition(".")
    middle, _, name = rest.rpartition(".")
    head = f"[{section}" + (f' "{_escape(middle)}"' if middle else "") + "]"
    return f'{head}\n\t{name} = "{_escape(value)}"\n'


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")


def read_config(text: str) -> Iterator[tuple[str, str]]:
    """Settings as `section.subsection.name` and value. What cannot be read ends the reading: git refuses such a file."""
    prefix, at = "", 0
    while at < len(text):
        if text[at].isspace() or text[at] == "\ufeff":
            at += 1
        elif text[at] in "#;":
            at = _line_end(text, at)
        elif (section := _SECTION.match(text, at)) is not None:
            name, sub = section[1].lower(), section[2]
            prefix = f"{name}." if sub is None else f"{name}.{_BACKSLASH.sub(_PLAIN, sub)}."
            at = section.end()
        elif prefix and (setting := _NAME.match(text, at)) is not None:
            value, at = _read_value(text, setting.end()) if setting[2] else ("true", _line_end(text, setting.end()))
            yield f"{prefix}{setting[1].lower()}", value
        else:
            return


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _read_value(text: str, at: int) -> tuple[str, int]:
    out, spaces, quoted = "", "", False
    while at < len(text) and (text[at] != "\n" or quoted):
        char = text[at]
        at += 1
        if char == "\\":
            escape = text[at : at + 1]
            at += 1
            if escape != "\n":
                out, spaces = out + spaces + _ESCAPES.get(escape, ""), ""
        elif char == '"':
            quoted = not quoted
            out, spaces = out + spaces, ""
        elif char in "#;" and not quoted:
            at = _line_end(text, at)
        elif char.isspace() and not quoted:
            spaces += char if out else ""
        else:
            out, spaces = out + spaces + char, ""
    return out, at
