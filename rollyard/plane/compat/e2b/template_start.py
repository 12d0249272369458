"""A template's own program in a sandbox of it, and the look that says it is ready."""

from __future__ import annotations

import asyncio
import time

from rollyard.plane.compat.e2b.boxes import E2bSandbox
from rollyard.plane.compat.e2b.errors import E2bRefusal
from rollyard.plane.compat.e2b.templates import TemplateBuild

READY_S = 60.0
_READY_LOOK_S = 0.5


async def run_start(box: E2bSandbox, build: TemplateBuild) -> None:
    """The template's own program, and the look that says it is ready."""
    if build.start is None and build.ready is None:
        return
    user, env, cwd = box.accounts.as_user(None), build.env, await box.accounts.workdir(None)
    if build.start:
        await box.sandbox.start(["/bin/bash", "-l", "-c", build.start], env=env, cwd=cwd, user=user)
    until = time.monotonic() + READY_S
    while build.ready:
        words = ["/bin/bash", "-l", "-c", build.ready]
        done = await box.sandbox.exec(words, env=env, cwd=cwd, user=user, timeout=READY_S)
        if done.ok:
            return
        if time.monotonic() > until:
            raise E2bRefusal("deadline_exceeded", f"the template was not ready in {READY_S:g} s: {build.ready}")
        await asyncio.sleep(_READY_LOOK_S)
