"""Colours on a terminal, where a person can see them and wants them."""

from __future__ import annotations

import os
import sys
from typing import IO

BOLD, RED, GREEN = 1, 31, 32


def paint(text: str, colour: int | None, stream: IO[str] | None = None) -> str:
    """For standard output, or another stream."""
    seen = (
        (stream or sys.stdout).isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    )
    return f"\x1b[{colour}m{text}\x1b[0m" if seen and colour is not None else text
