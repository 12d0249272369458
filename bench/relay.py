"""What it costs a program in a sandbox without a network to reach the host, by each way, beside a server in the sandbox itself.

    python -m bench.relay [--engine docker] [--calls 300] [--rounds 5]

A client inside sends 1 kB and waits for 1 kB back, on a connection that stays open and on a new one each time. `added` is the
median over that of a server beside the client, on the same loopback, in the same run. Rounds of both take turns and of each the
least disturbed counts, since a busy machine only ever adds; every hop between processes waits for a processor, which the tenth
percentile shows less of. The budgets are for the medians of open connections, which agents keep.

    (a) local     a listener made in the sandbox                                0.3 ms
    (b) netns     the same through a container's network namespace              1 ms
        socket    a unix socket bound into a container                          1 ms
    (c) pipe      a program's stdin and stdout, here two pipes of this machine  5 ms
        exec      the same over an engine's exec                                5 ms
        e2b       the same over one program of the E2B SDK, on this project's own server; no budget, since each frame costs a
                  request of the SDK
    (d) files     a pair of files and long polls, here with programs of this machine; no budget, since each call of a
                  provider costs its own round trip: what is shown is two programs a message

The engine's part needs root and the engine's programs, e2b its SDK; each says so and is left out where they are missing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import uvicorn

import rollyard as ry
import rollyard.inside as package
from bench.figures import note
from rollyard.core.sandbox import Exit
from rollyard.plane.compat.e2b import e2b_app
from rollyard.plane.parts import ephemeral_plane
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.sandbox.relay import HostRelay
from rollyard.sandbox.relay.filepair import HostFilePair
from tests.servers.engines import lacking, running

BUDGET_MS = {
    "local": 0.3,
    "netns": 1.0,
    "socket": 1.0,
    "pipe": 5.0,
    "pipe, lines": 5.0,
    "exec": 5.0,
    "e2b": None,
    "files": None,
}
SERVER = """
import asyncio
async def echo(reader, writer):
    try:
        while True:
            writer.write(await reader.readexactly(1024)); await writer.drain()
    except asyncio.IncompleteReadError:
        writer.close()
async def main():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
CLIENT = """
import json, socket, statistics, sys, time
port, calls, data = int(sys.argv[1]), int(sys.argv[2]), b"x" * 1024
def call(s):
    s.sendall(data)
    got = 0
    while got < 1024: got += len(s.recv(65536))
def connect():
    s = socket.create_connection(("127.0.0.1", port), 10)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s
fresh, kept, open_one = [], [], connect()
for n in range(calls):
    at = time.perf_counter(); s = connect(); call(s); s.close(); fresh.append(time.perf_counter() - at)
    at = time.perf_counter(); call(open_one); kept.append(time.perf_counter() - at)
quiet = sorted(kept)[len(kept) // 10]
print(json.dumps([at * 1000 for at in (statistics.median(fresh), statistics.median(kept), quiet)]))
"""
# Port, calls -> ms: median of a new connection, of an open one, its p10
Client = Callable[[int, int], Awaitable[list[float]]]


class Place(NamedTuple):
    """Where a client runs, the port of a server beside it, and the listener through which it reaches the host."""

    client: Client
    beside: int
    listener: object


async def serve(listener) -> None:
    async def echo(stream) -> None:
        left = b""
        while data := await stream.receive():
            left += data
            while len(left) >= 1024:
                await stream.send(left[:1024])
                left = left[1024:]
        await stream.aclose()

    tasks = set()
    while True:
        task = asyncio.ensure_future(echo(await listener.accept()))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


@contextlib.asynccontextmanager
async def in_sandbox(backend) -> AsyncGenerator[Place]:
    async def client(port: int, calls: int) -> list[float]:
        return json.loads((await box.exec(["python3", "-c", CLIENT, str(port), str(calls)], timeout=120)).stdout)

    async with backend, backend.open(ry.SandboxSpec()) as box:
        server = await box.start(["python3", "-c", SERVER])
        _, said = await anext(aiter(server.stream()))
        yield Place(client, int(said), await box.listen(0))


@contextlib.asynccontextmanager
async def over_e2b(root: Path) -> AsyncGenerator[Place]:
    """The e2b backend through the real SDK, on a server of this process whose sandboxes are local ones."""
    sock = socket.socket(proto=socket.IPPROTO_TCP)  # named, since asyncio turns Nagle's delays off only where it is
    sock.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with LocalBackend(root=root) as local, ephemeral_plane(local) as plane:
        app = e2b_app(plane, anonymous=True)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        running = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            async with in_sandbox(ry.sandbox.backend("e2b", key="bench", url=url, isolation="namespace")) as place:
                yield place
        finally:
            server.should_exit = True
            await running


@contextlib.asynccontextmanager
async def program(*argv: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def over_pipe(*mode: str) -> AsyncGenerator[Place]:
    async def client(port: int, calls: int) -> list[float]:
        async with program("-c", CLIENT, str(port), str(calls)) as asking:
            return json.loads((await asyncio.wait_for(asking.communicate(), 120))[0])

    inside = str(Path(package.__file__).with_name("relay.py"))
    async with program("-c", SERVER) as server, program(inside, *mode) as process:

        async def output():
            while data := await process.stdout.read(65536):
                yield data

        async def write(data: bytes) -> None:
            process.stdin.write(data)
            await process.stdin.drain()

        async with HostRelay(output(), write, lines="lines" in mode) as relay:
            yield Place(client, int(await server.stdout.readline()), await relay.listen())


@contextlib.asynccontextmanager
async def over_files() -> AsyncGenerator[Place]:
    """Scripts run on this machine, as a provider would run them in a sandbox."""

    async def say(script: str, *args: str, timeout: float) -> Exit:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", script, "bench", *args, stdout=pipe, stderr=pipe
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout)
        return Exit(exit_code=process.returncode, stdout=out, stderr=err)

    async def put(path: str, data: bytes) -> None:
        Path(path).write_bytes(data)

    async def client(port: int, calls: int) -> list[float]:
        async with program("-c", CLIENT, str(port), str(calls)) as asking:
            return json.loads((await asyncio.wait_for(asking.communicate(), 120))[0])

    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as root:
        pair = HostFilePair(say, put, f"{root}/relay")
        await pair.start([sys.executable, str(Path(package.__file__).with_name("relay.py"))])
        async with program("-c", SERVER) as server, HostRelay(pair.output(), pair.write) as relay:
            yield Place(client, int(await server.stdout.readline()), await relay.listen())
        await pair.aclose()


async def measure(what: str, place: contextlib.AbstractAsyncContextManager[Place], calls: int, rounds: int) -> bool:
    async with place as found:
        serving = asyncio.ensure_future(serve(found.listener))
        pairs = []
        for _ in range(rounds):
            base = await found.client(found.beside, calls)
            pairs.append((base, await found.client(found.listener.port, calls)))
        serving.cancel()
    fresh, kept, quiet = (
        min(through[at] for _, through in pairs) - min(base[at] for base, _ in pairs) for at in range(3)
    )
    budget = BUDGET_MS[what.partition(" ")[2]]
    print(f"{what:18} tenth percentile {quiet:6.3f} ms; new connection: added {fresh:6.3f} ms", flush=True)
    return note(f"ms added to an open connection, {what}", kept, budget)


async def measure_all(engine: str, host: str | None, calls: int, rounds: int) -> bool:
    good = True
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as root:
        good &= await measure("(a) local", in_sandbox(LocalBackend(root=Path(root))), calls, rounds)
    for route in ("netns", "socket", "exec") if host is not None else ():
        letter = "(c)" if route == "exec" else "(b)"
        good &= await measure(
            f"{letter} {route}", in_sandbox(ry.sandbox.backend(engine, host=host, route=route)), calls, rounds
        )
    good &= await measure("(c) pipe", over_pipe(), calls, rounds)
    good &= await measure("(c) pipe, lines", over_pipe("lines"), calls, rounds)
    if importlib.util.find_spec("e2b") is None:
        print("without e2b: its SDK is not installed")
    else:
        with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as root:
            good &= await measure("(c) e2b", over_e2b(Path(root)), min(calls, 100), rounds)
    good &= await measure("(d) files", over_files(), min(calls, 50), rounds)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="docker")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if why := lacking(args.engine):
        print(f"without an engine: {why}")
        return 0 if asyncio.run(measure_all(args.engine, None, args.calls, args.rounds)) else 1
    with running(args.engine) as host:
        return 0 if asyncio.run(measure_all(args.engine, host, args.calls, args.rounds)) else 1


if __name__ == "__main__":
    sys.exit(main())
