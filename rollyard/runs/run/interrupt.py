"""A run that ends before its time, by a signal or an error: a person reads what is done, what is owed and how to go on.

SIGTERM (a scheduler, a shutdown) and SIGHUP (a terminal that is closed) end a run as Ctrl-C does: agents are ended, sandboxes
removed, attempts given back. SIGHUP is left ignored under `nohup`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from rollyard.core.errors import Error, Interrupted
from rollyard.runs.display.progress import Display
from rollyard.store import Store

T = TypeVar("T")

_NOTHING_DONE = "stopped before any attempt was done"


def run_interruptibly(work: Callable[[], Awaitable[T]], *, display: Display, store: str, resume: str) -> T:
    """`work` to its end. `resume` is the command that goes on with the run `{run}`."""
    ended_by: list[signal.Signals] = []
    try:
        return anyio.run(_run_until_signal, work, ended_by)
    except (KeyboardInterrupt, asyncio.CancelledError):
        message = f"stopped: {_tell_owed(store, display.run_id, resume)}" if display.run_id else _NOTHING_DONE
        raise Interrupted(message, signal_number=ended_by[0] if ended_by else signal.SIGINT) from None
    except Error as error:
        if display.run_id:
            try:
                owed = _tell_owed(store, display.run_id, resume)
            except Error:  # the store is what failed
                owed = _tell_command(display.run_id, resume)
            error.message, error.hint = f"{error}. {owed}", None  # its hint, then the command, which nothing may follow
        raise


async def _run_until_signal(work: Callable[[], Awaitable[T]], ended_by: list[signal.Signals]) -> T:
    """The first signal cancels `work`; later ones do not disturb its clean-up."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def end(number: signal.Signals) -> None:
        if number == signal.SIGHUP:
            _leave(terminals)
        if not ended_by:
            task.cancel()
        ended_by.append(number)

    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for number in numbers:
        loop.add_signal_handler(number, end, number)
    try:
        return await work()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _leave(terminals: list[int]) -> None:
    """Nothing can be written to a terminal that is closed, and clean-up must not fail because of that."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in terminals:
        os.dup2(nowhere, number)
    os.close(nowhere)


def _tell_owed(store: str, run_id: str, resume: str) -> str:
    done, owed = anyio.run(_count, store, run_id)
    words = f"{done} of {done + owed} attempts are done, {owed} are owed"
    return f"{words}. {_tell_command(run_id, resume)}" if owed else words


def _tell_command(run_id: str, resume: str) -> str:
    return f"Go on with:\n  {resume.replace('{run}', run_id)}"


async def _count(store: str, run_id: str) -> tuple[int, int]:
    async with Store.open(store) as kept:
        counts = await kept.progress(run_id)
    done = counts.get("done", 0) + counts.get("failed", 0)
    return done, sum(counts.values()) - done
