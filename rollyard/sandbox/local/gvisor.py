"""Sandboxes whose programs run in gVisor (`inner/gvisor.py`): when a spec gets one, and whether `runsc` works here.

It is tried, not guessed: the first such sandbox runs a program, and what `runsc` says where it cannot is the error."""

from __future__ import annotations

import os
import shutil

import msgspec

from rollyard.core.errors import IsolationTooWeak
from rollyard.core.log import Log
from rollyard.core.sandbox import Capabilities, SandboxSpec
from rollyard.sandbox.local.box import LocalSandbox
from rollyard.sandbox.local.probe import Level

VARIABLE = "ROLLYARD_RUNSC"
_PROVE_S = 60.0
_OLD = "this runsc lacks system calls that programs of the image use: install a newer gVisor"


class GvisorUse:
    """`always`: every sandbox of the backend, else those whose spec asks for it by `min_isolation`."""

    def __init__(self, *, always: bool, level: Level) -> None:
        self.always, self._level = always, level
        self._proved = False

    def takes(self, spec: SandboxSpec) -> str | None:
        """The path of `runsc` for a sandbox that is to be in gVisor; None for others."""
        if not self.always and spec.min_isolation != "gvisor":
            return None
        if self._level not in ("full", "no_cgroups"):
            raise IsolationTooWeak(
                f"isolation 'gvisor' needs namespaces and /proc, and the level here is {self._level!r}",
                hint="`rollyard doctor` says what is missing",
            )
        found = os.environ.get(VARIABLE) or shutil.which("runsc")
        if found is None:
            raise IsolationTooWeak(
                "isolation 'gvisor' needs runsc, which is not on this machine",
                hint=f"install gVisor (Debian: apt-get install runsc), or name the program in {VARIABLE}",
            )
        return os.path.realpath(found)

    async def prove(self, box: LocalSandbox) -> None:
        """Run a program once: `runsc` that cannot start would be taken for a program that failed."""
        if self._proved:
            return
        done = await box.exec("exit 42", cwd="/", timeout=_PROVE_S)
        if done.exit_code != 42:
            await box.kill()
            said = done.text.strip()[-300:] or f"it ended with {done.exit_code}"
            raise IsolationTooWeak(f"runsc cannot run programs here: {said}", hint="lower min_isolation")
        self._proved = True
        listed = await box.exec("ls /", cwd="/", timeout=_PROVE_S)
        if not listed.ok:
            Log("rollyard.sandbox.local").warning("sandbox.gvisor_too_old", ls=listed.text.strip()[-200:], hint=_OLD)


def with_gvisor(found: Capabilities) -> Capabilities:
    """Its programs cannot be made to stand still from outside."""
    return msgspec.structs.replace(found, isolation="gvisor", pause=False)
