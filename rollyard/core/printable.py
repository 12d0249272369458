"""Text that programs, models and authors of tasks wrote, as a terminal may show it: no control character steers it."""

from __future__ import annotations


def printable(text: str) -> str:
    """Control characters, and what is no character at all, as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
