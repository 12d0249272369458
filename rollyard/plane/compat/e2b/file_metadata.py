"""Metadata of files: what a client says in headers of an upload is kept in attributes of the file, `user.e2b.NAME`, and shown
when the file is looked at or listed. Python in the sandbox reads and writes them; an image without it has no metadata."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from importlib import resources

from rollyard.plane.compat.e2b.boxes import E2bSandbox
from rollyard.plane.compat.e2b.errors import E2bRefusal

SOURCE = resources.files("rollyard.inside").joinpath("file_metadata.py").read_text()
_MARK = b"\0rollyard-metadata\0"
# After a script about `$1`: what is known of it, or of what is at most `$2` below it, by the program `$3`.
GET = (
    " || exit $?; printf '\\0rollyard-metadata\\0'; "
    'if command -v python3 >/dev/null; then python3 -S -E -c "$3" get "$1" "$2"; fi; exit 0'
)
_HEADER = "x-metadata-"
_LONGEST_NAME, _MOST = 246, 4096
_PREFIX = len("user.e2b.")
_STEP_S = 30.0


def read_metadata(headers: Mapping[str, str]) -> dict[str, str]:
    """Of an upload's headers, within the bounds of the vendor's."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        if not name.lower().startswith(_HEADER):
            continue
        key = name.lower().removeprefix(_HEADER)
        if not key or len(key) > _LONGEST_NAME or not all(" " <= sign <= "~" for sign in key + value):
            raise E2bRefusal("invalid_argument", f"metadata {key!r}: a name and a value of printable ASCII")
        found.setdefault(key, value)
    if sum(_PREFIX + len(key) + len(value) for key, value in found.items()) > _MOST:
        raise E2bRefusal("invalid_argument", f"the metadata of a file is more than {_MOST} bytes")
    return found


async def set_metadata(box: E2bSandbox, path: str, metadata: Mapping[str, str], user: str | None) -> None:
    """In place of all that the file had; a file that has none is left alone where none was ever seen."""
    if not metadata and not box.has_metadata:
        return
    words = ["python3", "-S", "-E", "-c", SOURCE, "set", path, json.dumps(dict(metadata))]
    done = await box.sandbox.exec(words, cwd="/", user=box.accounts.as_user(user), timeout=_STEP_S)
    if not done.ok:
        why = done.text.strip().splitlines()[-1:] or ["no python3 in the image"]
        raise E2bRefusal("unimplemented", f"the metadata of {path} could not be set: {why[0]}", 400)
    box.has_metadata = True


def split_metadata(box: E2bSandbox, raw: bytes) -> tuple[bytes, dict[str, dict[str, str]]]:
    """What a script said before `GET`, and the metadata by path."""
    text, _, found = raw.rpartition(_MARK)
    by_path: dict[str, dict[str, str]] = json.loads(found or b"{}")
    box.has_metadata = box.has_metadata or bool(by_path)
    return text, {posixpath.normpath(path): metadata for path, metadata in by_path.items()}
