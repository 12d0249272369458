"""What one sandbox backend does for this account, found by using it once: open, run, upload, kill, and the seconds of each."""

from __future__ import annotations

import hashlib
import random
import time
import tomllib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from rollyard import sandbox
from rollyard.core.errors import Error, SandboxError
from rollyard.core.sandbox import SandboxSpec
from rollyard.runs.doctor import DoctorFinding
from rollyard.sandbox import backend

UPLOAD_MB = 10
_RUN_S = 60.0


async def examine_sandbox(name: str, image: str = "host") -> list[DoctorFinding]:
    """A row for each step; the step that failed is the last one, and what was opened is killed all the same."""
    found: list[DoctorFinding] = []
    made = backend(name)
    try:
        async with _measure_time(found, "enter"):
            opened = await made.__aenter__()
        try:
            closed = opened.capabilities.network_none
            spec = SandboxSpec(
                image=image,
                network="none" if closed else "host",
                allow_unsafe=not closed,
                min_isolation="none",
                labels={"rollyard.role": "doctor"},
                ttl_s=600.0,
                boot_s=300.0,
            )
            async with _measure_time(found, "open"):
                box = await opened.open(spec)
            async with _measure_time(found, "run"):
                done = await box.exec("echo ready", timeout=_RUN_S)
                if done.stdout != b"ready\n":
                    raise SandboxError(f"a program said {done.text[-200:]!r} and not 'ready'")
            data = random.Random(0).randbytes(UPLOAD_MB * 10**6)  # the same each time, and nothing to compress
            async with _measure_time(found, f"upload {UPLOAD_MB} MB"):
                await box.write("/tmp/rollyard-doctor", data)
            async with _measure_time(found, "check upload"):
                said = (await box.exec("sha256sum /tmp/rollyard-doctor", timeout=_RUN_S)).text
                if said.split()[:1] != [hashlib.sha256(data).hexdigest()]:
                    raise SandboxError(f"the file is not what was sent: {said[-200:]!r}")
            async with _measure_time(found, "kill"):
                await box.kill()
            found.append(_network(closed))
            found.append(find_price(name))
        finally:
            await made.__aexit__(None, None, None)
    except Error:  # it is the last row
        pass
    return found


def _network(closed: bool) -> DoctorFinding:
    if closed:
        return DoctorFinding(group="sandbox", name="network", state="ok", found="can be taken away")
    return DoctorFinding(
        group="sandbox",
        name="network",
        state="weak",
        found="sandboxes always have one",
        advice="tasks that ask for none are refused; use another backend for them",
    )


def find_price(name: str) -> DoctorFinding:
    """What the backend's sandboxes are billed by."""
    known = tomllib.loads((Path(sandbox.__file__).parent / "prices.toml").read_text()).get(name)
    row = partial(DoctorFinding, group="sandbox", name="price class", state="ok")
    if known is None:
        return row(found="unknown", advice="see the provider's page of prices")
    if known["class"] == "own":
        return row(found="own: a machine of yours, which no vendor bills for sandboxes")
    return row(found=f"{known['class']}: {known['billed']}", advice=f"prices: {known['page']}")


@asynccontextmanager
async def _measure_time(found: list[DoctorFinding], name: str) -> AsyncGenerator[None]:
    started = time.monotonic()
    try:
        yield
    except Error as error:
        advice = error.hint or "see docs/sandboxes"
        found.append(DoctorFinding(group="sandbox", name=name, state="bad", found=error.message, advice=advice))
        raise
    took = time.monotonic() - started
    found.append(DoctorFinding(group="sandbox", name=name, state="ok", found=f"{took:.3f} s", seconds=round(took, 3)))
