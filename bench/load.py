"""A client that costs almost nothing: requests are bytes, connections are kept, an answer counts only when it is a 200 and
holds the last word of the reply. Also: what a process and its children used, from /proc."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


class Caller(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.transport = None
        self.waiter: asyncio.Future | None = None
        self.buffer = bytearray()
        self.need = -1
        self.chunked = False

    def connection_made(self, transport) -> None:
        self.transport = transport

    def connection_lost(self, exc) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_exception(ConnectionError("lost"))

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.need < 0:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self.buffer[:end]).lower()
            at = head.find(b"content-length:")
            if at >= 0:
                self.need = end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])
            else:
                self.chunked, self.need = True, 0
        if self.chunked:
            if self.buffer.endswith(b"0\r\n\r\n"):
                self.done()
        elif len(self.buffer) >= self.need:
            self.done()

    def done(self) -> None:
        body, self.buffer, self.need, self.chunked = bytes(self.buffer), bytearray(), -1, False
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(body)

    async def ask(self, request: bytes, timeout: float = 120.0) -> bytes:
        loop = asyncio.get_running_loop()
        if self.transport.is_closing():  # servers close connections that were idle for a while
            self.buffer, self.need, self.chunked = bytearray(), -1, False
            await loop.create_connection(lambda: self, "127.0.0.1", self.port)
        self.waiter = loop.create_future()
        self.transport.write(request)
        return await asyncio.wait_for(self.waiter, timeout)


async def connect(port: int) -> Caller:
    return (await asyncio.get_running_loop().create_connection(lambda: Caller(port), "127.0.0.1", port))[1]


def request(path: str, body: bytes, key: str, method: str = "POST") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


def tree(pid: int) -> list[int]:
    """The process and all below it."""
    found, index = [pid], 0
    while index < len(found):
        try:
            for task in Path(f"/proc/{found[index]}/task").iterdir():
                found += [int(word) for word in (task / "children").read_text().split()]
        except OSError:
            pass
        index += 1
    return found


def cpu_s(pid: int | None) -> float:
    total = 0
    for each in tree(pid) if pid else ():
        try:
            for task in Path(f"/proc/{each}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue
    return total / 1e9


def rss_mb(pid: int) -> float:
    pages = 0
    for each in tree(pid):
        try:
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * PAGE / 2**20


class Window:
    """What happened while it was open."""

    def __init__(self, pid: int | None) -> None:
        self.pid = pid
        self.times: list[float] = []
        self.bad = 0

    def __enter__(self) -> Window:
        self.cpu = cpu_s(self.pid)
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self.wall = time.perf_counter() - self.start
        self.cpu = cpu_s(self.pid) - self.cpu

    @property
    def cpu_ms(self) -> float:
        return self.cpu * 1000 / max(1, len(self.times))

    def quantile(self, q: float) -> float:
        ordered = sorted(self.times)
        return ordered[min(len(ordered) - 1, int(len(ordered) * q))] * 1000 if ordered else float("nan")
