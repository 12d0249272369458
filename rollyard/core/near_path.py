"""The file that a mistyped path probably means."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path


def near_path(path: str | Path) -> str | None:
    """A hint for a path that is not there: the name beside it that is most like it."""
    wanted = Path(path)
    try:
        names = sorted(found.name for found in wanted.parent.iterdir())
    except OSError:  # the folder itself is not there, or closed
        return None
    near = get_close_matches(wanted.name, names, n=1)
    return f"did you mean {wanted.with_name(near[0])}?" if near else None
