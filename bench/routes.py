"""What it costs to reach the host from a container without a network, by each route, beside a server in the container itself.

    python -m bench.routes [--engine docker] [--calls 300]

A client inside sends 1 kB and waits for 1 kB back: on a connection of its own each time, and on one that stays open. `added`
is the median over that of a server inside the same container, on the same loopback, in the same run. Needs root and the
engine's programs; says so and ends well where they are missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import rollyard as ry
from rollyard.testing.engines import lacking, running

BUDGET_MS = {"netns": 0.3, "socket": 1.0, "exec": 5.0}
SERVER = """
import asyncio
async def echo(reader, writer):
    try:
        while True:
            writer.write(await reader.readexactly(1024)); await writer.drain()
    except asyncio.IncompleteReadError:
        writer.close()
async def main():
    server = await asyncio.start_server(echo, "127.0.0.1", 7000)
    print("up", flush=True)
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
print(json.dumps([statistics.median(fresh) * 1000, statistics.median(kept) * 1000]))
"""


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


async def measure(box, port: int, calls: int) -> list[float]:
    done = await box.exec(["python3", "-c", CLIENT, str(port), str(calls)], timeout=120)
    return json.loads(done.stdout)


async def one(kind: str, host: str, route: str, calls: int) -> bool:
    async with ry.sandbox.backend(kind, host=host, route=route) as backend, backend.open(ry.SandboxSpec()) as box:
        inside = await box.start(["python3", "-c", SERVER])
        async for _ in inside.stream():
            break
        base = await measure(box, 7000, calls)
        listener = await box.listen(0)
        serving = asyncio.ensure_future(serve(listener))
        through = await measure(box, listener.port, calls)
        serving.cancel()
    added = [through[0] - base[0], through[1] - base[1]]
    good = added[1] <= BUDGET_MS[route]
    print(
        f"{kind:7} {route:7} new connection {through[0]:.2f} ms (added {added[0]:+.2f}), open {through[1]:.2f} ms "
        f"(added {added[1]:+.2f}, budget {BUDGET_MS[route]}) {'ok' if good else 'OVER'}",
        flush=True,
    )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="docker")
    parser.add_argument("--calls", type=int, default=300)
    asked = parser.parse_args()
    if why := lacking(asked.engine):
        print(f"skipped: {why}")
        return 0
    with running(asked.engine) as host:
        return 0 if all([asyncio.run(one(asked.engine, host, route, asked.calls)) for route in BUDGET_MS]) else 1


if __name__ == "__main__":
    sys.exit(main())
