"""What a process that does not write to its SQLite file itself has instead: a link to the one that does (`writer_process.py`).

Batches go there as they were gathered and are answered in their order, once their transaction would survive SIGKILL. The
other process may die at any moment. A work that it had not answered may be kept or not: one that has `repeat` is sent to the
process that comes in its place, where it finds out, and its caller waits; any other fails with a `StoreError`.

The link is a pair of sockets of which one end is sent to an inbox. What starts the processes keeps that inbox, so that a link
waits there while no process writes.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rollyard.core.errors import Error, StoreError
from rollyard.store.batches import DEADLINE_S, Batch, WaitingWork
from rollyard.store.database import Work, prepare

AGAIN_S = 0.01  # between two attempts to reach an inbox that is full
LABEL = b"writes"
_LENGTH = struct.Struct("<Q")


class Frames(asyncio.Protocol):
    """Pickled values with their length before them. Only processes that one program started are at its ends."""

    def __init__(self, take: Callable[[Any], None], lost: Callable[[Frames], None]) -> None:
        self._take, self._lost = take, lost
        self._read = bytearray()

    def data_received(self, data: bytes) -> None:
        self._read += data
        for value in self._complete():
            self._take(value)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(self)

    def _complete(self) -> Iterator[Any]:
        while len(self._read) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._read)[0]
            if len(self._read) < end:
                return
            packed = bytes(memoryview(self._read)[_LENGTH.size : end])
            del self._read[:end]
            yield pickle.loads(packed)  # noqa: S301 - of our own processes


def frame(value: Any) -> bytes:
    packed = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(packed)) + packed


class WriterLink:
    """The link of one event loop; `inbox` is the end that leads to the writing process."""

    def __init__(self, inbox: socket.socket, where: str) -> None:
        self.set_up: Work[Any] | None = None
        self._inbox, self._where = inbox, where
        self._transport: asyncio.WriteTransport | None = None
        self._frames: Frames | None = None  # what comes on it
        self._connecting: asyncio.Task[None] | None = None
        self._unanswered: deque[Batch] = deque()
        self._preparing: set[asyncio.Task[None]] = set()

    def take(self, batch: Batch) -> None:
        if any(getattr(waiting.work, "large", False) for waiting in batch.works):
            task = asyncio.get_running_loop().create_task(self._take_later(batch))
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)
        else:
            self._send(batch)

    async def _take_later(self, batch: Batch) -> None:
        """Others may go first: each caller waits for its own alone."""
        await asyncio.to_thread(prepare, [waiting.work for waiting in batch.works])
        self._send(batch)

    def _send(self, batch: Batch) -> None:
        packed = _pack(batch)
        if not batch.works:
            batch.resolve([])
            return
        self._unanswered.append(batch)
        if self._transport is not None:
            self._transport.write(packed)
        else:
            self._connect()

    async def aclose(self) -> None:
        if self._preparing:
            await asyncio.wait(self._preparing)
        waiting = [waiting.future for batch in self._unanswered for waiting in batch.works]
        if waiting:
            await asyncio.wait(waiting, timeout=DEADLINE_S)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.close()

    def _connect(self) -> None:
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._transport is None:
                ours = await self._send_end()
                transport, frames = await loop.create_unix_connection(
                    lambda: Frames(self._answer, self._lose), sock=ours
                )
                if not transport.is_closing():  # else the other process died meanwhile
                    self._transport, self._frames = transport, frames
        except OSError as error:
            failed = StoreError(f"the process that writes to the store {self._where} cannot be reached: {error}")
            while self._unanswered:
                batch = self._unanswered.popleft()
                batch.resolve([failed] * len(batch.works))
            return
        finally:
            self._connecting = None
        for batch in self._unanswered:
            self._transport.write(_pack(batch))

    async def _send_end(self) -> socket.socket:
        """This process's end of a new pair; the other waits in the inbox."""
        while True:
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._inbox, [LABEL], [theirs.fileno()])
                    return ours
                except BlockingIOError:
                    ours.close()
                except OSError:
                    ours.close()
                    raise
            await asyncio.sleep(AGAIN_S)

    def _answer(self, results: Sequence[Any]) -> None:
        self.set_up = None  # the other process makes the tables before it writes anything
        self._unanswered.popleft().resolve(results)

    def _lose(self, frames: Frames) -> None:
        if frames is not self._frames:
            return  # nothing was sent on it
        self._transport = self._frames = None
        lost, self._unanswered = self._unanswered, deque()
        for batch in lost:
            batch.works = list(self._repeat(batch.works))
            if batch.works:
                self._unanswered.append(batch)
            else:
                batch.resolve([])
        if self._unanswered:
            self._connect()

    def _repeat(self, works: Sequence[WaitingWork]) -> Iterator[WaitingWork]:
        """The works that may be sent once more; the others fail."""
        died = f"the process that writes to the store {self._where} died: whether this was written is not known"
        for work, future in works:
            if future.done():
                continue
            if (repeat := getattr(work, "repeat", None)) is not None:
                yield WaitingWork(repeat(), future)
            else:
                future.set_exception(StoreError(died))


def _pack(batch: Batch) -> bytes:
    """A work that cannot be encoded fails alone."""
    try:
        return frame([waiting.work for waiting in batch.works])
    except Exception:  # noqa: BLE001 - found out below whose it is
        results = [_try(waiting.work) for waiting in batch.works]
    for waiting, failed in zip(batch.works, results, strict=True):
        if failed is not None and not waiting.future.done():
            waiting.future.set_exception(failed)
    batch.works = [waiting for waiting, failed in zip(batch.works, results, strict=True) if failed is None]
    return frame([waiting.work for waiting in batch.works])


def _try(work: Work[Any]) -> Error | None:
    try:
        pickle.dumps(work)
    except Error as error:
        return error
    except Exception as error:  # noqa: BLE001 - handed to its caller
        failed = StoreError(f"{type(error).__name__}: {error}")
        failed.__cause__ = error
        return failed
    return None
