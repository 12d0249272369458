"""Many byte streams and conversations over one descriptor: what the two ends of a virtual machine's serial port speak.

A frame is a stream's number, a kind, a length and that many bytes. Data flows only as far as the receiver gave credit, so a
stream that nobody reads holds up no other. One thread and one poll loop serve everything; no call blocks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

MESSAGE, DATA, END, CREDIT = range(1, 5)
_HEAD = struct.Struct("<IBI")
_CHUNK = 2**16
_WINDOW = 2**18
_MAX_FRAME = 64 * 2**20
Message = dict[str, Any]


class PortStream:
    """One stream: bytes read from `source` go to the other end, bytes that come from there go to `sink`."""

    def __init__(self, number: int, source: int | None, sink: int | None) -> None:
        self.number, self.source, self.sink = number, source, sink
        self.credit = _WINDOW
        self.waiting: deque[memoryview] = deque()
        self.ending = False  # the other end sends no more
        self.left = 0  # how much is still read before `dry` is called
        self.dry: Callable[[], None] | None = None  # called once the source has nothing more right now
        self.flushed: Callable[[], None] | None = None  # called whenever all that came is written


class Streams:
    """`hear(number, message)` gets conversations; a message of None says that the other end has closed that one. `lost` is called
    when the other end of the descriptor is gone."""

    def __init__(self, port: int, hear: Callable[[int, Message | None], None], lost: Callable[[], None]) -> None:
        self._port, self._hear, self._lost = port, hear, lost
        os.set_blocking(port, False)
        self._out: deque[memoryview] = deque()
        self._in = bytearray()
        self._carried: dict[int, PortStream] = {}
        self._poller = select.poll()
        self._watched: dict[int, tuple[int, Callable[[int], None]]] = {}
        self.watch(port, select.POLLIN, self._port_ready)

    # -- the loop

    def watch(self, fd: int, events: int, ready: Callable[[int], None]) -> None:
        """Call `ready` with what happened on `fd`; no events at all end that."""
        if events:
            self._watched[fd] = (events, ready)
            self._poller.register(fd, events)
        elif self._watched.pop(fd, None):
            self._poller.unregister(fd)

    def serve(self) -> NoReturn:
        while True:
            for fd, event in self._poller.poll():
                known = self._watched.get(fd)
                if known is not None:
                    known[1](event)

    # -- frames

    def tell(self, number: int, message: Message) -> None:
        self._send(number, MESSAGE, json.dumps(message).encode())

    def end(self, number: int) -> None:
        """Nothing more comes from here in this conversation."""
        self._send(number, END, b"")

    def _send(self, number: int, kind: int, body: bytes) -> None:
        self._out.append(memoryview(_HEAD.pack(number, kind, len(body)) + body))
        self._write_port()

    def _write_port(self) -> None:
        try:
            while self._out:
                count = os.write(self._port, self._out[0])
                self._out[0] = self._out[0][count:]
                if not self._out[0]:
                    self._out.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._lost()
        self.watch(self._port, select.POLLIN | (select.POLLOUT if self._out else 0), self._port_ready)

    def _port_ready(self, event: int) -> None:
        if event & select.POLLOUT:
            self._write_port()
        if not event & (select.POLLIN | select.POLLHUP | select.POLLERR):
            return
        try:
            data = os.read(self._port, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        self._in += data
        self._parse()

    def _parse(self) -> None:
        at = 0
        while len(self._in) - at >= _HEAD.size:
            number, kind, size = _HEAD.unpack_from(self._in, at)
            if size > _MAX_FRAME:
                self._lost()
                return
            if len(self._in) - at - _HEAD.size < size:
                break
            body = bytes(self._in[at + _HEAD.size : at + _HEAD.size + size])
            at += _HEAD.size + size
            self._take(number, kind, body)
        del self._in[:at]

    def _take(self, number: int, kind: int, body: bytes) -> None:
        stream = self._carried.get(number)
        if kind == MESSAGE:
            self._hear(number, json.loads(body))
        elif stream is None:
            if kind == END:
                self._hear(number, None)
        elif kind == DATA:
            if stream.sink is None:  # its reader is gone: what comes is dropped, and the sender may go on
                self._give(stream, len(body))
                return
            stream.waiting.append(memoryview(body))
            self._write_sink(stream)
            if sum(map(len, stream.waiting)) > _WINDOW:  # the other end sends more than it was allowed to
                self._lost()
        elif kind == END:
            stream.ending = True
            self._write_sink(stream)
        elif kind == CREDIT:
            stream.credit += int.from_bytes(body, "little")
            self._watch_source(stream)
            if stream.dry is not None:  # there may be nothing left to read, and then no event says so
                self._pump(stream)

    # -- byte streams

    def carry(self, number: int, *, source: int | None = None, sink: int | None = None) -> PortStream:
        """Both descriptors belong to the stream from now on; one that reads and writes is given twice, as a copy."""
        stream = self._carried[number] = PortStream(number, source, sink)
        for fd in (source, sink):
            if fd is not None:
                os.set_blocking(fd, False)
        if source is None:
            self._send(number, END, b"")
        self._watch_source(stream)
        return stream

    def drained(self, number: int) -> bool:
        """Whether all that came on this stream is written."""
        stream = self._carried.get(number)
        return stream is None or not stream.waiting

    def drain(self, stream: PortStream, most: int, dry: Callable[[], None]) -> None:
        """Call `dry` once the source has nothing more right now, or `most` bytes of it are sent."""
        stream.left, stream.dry = most, dry
        self._pump(stream)

    def _pump(self, stream: PortStream) -> None:
        """Send what the source has now, as far as there is credit for it."""
        dry = False
        while stream.source is not None and stream.credit > 0:
            try:
                data = os.read(stream.source, min(_CHUNK, stream.credit))
            except BlockingIOError:
                dry = True
                break
            except OSError:
                data = b""
            if not data:
                self._close_source(stream)
                break
            stream.credit -= len(data)
            stream.left -= len(data)
            self._send(stream.number, DATA, data)
        self._watch_source(stream)
        if stream.dry is not None and (dry or stream.source is None or stream.left <= 0):
            done, stream.dry = stream.dry, None
            done()

    def _watch_source(self, stream: PortStream) -> None:
        if stream.source is not None:
            self.watch(stream.source, select.POLLIN if stream.credit > 0 else 0, lambda _: self._pump(stream))

    def _close_source(self, stream: PortStream) -> None:
        if stream.source is None:
            return
        self.watch(stream.source, 0, _ignore)
        os.close(stream.source)
        stream.source = None
        self._send(stream.number, END, b"")
        self._forget_if_done(stream)

    def _write_sink(self, stream: PortStream) -> None:
        sink = stream.sink
        if sink is None:
            if stream.ending:
                self._forget_if_done(stream)
            return
        written = 0
        try:
            while stream.waiting:
                count = os.write(sink, stream.waiting[0])
                written += count
                stream.waiting[0] = stream.waiting[0][count:]
                if not stream.waiting[0]:
                    stream.waiting.popleft()
        except BlockingIOError:
            pass
        except OSError:  # its reader is gone
            written += sum(len(part) for part in stream.waiting)
            stream.waiting.clear()
            self._close_sink(stream)
        if written:
            self._give(stream, written)
        if stream.sink is not None:
            self.watch(sink, select.POLLOUT if stream.waiting else 0, lambda _: self._write_sink(stream))
            if stream.ending and not stream.waiting:
                self._close_sink(stream)
        if not stream.waiting and stream.flushed is not None:
            stream.flushed()

    def _close_sink(self, stream: PortStream) -> None:
        if stream.sink is None:
            return
        self.watch(stream.sink, 0, _ignore)
        if stat.S_ISSOCK(os.fstat(stream.sink).st_mode):  # a copy of it may still be read from
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(stream.sink)) as sock:
                sock.shutdown(socket.SHUT_WR)
        os.close(stream.sink)
        stream.sink = None
        self._forget_if_done(stream)

    def _give(self, stream: PortStream, count: int) -> None:
        self._send(stream.number, CREDIT, count.to_bytes(8, "little"))

    def _forget_if_done(self, stream: PortStream) -> None:
        if stream.source is None and stream.sink is None and stream.ending:
            self._carried.pop(stream.number, None)

    def drop(self, number: int) -> None:
        """Close what is left of a byte stream."""
        stream = self._carried.get(number)
        if stream is not None:
            stream.waiting.clear()
            self._close_source(stream)
            self._close_sink(stream)


def _ignore(_event: int) -> None:
    """For a descriptor that is no longer watched."""
