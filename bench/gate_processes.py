"""Calls a second over the number of a gate's processes: `python -m bench.gate --processes 1,2,4,8`.

Several processes make the calls and several are the model server, so that the gate is what is measured; how busy the busiest
of either was is shown beside it (near 100 % it was the limit, not the gate). Each count gets a gate and a store of its own;
rounds over all counts are repeated, and the best of each is shown.
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
from bench.load import connect, cpu_s, request

LOADS, SERVERS = 4, 4  # processes that call, and that answer
CONNECTIONS, SESSIONS = 64, 128  # of each process that calls; of the gate
WARM_S = 1.0
SHOWN = {"A": "short chat", "B": "chat stream", "T": "chat, the server thinks"}
EFFICIENT = 0.8  # calls/s of n processes over n times those of one


class Measured(NamedTuple):
    rate: float
    cpu_ms: float  # of the gate, per call
    cores: float  # that the gate used
    load: float  # the share of a core that the busiest calling process used
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
        loads: list[LoadProcess] = []
        try:
            keys = uvloop.run(open_sessions(gate))
            order = {"port": gate.port, "case": case, "seconds": seconds}
            for index in range(LOADS):
                loads.append(LoadProcess({**order, "keys": keys[index::LOADS], "first": 100_000 + index * 200_000}))
            for load in loads:
                load.hear()
            pids = [gate.pid, *(load.pid for load in loads), *(server.pid for server in servers)]
            before = [cpu_s(pid) for pid in pids if pid is not None]
            began = time.perf_counter()
            for load in loads:
                load.tell({})
            found = [load.hear() for load in loads]
            wall = time.perf_counter() - began
            used = [cpu_s(pid) - at for pid, at in zip([pid for pid in pids if pid], before, strict=True)]
        finally:
            for load in loads:
                load.end()
            gate.stop()
    calls = max(1, sum(each["calls"] for each in found))
    busiest = max(used[1 : 1 + LOADS]) / wall, max(used[1 + LOADS :]) / wall
    return Measured(calls / wall, used[0] * 1000 / calls, used[0] / wall, *busiest, sum(each["bad"] for each in found))


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
            found: dict[int, list[Measured]] = {count: [] for count in counts}
            for _ in range(rounds):
                for count in counts:
                    found[count].append(measure(count, case, seconds, servers))
            good &= _show(words, {count: max(each) for count, each in found.items()}, limited=case != "T")
    finally:
        for server in servers:
            server.stop()
    return 0 if good else 1


def _show(words: str, best: dict[int, Measured], *, limited: bool) -> bool:
    """`limited`: by the gate, so that calls a second are its own."""
    print(
        f"\n{words}\n{'processes':>9}{'calls/s':>10}{'CPU ms':>9}{'cores':>8}{'efficiency':>12}{'load':>8}{'server':>8}"
    )
    first = min(best)
    efficiency = {count: at.rate / best[first].rate * first / count for count, at in best.items()}
    for count, at in best.items():
        shown = f"{efficiency[count]:12.2f}" if limited else f"{'':12}"
        bad = f"   BAD {at.bad}" if at.bad else ""
        busy = f"{at.load:8.0%}{at.server:8.0%}{bad}"
        print(f"{count:9}{at.rate:10.0f}{at.cpu_ms:9.3f}{at.cores:8.2f}{shown}{busy}", flush=True)
    if limited and len(best) > 1:
        last = max(best)
        note(f"{words}: efficiency of {last} processes", efficiency[last], EFFICIENT, "goal")
    return not any(at.bad for at in best.values())


if __name__ == "__main__":
    print(json.dumps(uvloop.run(call_for(json.loads(sys.stdin.readline())))), flush=True)
