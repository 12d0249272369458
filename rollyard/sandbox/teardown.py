"""Deleting many sandboxes: in batches, also when there is no event loop any more, and never without saying what is left.

`delete_all` is for a running loop. `Owned` knows the sandboxes that are to die with this process: what its backend did not close
(a crash, a second Ctrl-C, a loop that was dropped) is deleted when the interpreter exits, by plain blocking calls. Nothing runs
after a SIGKILL: for that a sandbox has an end time of its own, and labels that `reap` finds it by.

At exit two things are unlike any other time: Python 3.12 and later start no thread there, and a forked child that exits has the
parent's list. So threads are used where they can be, and a child leaves the list alone.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rollyard.core.errors import SandboxError
from rollyard.core.log import Log
from rollyard.core.sandbox import SandboxInfo

T = TypeVar("T")
BATCH = 100
AT_ONCE = 8
EXIT_S = 60.0
DeleteBatch = Callable[[Sequence[str], float], Sequence[str]]  # ids and seconds -> the ids that may still be there


def batches(things: Sequence[T], size: int = BATCH) -> Iterator[Sequence[T]]:
    for at in range(0, len(things), size):
        yield things[at : at + size]


async def delete_all(ids: Sequence[str], delete: Callable[[str], Awaitable[object]]) -> dict[str, Exception]:
    """Delete each, a batch at a time; one that fails keeps no other from being tried. Returns those that may still be
    there, each with its reason."""
    left: dict[str, Exception] = {}
    for batch in batches(ids):
        results = await asyncio.gather(*(delete(one) for one in batch), return_exceptions=True)
        for one, result in zip(batch, results, strict=True):
            if isinstance(result, Exception):
                left[one] = result
            elif isinstance(result, BaseException):
                raise result
    return left


def to_reap(listed: Iterable[SandboxInfo], labels: Mapping[str, str] | None, older_than: float | None) -> list[str]:
    """Of sandboxes with these labels, the ids of those to reap: with labels or an age, all that they describe; else those
    past their end."""
    named, now = labels is not None or older_than is not None, time.time()
    return [
        info.id
        for info in listed
        if (named and now - info.created_at >= (older_than or 0.0))
        or (info.expires_at is not None and info.expires_at < now)
    ]


def not_deleted(left: Mapping[str, Exception]) -> SandboxError:
    reason = next(iter(left.values()))
    return SandboxError(f"{len(left)} sandboxes could not be deleted: {', '.join(left)}", hint=f"the first: {reason}")


def one_by_one(delete: Callable[[str, float], bool]) -> DeleteBatch:
    """For providers that delete one at a time. `delete(id, seconds)` says whether the sandbox is gone, and raises nothing."""

    def kill_each(ids: Sequence[str], seconds: float) -> list[str]:
        deadline = time.monotonic() + seconds

        def work(one: str) -> bool:
            rest = deadline - time.monotonic()
            return rest > 0 and delete(one, rest)

        return [one for one, gone in zip(ids, _map(work, ids), strict=True) if not gone]

    return kill_each


def _map(work: Callable[[str], bool], ids: Sequence[str]) -> list[bool]:
    if len(ids) > 1:
        try:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                return list(pool.map(work, ids))
        except RuntimeError:  # the interpreter is on its way out and starts no thread
            pass
    return [work(one) for one in ids]


class Owned:
    """Sandboxes of one backend object that are to die with this process. `delete` must need neither loop nor thread."""

    def __init__(self, backend: str, delete: DeleteBatch) -> None:
        self._backend, self._delete = backend, delete
        self._ids: dict[str, None] = {}
        self._process = os.getpid()
        self._log = Log("rollyard.sandbox")

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._ids))

    def __contains__(self, sandbox_id: str) -> bool:
        return sandbox_id in self._ids

    def add(self, sandbox_id: str) -> None:
        if not self._ids:
            self._process = os.getpid()
            atexit.register(self._at_exit)
        self._ids[sandbox_id] = None

    def discard(self, sandbox_id: str) -> None:
        self._ids.pop(sandbox_id, None)
        if not self._ids:
            atexit.unregister(self._at_exit)

    def delete_now(self, timeout: float = 120.0) -> list[str]:
        """Delete them all without a loop; returns the ids of those that may still be there."""
        deadline, left = time.monotonic() + timeout, list[str]()
        for batch in batches(list(self._ids)):
            kept = self._delete(batch, max(0.0, deadline - time.monotonic()))
            left += kept
            for gone in set(batch) - set(kept):
                self.discard(gone)
        return left

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return
        try:
            self.delete_now(EXIT_S)
        finally:
            if self._ids:
                self._log.warning(
                    "sandboxes.left_behind",
                    backend=self._backend,
                    sandboxes=list(self._ids),
                    hint=f"they end at their ttl; rollyard clean --backend {self._backend} --run ID ends a run's at once",
                )
