"""The egress proxy of one sandbox: every connection out of it is asked for here, by a proxy's request or by a name's own address.

    proxy port    CONNECT, and plain requests with a whole URL, as `HTTP_PROXY` makes programs do
    DNS           allowed names are addresses of the sandbox's loopback; a connection there is carried to the name's host

Refusals are reported one by one, up to a number; then they are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, cast

from rollyard.core.egress import EgressRefusal, normal_name
from rollyard.core.errors import Error
from rollyard.core.protocols import ByteStream, Listener
from rollyard.net.egress import dns
from rollyard.net.egress.connection import HEAD_S, Refused, Spoken, answer, carry, check_request
from rollyard.net.egress.decide import Destination, EgressRules, NotAllowed, Resolve
from rollyard.net.egress.http_request import (
    MAX_HEAD,
    PIECE,
    Incoming,
    MalformedRequest,
    RequestHead,
    looks_like_http,
    parse_head,
    split_authority,
)

Tell = Callable[[EgressRefusal], Awaitable[None]]
WATCHER: ContextVar[Tell | None] = ContextVar("egress_watcher", default=None)
"""Called with each refusal of sandboxes that are opened in this context."""

MAX_CONNECTIONS = 256
MAX_NAMES = 64  # with an address of their own at the same time
MAX_TOLD = 500
_FIRST_NAME = 2  # 127.64.0.1 is the proxy's own
_CONNECT_S = 10.0


class Ports(Protocol):
    """Makes listeners at addresses of the sandbox's loopback."""

    async def listen_at(self, address: str, port: int) -> Listener: ...


class EgressProxy:
    """`ports` None: only the proxy's port is served. `resolve` finds the addresses of a name, this machine's way by default."""

    def __init__(
        self, sandbox_id: str, hosts: Sequence[str], *, ports: Ports | None = None, resolve: Resolve | None = None
    ) -> None:
        self._id, self._ports, self._resolve = sandbox_id, ports, resolve
        self._tell = WATCHER.get()
        self._rules = EgressRules(hosts, resolve)
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[asyncio.Task[Any], Destination] = {}
        self._names: OrderedDict[str, tuple[str, list[asyncio.Task[None]]]] = OrderedDict()
        self._given = _FIRST_NAME
        self._placing = asyncio.Lock()
        self._closing: list[Callable[[], None]] = []
        self.refused = 0

    def allow(self, hosts: Sequence[str]) -> None:
        """These hosts from now on; connections to others end."""
        self._rules = EgressRules(hosts, self._resolve)
        for task, where in list(self._open.items()):
            if not self._rules.permits(where.host, where.port):
                task.cancel()

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for close in self._closing:
            close()
        if self.refused > MAX_TOLD:
            await self._say(EgressRefusal(
                sandbox_id=self._id, protocol="tcp", host="", port=None, reason=f"{self.refused - MAX_TOLD} more were refused"
            ))  # fmt: skip

    # -- what is served

    def serve_proxy(self, listener: Listener) -> None:
        self._keep(self._accept(listener, self._answer_proxy_request))

    def serve_dns(self, listener: Listener) -> None:
        self._keep(self._accept(listener, self._answer_questions))

    async def serve_datagrams(self, sock: socket.socket) -> None:
        """Questions to DNS that come one by one. The socket is closed with the proxy."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _Questions(self), sock=sock)
        self._closing.append(transport.close)

    def take_datagram(self, data: bytes, reply: Callable[[bytes], None]) -> None:
        async def work() -> None:
            answered = await self.answer_question(data)
            if answered is not None:
                reply(answered)

        if len(self._tasks) <= MAX_CONNECTIONS and len(data) <= dns.MAX_QUESTION:
            self._keep(work())

    def serve_host(self, listener: Listener, host: str, port: int) -> asyncio.Task[None]:
        """A connection to `listener` means this host and port."""
        return self._keep(self._accept(listener, lambda stream: self._carry_unasked(stream, host, port)))

    async def answer_question(self, question: bytes) -> bytes | None:
        """A question to DNS, as a datagram holds it."""

        async def refuse(name: str, reason: str) -> None:
            await self._note(Refused("dns", name, None, reason))

        return await dns.answer(question, self._allows, self._place, refuse)

    def _allows(self, name: str) -> bool:
        try:
            return self._rules.allows_name(normal_name(name))
        except ValueError:
            return False

    async def _place(self, name: str) -> str | None:
        """The loopback address of a name, with a listener for each of its ports."""
        async with self._placing:
            if name not in self._names and self._ports is not None:
                await self._make_place(name, self._ports)
            if name not in self._names:
                return None
            self._names.move_to_end(name)
            return self._names[name][0]

    async def _make_place(self, name: str, ports: Ports) -> None:
        address = f"127.{64 + (self._given >> 16)}.{self._given >> 8 & 255}.{self._given & 255}"
        self._given = self._given + 1 if self._given < 2**20 else _FIRST_NAME
        serving: list[asyncio.Task[None]] = []
        for port in self._rules.ports(name):
            with contextlib.suppress(Error):  # a server of the sandbox's own has this port at every address
                serving.append(self.serve_host(await ports.listen_at(address, port), name, port))
        if not serving:
            return
        if len(self._names) >= MAX_NAMES:
            for task in self._names.popitem(last=False)[1][1]:
                task.cancel()
        self._names[name] = (address, serving)

    async def _accept(self, listener: Listener, serve: Callable[[ByteStream], Coroutine[Any, Any, None]]) -> None:
        try:
            while True:
                stream = await listener.accept()
                if len(self._tasks) > MAX_CONNECTIONS:
                    await stream.aclose()
                    continue
                self._keep(self._serve(stream, serve))
        except Error:
            pass  # the sandbox is gone
        finally:
            await listener.aclose()

    async def _serve(self, stream: ByteStream, serve: Callable[[ByteStream], Coroutine[Any, Any, None]]) -> None:
        try:
            await serve(stream)
        except Refused as refused:
            await self._note(refused)
        except (OSError, TimeoutError, MalformedRequest):
            pass  # a side left, or kept the other waiting
        finally:
            self._open.pop(self._current(), None)
            await stream.aclose()

    # -- programs that know the proxy

    async def _answer_proxy_request(self, stream: ByteStream) -> None:
        incoming = Incoming(stream)
        head: RequestHead | None = None
        try:
            async with asyncio.timeout(HEAD_S):
                head = parse_head(await incoming.until(b"\r\n\r\n", MAX_HEAD))
            if head.method == "CONNECT":
                await self._tunnel(incoming, *split_authority(head.target, 443))
            else:
                if head.target.startswith("/") or head.target == "*":
                    raise MalformedRequest("not a request for a proxy")
                await self._carry_request(incoming, head)
        except (MalformedRequest, ValueError) as error:
            await answer(stream, 400, str(error))
            raise Refused("http", head.target[:200] if head is not None else "", None, str(error)) from None
        except Refused as refused:
            if refused.protocol in ("connect", "http"):
                await answer(stream, 403, f"{refused.host}:{refused.port}: {refused.reason}")
            raise
        except (OSError, TimeoutError) as error:
            await answer(stream, 502, _say_outage(error))

    async def _tunnel(self, incoming: Incoming, host: str, port: int) -> None:
        where = await self._find("connect", host, port)
        reader, writer = await self._connect(where)
        await incoming.stream.send(b"HTTP/1.1 200 OK\r\n\r\n")
        await carry(incoming, where, reader, writer)

    # -- programs that do not

    async def _carry_unasked(self, stream: ByteStream, host: str, port: int) -> None:
        where = await self._find("tcp", host, port)
        incoming = Incoming(stream)
        try:
            reader, writer = await self._connect(where)
        except (OSError, TimeoutError) as error:
            async with asyncio.timeout(HEAD_S):
                if await incoming.more() and looks_like_http(bytes(incoming.data[:32])):
                    await answer(stream, 502, _say_outage(error))
            return
        await carry(incoming, where, reader, writer)

    async def _answer_questions(self, stream: ByteStream) -> None:
        incoming = Incoming(stream)
        while True:
            async with asyncio.timeout(HEAD_S):
                while len(incoming.data) < 2 or len(incoming.data) < 2 + int.from_bytes(incoming.data[:2]):
                    if not await incoming.more():
                        return
            length = int.from_bytes(incoming.data[:2])
            reply = await self.answer_question(bytes(incoming.data[2 : 2 + length]))
            del incoming.data[: 2 + length]
            if reply is None:
                return
            await stream.send(struct.pack("!H", len(reply)) + reply)

    # -- one connection

    async def _find(self, protocol: Spoken, host: str, port: int) -> Destination:
        try:
            return await self._rules.find(host, port)
        except NotAllowed as error:
            raise Refused(protocol, host[:253], port, str(error)) from None

    async def _connect(self, where: Destination) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._open[self._current()] = where
        async with asyncio.timeout(_CONNECT_S):
            return await asyncio.open_connection(where.address, where.port, limit=PIECE)

    async def _carry_request(self, incoming: Incoming, head: RequestHead) -> None:
        check_request(head)
        where = await self._find("http", *head.authority(80))
        reader, writer = await self._connect(where)
        await carry(incoming, where, reader, writer, head)

    # -- bookkeeping

    def _current(self) -> asyncio.Task[Any]:
        task = asyncio.current_task()
        assert task is not None
        return task

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _note(self, refused: Refused) -> None:
        self.refused += 1
        if self.refused <= MAX_TOLD:
            await self._say(
                EgressRefusal(
                    sandbox_id=self._id,
                    protocol=refused.protocol,
                    host=refused.host[:253],
                    port=refused.port,
                    reason=refused.reason,
                )
            )

    async def _say(self, refusal: EgressRefusal) -> None:
        if self._tell is not None:
            await self._tell(refusal)


def _say_outage(error: OSError | TimeoutError) -> str:
    why = os.strerror(error.errno) if error.errno is not None else "no connection in time"
    return f"the host does not answer ({why})"


class _Questions(asyncio.DatagramProtocol):
    def __init__(self, proxy: EgressProxy) -> None:
        self._proxy = proxy
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        transport = self._transport
        if transport is not None:
            self._proxy.take_datagram(data, lambda reply: transport.sendto(reply, addr))
