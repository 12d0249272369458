"""Ctrl-C during a run: what is in flight is ended, and a person reads what is done, what is owed and how to go on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from rollyard.core.errors import Interrupted
from rollyard.runs.display.progress import Display
from rollyard.store import Store

T = TypeVar("T")


def run_interruptibly(work: Callable[[], Awaitable[T]], *, display: Display, store: str, resume: str) -> T:
    """`work` to its end. `resume` is the command that goes on with the run `{run}`."""
    try:
        return anyio.run(work)
    except KeyboardInterrupt:
        if not display.run_id:
            raise Interrupted("stopped before any attempt was done") from None
        done, owed = anyio.run(_count, store, display.run_id)
        words = f"stopped: {done} of {done + owed} attempts are done, {owed} are owed"
        command = resume.replace("{run}", display.run_id)
        raise Interrupted(f"{words}. Go on with:\n  {command}" if owed else words) from None


async def _count(store: str, run_id: str) -> tuple[int, int]:
    async with Store.open(store) as kept:
        counts = await kept.progress(run_id)
    done = counts.get("done", 0) + counts.get("failed", 0)
    return done, sum(counts.values()) - done
