"""A machine that bars namespaces: `python tests/barred.py COMMAND...` runs a command without capabilities and under a filter that
refuses new namespaces and mounts, as the default profile of a container engine does."""

from __future__ import annotations

import errno
import os
import struct
import sys
from pathlib import Path

from rollyard.sandbox.local.inner import seccomp, syscalls


def main() -> None:
    if os.geteuid() == 0:
        syscalls.set_capabilities(frozenset(), int(Path("/proc/sys/kernel/cap_last_cap").read_text()))
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(seccomp.program(syscalls.MACHINE))
    for number in {"x86_64": (310, 311), "aarch64": (270, 271)}[syscalls.MACHINE]:
        # Older profiles bar these two as well
        steps = (
            (0x20, 0, 0, 0),
            (0x15, 0, 1, number),
            (0x06, 0, 0, 0x00050000 | errno.EPERM),
            (0x06, 0, 0, 0x7FFF0000),
        )
        seccomp.install(b"".join(struct.pack("=HBBI", *step) for step in steps))
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - what it is for


if __name__ == "__main__":
    main()
