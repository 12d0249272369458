"""The relay's host end: many connections over one pipe.

`HostRelay` reads frames from the program in the sandbox and gives each connection a stream with its own credit. When it ends,
every stream and every waiting call ends with the program's own last words, so a dead relay is an error with a log, not a hang.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

from rollyard.core.errors import GateUnreachable, SandboxError, SandboxGone
from rollyard.sandbox.relay import protocol
from rollyard.sandbox.relay.protocol import CHUNK, CREDIT, Frame, FrameReader, Garbled, pack

READY_S = 15.0
CALL_S = 15.0


class RelayStream:
    """One connection. `receive` gives b"" at the end; what the peer may send is bounded by what was received here."""

    def __init__(self, relay: HostRelay, stream: int) -> None:
        self._relay, self._id = relay, stream
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self._left = b""
        self._credit = CREDIT
        self._more = asyncio.Event()
        self._eof = self._ended = False
        self._broken: str | None = None

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if not self._left:
            if self._eof and self._chunks.empty():
                return b""
            self._left = await self._chunks.get()
            if not self._left:
                return b""
            await self._relay.send(protocol.WINDOW, self._id, str(len(self._left)).encode())
        data, self._left = self._left[:max_bytes], self._left[max_bytes:]
        return data

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            while self._credit <= 0 and self._broken is None:
                self._more.clear()
                await self._more.wait()
            if self._broken is not None or self._ended:
                raise BrokenPipeError(self._broken or "this side has ended")
            part = bytes(view[: min(CHUNK, self._credit)])
            self._credit -= len(part)
            await self._relay.send(protocol.PAYLOAD, self._id, part)
            view = view[len(part) :]

    async def send_eof(self) -> None:
        if not self._ended and self._broken is None:
            self._ended = True
            await self._relay.send(protocol.END, self._id)

    async def aclose(self) -> None:
        if self._broken is None:
            self.take(protocol.CLOSED, b"closed here")
            await self._relay.send(protocol.CLOSED, self._id)
        self._relay.forget(self._id)

    def take(self, kind: bytes, payload: bytes) -> None:
        if kind == protocol.PAYLOAD:
            self._chunks.put_nowait(payload)
        elif kind == protocol.WINDOW:
            self._credit += int(payload)
            self._more.set()
        elif kind in (protocol.END, protocol.CLOSED):
            self._eof = True
            self._chunks.put_nowait(b"")
            if kind == protocol.CLOSED:
                self._broken = payload.decode("utf-8", "replace") or "closed by the peer"
                self._more.set()


class RelayListener:
    """Connections that programs in the sandbox make to 127.0.0.1:`port`."""

    def __init__(self, relay: HostRelay, number: int) -> None:
        self._relay, self._id = relay, number
        self.port = 0
        self._accepted: asyncio.Queue[RelayStream | None] = asyncio.Queue()

    @property
    def sock(self) -> None:
        return None

    async def accept(self) -> RelayStream:
        stream = await self._accepted.get()
        if stream is None:
            self._accepted.put_nowait(None)
            raise SandboxGone("the relay in the sandbox has ended", hint=self._relay.last_words())
        return stream

    def put(self, stream: RelayStream | None) -> None:
        self._accepted.put_nowait(stream)

    async def aclose(self) -> None:
        self._relay.forget(self._id)


class HostRelay:
    """`output` yields the program's stdout, `write` feeds its stdin, `log` gives its stderr's tail."""

    def __init__(
        self,
        output: AsyncIterator[bytes],
        write: Callable[[bytes], Awaitable[None]],
        *,
        lines: bool = False,
        log: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        self._output, self._write, self._lines, self._log = output, write, lines, log
        self._streams: dict[int, RelayStream] = {}
        self._listeners: dict[int, RelayListener] = {}
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._next = 1
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lock = asyncio.Lock()
        self._pump: asyncio.Task[None] | None = None
        self._refusals: set[asyncio.Task[None]] = set()
        self._words = ""
        self.ended = False

    async def __aenter__(self) -> Self:
        self._pump = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(READY_S):
                await asyncio.shield(self._ready)
        except TimeoutError as error:
            await self.aclose()
            raise GateUnreachable(f"the relay was not ready in {READY_S:g} s: {self.last_words()}") from error
        except BaseException:  # cancelled too: the relay's job must not stay
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        for task in [self._pump, *self._refusals]:
            if task is not None:
                task.cancel()
                await asyncio.wait([task], timeout=5)
        self._end("the relay was closed")

    def last_words(self) -> str:
        return self._words or "it said nothing"

    async def listen(self, port: int = 0) -> RelayListener:
        number = self._next
        # Before it is bound: a connection may come at once
        listener = self._listeners[number] = RelayListener(self, number)
        try:
            listener.port = int(await self._call(protocol.LISTEN, port))
        except BaseException:  # cancelled too: this number is not asked for again
            self.forget(number)
            raise
        return listener

    async def dial(self, port: int) -> RelayStream:
        number = self._next
        stream = self._streams[number] = RelayStream(self, number)
        try:
            await self._call(protocol.DIAL, port)
        except BaseException:  # cancelled too: this number is not asked for again
            self.forget(number)
            raise
        return stream

    async def _call(self, kind: bytes, port: int) -> bytes:
        number, self._next = self._next, self._next + 1
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(CALL_S):
                await self.send(kind, number, str(port).encode())
                return await future
        finally:
            self._waiting.pop(number, None)

    async def send(self, kind: bytes, stream: int, payload: bytes = b"") -> None:
        frame = pack(kind, stream, payload, lines=self._lines)
        async with self._lock:
            await self._write(frame)

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)
        self._listeners.pop(number, None)

    async def _run(self) -> None:
        reader = FrameReader(lines=self._lines)
        why = "its output ended"
        try:
            async for data in self._output:
                for frame in reader.feed(data):
                    self._take(frame)
        except (Garbled, SandboxError, OSError) as error:
            why = str(error)
        if self._log is not None:
            tail = (await self._log()).decode("utf-8", "replace").strip()
            why = f"{why}; its log ends: {tail[-500:]}" if tail else why
        self._end(why)

    def _take(self, frame: Frame) -> None:
        kind, number, payload = frame
        if kind == protocol.HELLO:
            if not self._ready.done():
                self._ready.set_result(None)
        elif kind == protocol.OPEN and payload:
            listener = self._listeners.get(int(payload))
            if listener is None:  # it was closed here, and the program inside still accepts for it
                self._refuse(number)
            else:
                stream = self._streams[number] = RelayStream(self, number)
                listener.put(stream)
        elif number in self._waiting and not self._waiting[number].done():
            future = self._waiting[number]
            if kind in (protocol.BOUND, protocol.OPEN):
                future.set_result(payload)
            else:
                future.set_exception(ConnectionRefusedError(payload.decode("utf-8", "replace")))
        elif (stream := self._streams.get(number)) is not None:
            stream.take(kind, payload)
            if kind == protocol.CLOSED:
                self._streams.pop(number, None)

    def _refuse(self, number: int) -> None:
        """End a connection that has no taker here."""
        task = asyncio.create_task(self.send(protocol.CLOSED, number))
        self._refusals.add(task)
        task.add_done_callback(self._refusals.discard)

    def _end(self, why: str) -> None:
        self._words = self._words or why
        self.ended = True
        error = GateUnreachable(f"the relay ended before it was ready: {self._words}")
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # it may have no reader any more
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxGone(f"the relay ended: {self._words}"))
        for stream in self._streams.values():
            stream.take(protocol.CLOSED, self._words.encode())
        for listener in self._listeners.values():
            listener.put(None)
        self._streams.clear()
        self._listeners.clear()
