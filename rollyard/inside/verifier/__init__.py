"""What runs inside a sandbox, under whatever Python 3.9 or newer is there, with the standard library alone.

`archive()` is all of it as one zip that Python runs (`python3 -I FILE check`, `... sqlite`). The host never imports the other
modules of this package: they open untrusted files and run untrusted code.
"""

from __future__ import annotations

import functools
import io
import zipfile
from importlib import resources

_FILES = ("main.py", "check.py", "environment.py", "names.py", "query.py", "snapshots.py", "sqlite.py")
_WHEN = (1980, 1, 1, 0, 0, 0)  # the same bytes every time


@functools.cache
def archive() -> bytes:
    place = resources.files("rollyard.inside.verifier")
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as packed:
        for name in _FILES:
            _put(packed, f"inside/{name}", place.joinpath(name).read_bytes())
        _put(packed, "inside/__init__.py", b"")
        _put(packed, "__main__.py", b"from inside.main import main\n\nmain()\n")
    return made.getvalue()


def _put(packed: zipfile.ZipFile, name: str, content: bytes) -> None:
    packed.writestr(zipfile.ZipInfo(name, _WHEN), content, zipfile.ZIP_DEFLATED)
