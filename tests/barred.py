"""A machine that bars namespaces: `python tests/barred.py COMMAND...` runs a command without capabilities and under a filter that
refuses new namespaces and mounts, as the default profile of a container engine does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rollyard.sandbox.local.inner import seccomp, syscalls


def main() -> None:
    if os.geteuid() == 0:
        syscalls.set_capabilities(frozenset(), int(Path("/proc/sys/kernel/cap_last_cap").read_text()))
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(seccomp.program(syscalls.MACHINE))
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - what it is for


if __name__ == "__main__":
    main()
