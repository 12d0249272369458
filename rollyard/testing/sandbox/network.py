"""The network: none but what the host put there."""

from __future__ import annotations

import asyncio

import anyio

from rollyard.core.errors import Error
from rollyard.core.protocols import Listener, Sandbox
from rollyard.testing.sandbox.fixture import SandboxFixture, out, raises, sh
from rollyard.testing.suite import Skip, case, check

# A client and a server out of what every image with a shell may have: python3, else bash.
PROBE = "command -v python3 >/dev/null && echo python3 || { command -v bash >/dev/null && echo bash; }"
ASK_PYTHON = (
    "python3 -c \"import socket; s = socket.create_connection(('127.0.0.1', {port}), 5); s.sendall(b'ping'); "
    's.shutdown(1); print(s.makefile().read())"'
)
ASK_BASH = "bash -c 'exec 3<>/dev/tcp/127.0.0.1/{port}; printf ping >&3; cat <&3'"
SERVE = (
    "import socket; s = socket.create_server(('127.0.0.1', 8099)); print('up', flush=True); c, _ = s.accept(); "
    "d = c.makefile('rb').read(); c.sendall(b'echo:' + d); c.close()"
)


@case("N1", "has no network but loopback", needs=("network_none",))
async def no_network(fixture: SandboxFixture) -> None:
    async with fixture.open(network="none") as box:
        if (await sh(box, "cat /proc/net/dev")).exit_code != 0:
            raise Skip("/proc/net cannot be read inside, so nothing tells which interfaces there are")
        links = (await out(box, "tail -n +3 /proc/net/dev | cut -d: -f1")).split()
        check(links in ([], ["lo"]), f"interfaces inside: {links}")
        routes = await out(box, "tail -n +2 /proc/net/route")
        check(routes == "", f"routes inside: {routes}")


@case("N2", "cannot reach a server on the host's loopback", needs=("network_none",))
async def no_host_loopback(fixture: SandboxFixture) -> None:
    served: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(b"reached")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, fixture.open(network="none") as box:
        port = server.sockets[0].getsockname()[1]
        done = await sh(box, await _ask(box, port))
        check(done.exit_code != 0 and not served, f"a server on the host's loopback was reached: {done.text}")


@case("N3", "reaches the host through a listener made for it", needs=("listen",))
async def listen(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        listener = await box.listen(0)
        try:
            check(listener.port > 0, f"the listener's port is {listener.port}")
            ask = await _ask(box, listener.port)
            async with anyio.create_task_group() as group:
                group.start_soon(_answer, listener, b"pong from host")
                check(await out(box, ask) == "pong from host", "the answer did not arrive")
                group.cancel_scope.cancel()
        finally:
            await listener.aclose()


@case("N4", "keeps a listener to its own sandbox", needs=("listen", "network_none"))
async def private_listener(fixture: SandboxFixture) -> None:
    async with fixture.open() as one, fixture.open() as two:
        port = 18080 if one.capabilities.dial else 0  # where loopback is shared, so are its ports
        first = await one.listen(port)
        second = await two.listen(port)
        ask, other = await _ask(one, first.port), await _ask(two, second.port)
        said: tuple[str, str] | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(_answer, first, b"first")
            group.start_soon(_answer, second, b"second")
            said = (await out(one, ask), await out(two, other))
            group.cancel_scope.cancel()
        await second.aclose()
        check(said == ("first", "second"), f"two sandboxes on one port heard {said}")
        async with fixture.open() as third:
            check((await sh(third, ask)).exit_code != 0, "a third sandbox reached a listener that is not its own")
        await first.aclose()


@case("N5", "lets the host dial a server inside", needs=("dial",))
async def dial(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        if await out(box, PROBE) != "python3":
            raise Skip("no python3 in this image to serve with")
        job = await box.start(["python3", "-c", SERVE])
        async for _, chunk in job.stream():
            check(chunk.startswith(b"up"), f"the server inside said {chunk!r}")
            break
        stream = await box.dial(8099)
        try:
            await stream.send(b"hello")
            await stream.send_eof()
            said = b""
            while chunk := await stream.receive():
                said += chunk
            check(said == b"echo:hello", f"the server inside answered {said!r}")
        finally:
            await stream.aclose()
        await raises(Error, box.dial(8098), "a port where nothing listens")


@case("N6", "refuses a network it cannot give, before anything is opened")
async def refused_network(fixture: SandboxFixture) -> None:
    if fixture.can.network_allowlist:
        raise Skip("this backend has an allow-list")

    async def attempt() -> None:
        async with fixture.open(network="allowlist", allowed_hosts=("example.org",)):
            pass

    await raises(Error, attempt(), "network='allowlist' on a backend without one")


async def _ask(box: Sandbox, port: int) -> str:
    program = await out(box, PROBE)
    return (ASK_PYTHON if program == "python3" else ASK_BASH).format(port=port)


async def _answer(listener: Listener, answer: bytes) -> None:
    while True:
        stream = await listener.accept()
        said = await stream.receive()
        check(said.startswith(b"p"), f"the host heard {said!r}")
        await stream.send(answer)
        await stream.send_eof()
        await stream.aclose()
