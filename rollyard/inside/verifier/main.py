"""Where the archive begins: `check` runs a verifier, `sqlite` answers one request about a database."""

from __future__ import annotations

import sys


def main() -> None:
    if sys.argv[1] == "check":
        from .check import main as check

        check()
    else:
        from .sqlite import main as sqlite

        sqlite()
