"""Calls a second over the number of a gate's processes: `python -m bench.gate --processes 1,2,4,8`.

Several processes make the calls and several are the model server, so that the gate is what is measured: the first line is what
they reach without a gate, and how busy the busiest of either was is shown beside each figure (near 100 % it was the limit, not
the gate). `writer` is how busy the process was that writes to the store for all, and `writer us` its CPU for a call,
checkpoints included. Each count gets a gate and a store of its own; rounds over all counts are repeated, and the best of each
is shown.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from bench.figures import note
from bench.gate import CASES, END, Target, body_of
from bench.load import connect, cpu_s, request, tree

LOADS, SERVERS = 4, 4  # processes that call, and that answer
CONNECTIONS, SESSIONS = 128, 256  # of each process that calls; of the gate
WARM_S = 1.0
SHOWN = {"A": "short chat", "B": "chat stream", "T": "chat, the server thinks"}
EIGHT, EFFICIENT = 8, 0.9  # processes; their calls/s over so many times those of one


class Measured(NamedTuple):
    rate: float
    cpu_ms: float  # of the gate, per call
    cores: float  # that the gate used
    writer: float  # the share of a core that the process used that writes for all
    load: float  # and the busiest one that called
    server: float
    bad: int


class LoadProcess:
    """Makes calls on connections of its own when told to."""

    def __init__(self, order: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "bench.gate_processes"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.tell(order)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


async def call_for(order: dict[str, Any]) -> dict[str, Any]:
    """Closed loops over the order's connections: warm, then counted."""
    case, keys = order["case"], order["keys"]
    path = CASES[case][1]
    callers = [await connect(order["port"]) for _ in range(CONNECTIONS)]
    numbers = iter(range(order["first"], 1_000_000))
    found = {"calls": 0, "bad": 0}

    async def work(index: int, until: float, *, counted: bool) -> None:
        while time.perf_counter() < until:
            nonce = next(numbers)
            answer = await callers[index].ask(request(path, body_of(case, nonce), keys[index % len(keys)]))
            found["calls"] += counted
            good = answer.startswith(b"HTTP/1.1 200") and END in answer[-3000:] and b"%06d" % nonce in answer
            found["bad"] += not good

    async def work_all(seconds: float, *, counted: bool) -> None:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(work(index, until, counted=counted) for index in range(CONNECTIONS)))

    await work_all(WARM_S, counted=False)
    print("{}", flush=True)  # it is warm
    sys.stdin.readline()
    await work_all(order["seconds"], counted=True)
    for caller in callers:
        caller.transport.close()
    return found


async def open_sessions(gate: Target) -> list[str]:
    """Their keys. The gate names them, and so spreads them over its processes."""
    caller = await connect(gate.port)
    keys = []
    for _ in range(SESSIONS):
        answer = await caller.ask(request("/sessions", b'{"max_concurrent": 128}', gate.admin_key))
        keys.append(json.loads(answer.partition(b"\r\n\r\n")[2])["api_key"])
    caller.transport.close()
    return keys


def measure(processes: int, case: str, seconds: float, servers: Sequence[Target]) -> Measured:
    with tempfile.TemporaryDirectory() as scratch:
        command = [str(Path(sys.executable).with_name("rollyard")), "serve", "gate", "--json"]
        command += ["--upstream", f"http://127.0.0.1:{servers[0].port}/v1", "--store", f"{scratch}/calls.db"]
        gate = Target("rollyard", [*command, "--processes", str(processes)], env={"XDG_STATE_HOME": scratch})
        gate.start()
        try:
            return call(gate, uvloop.run(open_sessions(gate)), case, seconds, servers)
        finally:
            gate.stop()


def call(target: Target, keys: list[str], case: str, seconds: float, servers: Sequence[Target]) -> Measured:
    loads: list[LoadProcess] = []
    try:
        order = {"port": target.port, "case": case, "seconds": seconds}
        for index in range(LOADS):
            loads.append(LoadProcess({**order, "keys": keys[index::LOADS], "first": 100_000 + index * 200_000}))
        for load in loads:
            load.hear()
        pids = [target.pid, writer_of(target.pid), *(load.pid for load in loads), *(server.pid for server in servers)]
        before = [cpu_s(pid) for pid in pids]
        began = time.perf_counter()
        for load in loads:
            load.tell({})
        found = [load.hear() for load in loads]
        wall = time.perf_counter() - began
        used = [cpu_s(pid) - at for pid, at in zip(pids, before, strict=True)]
    finally:
        for load in loads:
            load.end()
    calls, bad = (sum(each[name] for each in found) for name in ("calls", "bad"))
    gate, writer, *others = used
    busiest = max(others[:LOADS]) / wall, max(others[LOADS:]) / wall
    return Measured(calls / wall, gate * 1000 / max(1, calls), gate / wall, writer / wall, *busiest, bad)


def writer_of(pid: int | None) -> int | None:
    """The process below a gate's that writes to the store, where one does that alone."""
    found = [one for one in tree(pid) if Path(f"/proc/{one}/comm").read_text() == "rollyard-writer\n"] if pid else []
    return found[0] if found else None


def run(counts: Sequence[int], *, quick: bool) -> int:
    seconds, rounds = (2.0, 1) if quick else (3.0, 2)
    command = [sys.executable, "-m", "bench.model_server"]
    servers = [Target("model server", [*command, "0"])]
    good = True
    try:
        servers[0].start()
        for _ in range(SERVERS - 1):
            servers.append(Target("model server", [*command, str(servers[0].port)]))
            servers[-1].start()
        for case, words in SHOWN.items():
            direct = call(Target("direct", None, servers[0].port), ["none"] * LOADS, case, seconds, servers)
            found: dict[int, list[Measured]] = {count: [] for count in counts}
            for _ in range(rounds):
                for count in counts:
                    found[count].append(measure(count, case, seconds, servers))
            good &= _show(words, {0: direct} | {count: max(each) for count, each in found.items()}, limited=case != "T")
    finally:
        for server in servers:
            server.stop()
    return 0 if good else 1


def _show(words: str, best: dict[int, Measured], *, limited: bool) -> bool:
    """`limited`: by the gate, so that calls a second are its own."""
    heads = ("processes", "calls/s", "CPU ms", "cores", "efficiency", "writer", "writer us", "load", "server")
    print(f"\n{words}\n" + "".join(f"{head:>12}" for head in heads))
    direct = best.pop(0)
    first = min(best)
    efficiency = {count: at.rate / best[first].rate * first / count for count, at in best.items()}
    for count, at in ({0: direct} | best).items():
        shown = f"{efficiency[count]:12.2f}" if limited and count else f"{'':12}"
        bad = f"   BAD {at.bad}" if at.bad else ""
        each = f"{at.writer / at.rate * 1e6:12.1f}" if at.writer else f"{'':12}"
        busy = f"{at.writer:12.0%}{each}{at.load:12.0%}{at.server:12.0%}{bad}"
        print(f"{count or 'direct':>12}{at.rate:12.0f}{at.cpu_ms:12.3f}{at.cores:12.2f}{shown}{busy}", flush=True)
    if limited and len(best) > 1:
        at = EIGHT if EIGHT in best else max(best)
        note(f"{words}: efficiency of {at} processes", efficiency[at], EFFICIENT, "goal")
        if best[at].writer:
            note(f"{words}: us of CPU of the writer of {at} per call", best[at].writer / best[at].rate * 1e6)
    return not any(at.bad for at in best.values())


if __name__ == "__main__":
    print(json.dumps(uvloop.run(call_for(json.loads(sys.stdin.readline())))), flush=True)
