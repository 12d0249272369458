"""The gate beside its floors, in one run: `python -m bench.gate [--quick] [--peers]`; and with several processes, over their
number: `python -m bench.gate --processes 1,2,4,8`.

direct       the client straight at the model server: what the harness itself costs
aiohttp-raw  an aiohttp reverse proxy that reads nothing and keeps nothing
rollyard     `rollyard serve gate --upstream --store`: keys, graph, token ids and logprobs recorded, every call committed
             to SQLite before its answer leaves

CPU is that of the gate's whole process tree, per call. Windows are interleaved and repeated, and the ratios are of medians
in this run: figures of different runs do not compare. Times leave out how long the model server thinks. `--peers` adds gates from
PyPI, each in a venv of its own under $ROLLYARD_CACHE, with what they record.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from bench import peers
from bench.figures import note
from bench.load import Caller, Window, connect, request, rss_mb
from bench.model_server import delay_s

END = b"done."
TURNS, PHASE = 20, 5
THINKING_S, THINKING_ROUNDS = 2.0, 4  # at least, where the server thinks: few calls a second need longer windows
ROLLOUTS = 64
CASES = {
    "S": ("short chat, 8 connections", "/v1/chat/completions", 8),
    "A": ("short chat, 64 connections", "/v1/chat/completions", 64),
    "B": ("chat stream", "/v1/chat/completions", 64),
    "D": ("Messages stream", "/v1/messages", 64),
    "E": ("Responses stream", "/v1/responses", 64),
    "T": ("chat, the server thinks", "/v1/chat/completions", 64),
}
BUDGETS = (
    ("short chat CPU / raw proxy", 2.0),
    ("chat stream CPU / raw proxy", 2.0),
    ("Messages stream CPU / raw proxy", 2.0),
    ("Responses stream CPU / raw proxy", 2.0),
    ("chat with a thinking server CPU / raw proxy", 2.0),
    ("agent turn CPU / raw proxy", 2.5),
    ("turn 16-20 / turn 1-5 CPU", 1.3),
    ("agent turn, answered at once, CPU / raw proxy", 2.5),
    ("turn 16-20 / 1-5 CPU, answered at once", 1.3),
    ("ms added at p50, 8 connections", None),
    ("ms added at p50, the server thinks", None),
    ("kB per recorded agent turn", 60.0),
    ("kB per held call", 20.0),
    ("idle RSS MB", 60.0),
    ("ready s", 1.0),
)


class Target:
    """A running gate: its port, its process, and a key per rollout."""

    def __init__(self, name: str, command: list[str] | None, port: int = 0, env: dict | None = None) -> None:
        self.name, self.command, self.port, self.env = name, command, port, env
        self.process: subprocess.Popen | None = None
        self.keys = ["none"] * ROLLOUTS
        self.prefixes = [""] * ROLLOUTS
        self.ready_s = 0.0
        self.idle_mb = 0.0
        self.figures: dict[str, list[Window]] = {}
        self.agent: dict[str, float] = {}  # with a server that thinks
        self.hasty: dict[str, float] = {}  # with one that answers at once
        self.held: dict[str, float] = {}

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def start(self) -> None:
        if self.command is None:
            return
        began = time.perf_counter()
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(self.env or {})}
        )
        if self.name in peers.REQUIREMENTS:
            peers.wait(self.port)
            self.ready_s = time.perf_counter() - began
            return
        line = self.process.stdout.readline().strip()
        self.ready_s = time.perf_counter() - began
        if line.startswith("{"):
            ready = json.loads(line)
            self.port = int(ready["url"].rpartition(":")[2])
            self.admin_key = Path(ready["admin_key_file"]).read_text().strip()
        else:
            self.port = int(line)

    async def prepare(self) -> None:
        self.idle_mb = rss_mb(self.pid) if self.pid else 0.0
        if self.name == "rllm":
            self.prefixes = [f"/sessions/bench-{index}" for index in range(ROLLOUTS)]
        if self.name == "openenv":
            await self.register()
        if self.name != "rollyard":
            return
        caller = await connect(self.port)
        for index in range(ROLLOUTS):
            body = json.dumps({"session_id": f"bench-{index}", "max_concurrent": 128}).encode()
            answer = await caller.ask(request("/sessions", body, self.admin_key))
            self.keys[index] = json.loads(answer.partition(b"\r\n\r\n")[2])["api_key"]
        caller.transport.close()

    async def register(self) -> None:
        caller = await connect(self.port)
        for index in range(ROLLOUTS):
            await caller.ask(request("/sessions", json.dumps({"session_id": f"bench-{index}"}).encode(), "x"))
            self.keys[index] = f"bench-{index}"
        caller.transport.close()

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:  # a gate that still holds calls may never go by itself
                self.process.kill()
                self.process.wait(20)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def body_of(case: str, nonce: int) -> bytes:
    text = f"{'LONG ' if case in 'BDE' else 'DELAY ' if case == 'T' else ''}say NONCE{nonce:06d} please"
    if case in "SAT":
        return json.dumps({"model": "bench", "messages": [{"role": "user", "content": text}]}).encode()
    if case == "B":
        return json.dumps({"model": "bench", "stream": True, "messages": [{"role": "user", "content": text}]}).encode()
    if case == "D":
        asked = [{"role": "user", "content": text}]
        return json.dumps({"model": "bench", "stream": True, "max_tokens": 128, "messages": asked}).encode()
    return json.dumps({"model": "bench", "stream": True, "input": text}).encode()


async def window(target: Target, case: str, seconds: float) -> Window:
    _, path, connections = CASES[case]
    callers = [await connect(target.port) for _ in range(connections)]
    counter = iter(range(100_000, 1_000_000))

    async def work(index: int, until: float, into: Window | None) -> None:
        caller, key = callers[index], target.keys[index % ROLLOUTS]
        while time.perf_counter() < until:
            nonce = next(counter)
            sent = request(target.prefixes[index % ROLLOUTS] + path, body_of(case, nonce), key)
            began = time.perf_counter()
            answer = await caller.ask(sent)
            if into is None:
                continue
            if not answer.startswith(b"HTTP/1.1 200") or END not in answer[-3000:] or b"%06d" % nonce not in answer:
                into.bad += 1
            into.times.append(time.perf_counter() - began - (delay_s(nonce) if case == "T" else 0.0))

    until = time.perf_counter() + 0.3
    await asyncio.gather(*(work(i, until, None) for i in range(connections)))
    with Window(target.pid) as measured:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(work(i, until, measured) for i in range(connections)))
    for caller in callers:
        caller.transport.close()
    return measured


def tools() -> list[dict]:
    def schema(i: int) -> dict:
        named = {f"argument_{j}": {"type": "string", "description": "what it is for " * 3} for j in range(4)}
        return {
            "name": "bash" if i == 0 else f"tool_{i}",
            "description": "does a thing " * 12,
            "parameters": {"type": "object", "properties": named},
        }

    return [{"type": "function", "function": schema(i)} for i in range(8)]


class Conversation:
    """An agent's growing request, kept as pieces of JSON so that the client's own work stays small."""

    def __init__(self, index: int, *, thinks: bool) -> None:
        system = f"You are agent {index}. " + "Follow the rules of this repository with care. " * 430
        self.messages = [
            json.dumps({"role": "system", "content": system}),
            json.dumps({"role": "user", "content": f"{'DELAY' if thinks else 'NOW'} fix bug {index}"}),
        ]
        self.tail = ',"tools":' + json.dumps(tools()) + ',"tool_choice":"auto","max_tokens":4096}'
        self.turn = 0

    def body(self) -> bytes:
        return ('{"model":"bench","messages":[' + ",".join(self.messages) + "]" + self.tail).encode()

    def grow(self, answer: bytes) -> None:
        message = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]
        kept = {k: message[k] for k in ("role", "content", "tool_calls")}
        self.messages.append(json.dumps(kept, separators=(",", ":")))
        output = f"file {self.turn} " + "drwxr-xr-x 2 user user 4096 module\n" * 25
        self.messages.append(
            json.dumps({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": output})
        )
        self.turn += 1


class Agents:
    """64 rollouts of 20 turns at their own pace inside phases of five, of a model server that thinks or answers at once."""

    def __init__(self, target: Target, *, thinks: bool) -> None:
        self.target = target
        self.talks = [Conversation(i, thinks=thinks) for i in range(ROLLOUTS)]
        self.before = self.rss()
        self.phases: list[float] = []
        self.bad = 0

    def rss(self) -> float:
        return rss_mb(self.target.pid) if self.target.pid else 0.0

    async def take_turns(self) -> None:
        """A phase."""
        callers = [await connect(self.target.port) for _ in range(ROLLOUTS)]
        with Window(self.target.pid) as measured:
            await asyncio.gather(*(self.rollout(index, caller, measured) for index, caller in enumerate(callers)))
        self.phases.append(measured.cpu_ms)
        for caller in callers:
            caller.transport.close()

    async def rollout(self, index: int, caller: Caller, into: Window) -> None:
        target, talk = self.target, self.talks[index]
        for _ in range(PHASE):
            sent = request(target.prefixes[index] + "/v1/chat/completions", talk.body(), target.keys[index])
            began = time.perf_counter()
            try:
                answer = await caller.ask(sent)
            except (OSError, TimeoutError):
                answer = b""
            into.times.append(time.perf_counter() - began)
            if not answer.startswith(b"HTTP/1.1 200"):
                self.bad += 1
                return
            talk.grow(answer)

    def found(self) -> dict[str, float]:
        return {
            "first": self.phases[0],
            "last": self.phases[-1],
            "mean": statistics.mean(self.phases),
            "kb": (self.rss() - self.before) * 1024 / (ROLLOUTS * TURNS),
            "bad": self.bad,
        }


async def agents(targets: list[Target], *, thinks: bool) -> list[dict[str, float]]:
    """A phase of each, by turns."""
    each = [Agents(target, thinks=thinks) for target in targets]
    for _ in range(TURNS // PHASE):
        for one in each:
            await one.take_turns()
    return [one.found() for one in each]


async def agents_twice(targets: list[Target], *, thinks: bool) -> list[dict[str, float]]:
    """The mean of two measurements, the second in the opposite order; of memory the larger one."""
    first = await agents(targets, thinks=thinks)
    second = (await agents(targets[::-1], thinks=thinks))[::-1]
    return [
        {name: (one[name] + other[name]) / 2 for name in one}
        | {"kb": max(one["kb"], other["kb"]), "bad": one["bad"] + other["bad"]}
        for one, other in zip(first, second, strict=True)
    ]


async def hold(target: Target, upstream: int, count: int) -> None:
    """`count` calls wait at the model server at once; then all are answered."""
    before = rss_mb(target.pid) if target.pid else 0.0
    callers = [await connect(target.port) for _ in range(count)]
    asked = []
    for index, caller in enumerate(callers):
        text = json.dumps(
            {"model": "bench", "messages": [{"role": "user", "content": f"HOLD NONCE{index:06d}"}]}
        ).encode()
        place = index % ROLLOUTS
        sent = request(target.prefixes[place] + "/v1/chat/completions", text, target.keys[place])
        asked.append(asyncio.ensure_future(caller.ask(sent)))
        if index % 100 == 99:
            await asyncio.sleep(0.01)
    control = await connect(upstream)
    at_server = 0
    for _ in range(150):
        at_server = int((await control.ask(request("/held", b"", "x", "GET"))).partition(b"\r\n\r\n")[2])
        if at_server >= count:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)
    peak = rss_mb(target.pid) if target.pid else 0.0
    began = time.perf_counter()
    await control.ask(request("/release", b"", "x", "GET"))
    done, late = await asyncio.wait(asked, timeout=30)
    answered = sum(1 for task in done if not task.exception() and task.result().startswith(b"HTTP/1.1 200"))
    for task in late:
        task.cancel()
    target.held = {
        "at_server": at_server,
        "answered": answered,
        "kb": (peak - before) * 1024 / count,
        "drain_s": time.perf_counter() - began,
    }
    for caller in callers:
        caller.transport.close()
    control.transport.close()


def median(target: Target, case: str, what: str) -> float:
    windows = target.figures[case]
    if what == "cpu":
        return statistics.median(w.cpu_ms for w in windows)
    if what == "rate":
        return statistics.median(len(w.times) / w.wall for w in windows)
    return statistics.median(w.quantile(float(what)) for w in windows)


def report(targets: list[Target], count: int) -> list[tuple[str, float, float | None]]:
    direct = targets[0]
    print(f"\n{'':14}" + "".join(f"{case + ' ' + CASES[case][0]:>34}" for case in CASES))
    for target in targets:
        cells = []
        for case in CASES:
            added = median(target, case, "0.5") - median(direct, case, "0.5")
            cells.append(
                f"{median(target, case, 'cpu'):6.3f} ms {median(target, case, 'rate'):6.0f}/s "
                f"+{added:5.1f}/{median(target, case, '0.99'):5.1f} ms"
            )
        print(f"{target.name:14}" + "".join(f"{cell:>34}" for cell in cells))
    print("(CPU ms per call, calls/s, p50 added to direct / p99; what the server thinks is left out)")
    print(
        f"\n{'':14}{'turn 1-5':>10}{'16-20':>10}{'mean ms':>10}{'kB/turn':>10}{'answered at once':>20}   "
        "held: at server, answered, kB each, drain s; idle MB, ready s"
    )
    for target in targets:
        a, q, h = target.agent, target.hasty, target.held
        print(
            f"{target.name:14}{a['first']:10.2f}{a['last']:10.2f}{a['mean']:10.2f}{a['kb']:10.1f}"
            f"{q['first']:10.2f}{q['last']:10.2f}   "
            f"{h['at_server']:.0f} of {count}, {h['answered']:.0f}, {h['kb']:.1f}, {h['drain_s']:.2f}; "
            f"{target.idle_mb:.0f}, {target.ready_s:.2f}"
            + (
                f"   BAD {sum(w.bad for ws in target.figures.values() for w in ws)} + {a['bad'] + q['bad']:.0f}"
                if target.figures
                else ""
            )
        )
    raw, ours = (next(t for t in targets if t.name == name) for name in ("aiohttp-raw", "rollyard"))
    found = {
        "short chat CPU / raw proxy": median(ours, "A", "cpu") / median(raw, "A", "cpu"),
        "chat stream CPU / raw proxy": median(ours, "B", "cpu") / median(raw, "B", "cpu"),
        "Messages stream CPU / raw proxy": median(ours, "D", "cpu") / median(raw, "D", "cpu"),
        "Responses stream CPU / raw proxy": median(ours, "E", "cpu") / median(raw, "E", "cpu"),
        "chat with a thinking server CPU / raw proxy": median(ours, "T", "cpu") / median(raw, "T", "cpu"),
        "agent turn CPU / raw proxy": ours.agent["mean"] / raw.agent["mean"],
        "turn 16-20 / turn 1-5 CPU": ours.agent["last"] / ours.agent["first"],
        "agent turn, answered at once, CPU / raw proxy": ours.hasty["mean"] / raw.hasty["mean"],
        "turn 16-20 / 1-5 CPU, answered at once": ours.hasty["last"] / ours.hasty["first"],
        "ms added at p50, 8 connections": median(ours, "S", "0.5") - median(direct, "S", "0.5"),
        "ms added at p50, the server thinks": median(ours, "T", "0.5") - median(direct, "T", "0.5"),
        "kB per recorded agent turn": ours.agent["kb"],
        "kB per held call": ours.held["kb"],
        "idle RSS MB": ours.idle_mb,
        "ready s": ours.ready_s,
    }
    return [(name, found[name], bound) for name, bound in BUDGETS]


async def measure(targets: list[Target], upstream: int, seconds: float, rounds: int, count: int) -> None:
    for target in targets:
        await target.prepare()
    for case in CASES:
        thinks = case == "T"
        length = max(seconds, THINKING_S) if thinks else seconds
        for turn in range(max(rounds, THINKING_ROUNDS) if thinks else rounds):
            order = targets[turn % len(targets) :] + targets[: turn % len(targets)]
            for target in order:
                target.figures.setdefault(case, []).append(await window(target, case, length))
    for target, found in zip(targets, await agents_twice(targets, thinks=True), strict=True):
        target.agent = found
    for target, found in zip(targets, await agents_twice(targets, thinks=False), strict=True):
        target.hasty = found
    for target in targets:
        await hold(target, upstream, count)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="shorter windows")
    arguments.add_argument("--held", type=int, default=2000)
    arguments.add_argument("--peers", action="store_true", help="also gates from PyPI, in venvs of their own")
    arguments.add_argument("--processes", help="counts with commas between: only calls/s over them, see gate_processes")
    given = arguments.parse_args()
    if given.processes:
        from bench import gate_processes

        return gate_processes.run([int(count) for count in given.processes.split(",")], quick=given.quick)
    seconds, rounds = (0.7, 2) if given.quick else (1.5, 3)
    python = sys.executable
    with tempfile.TemporaryDirectory() as scratch:
        server = Target("model server", [python, "-m", "bench.model_server", "0"])
        server.start()
        url = f"http://127.0.0.1:{server.port}"
        gate = [
            str(Path(python).with_name("rollyard")),
            "serve",
            "gate",
            "--upstream",
            f"{url}/v1",
            "--store",
            f"{scratch}/calls.db",
            "--json",
        ]
        targets = [
            Target("direct", None, server.port),
            Target("aiohttp-raw", [python, "-m", "bench.raw_proxy", url]),
            Target("rollyard", gate, env={"XDG_STATE_HOME": scratch}),
        ]
        if given.peers:
            for name in peers.REQUIREMENTS:
                port = free_port()
                targets.append(Target(name, peers.command(name, url, port), port))
        try:
            for target in targets:
                target.start()
            uvloop.run(measure(targets, server.port, seconds, rounds, given.held))
            results = report(targets, given.held)
        finally:
            for target in [*targets, server]:
                target.stop()
    print()
    return 0 if all([note(name, value, bound) for name, value, bound in results]) else 1


if __name__ == "__main__":
    sys.exit(main())
