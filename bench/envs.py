"""An echo environment beside OpenEnv's own, in one run: `python -m bench.envs [--steps 400] [--sessions 8] [--rounds 5]`.

Two servers (ours and OpenEnv's, the latter from PyPI in a venv of its own under $ROLLYARD_CACHE) serve the same environment: it
says back what it is told, as a step and as a tool. Two clients (ours and theirs) drive each of them over WebSocket, several
sessions at once, each waiting for its answer before the next step. CPU is that of the server's and of the client's process
per step. `bare TCP` sends the same bytes back and forth between two processes that read nothing: no step can cost less. An echo
of the `websockets` library, as its documentation writes one, is the same with frames and no JSON, session or deadline. Windows
are interleaved and repeated, and the ratios are of medians in this run: figures of different runs do not compare.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench import peers
from bench.figures import note
from bench.load import rss_mb

ECHO = Path(__file__).parents[1] / "examples" / "envs" / "echo.py"
BUDGETS = (
    ("CPU ms per step, theirs / ours", 5.0, "goal"),
    ("CPU ms per tool call, theirs / ours", 5.0, ">="),
    ("import CPU of the client, theirs / ours", 10.0, ">="),
    ("import CPU of the client / asyncio and json", 4.0, "<="),
    ("RSS of a client MB", 40.0, "<="),
    ("CPU ms per step / bare TCP", 2.5, "<="),
    ("import CPU of rollyard / asyncio and json", 2.0, "<="),
)
THEIR_SERVER = """
import sys, uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
class Say(Action):
    message: str
class Heard(Observation):
    message: str = ""
class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        server = FastMCP("echo")
        @server.tool
        def echo(message: str) -> str:
            return message
        super().__init__(server)
        self._state = State(episode_id=None, step_count=0)
    def reset(self, seed=None, episode_id=None, **kw):
        return Observation()
    def _step_impl(self, action, timeout_s=None, **kw):
        return Observation()
    @property
    def state(self):
        return self._state
class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self._state = State(episode_id=None, step_count=0)
    def reset(self, seed=None, episode_id=None, **kw):
        self._state = State(episode_id=episode_id, step_count=0)
        return Heard(message="ready")
    def step(self, action, timeout_s=None, **kw):
        self._state.step_count += 1
        return Heard(message=action.message, reward=float(len(action.message)))
    @property
    def state(self):
        return self._state
kinds = {"step": (Echo, Say, Heard), "tool": (Tools, CallToolAction, CallToolObservation)}
app = create_app(*kinds[sys.argv[2]], env_name="echo", max_concurrent_envs=512)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False)
"""
CLIENT = """
import asyncio, json, resource, sys, time
url, sessions, rounds = sys.argv[1], int(sys.argv[2]), sys.argv[3]
{imports}
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
async def one(ready, go, done, steps):
    async with {connect} as env:
        await env.reset()
        await {step}
        ready.release()
        for n in steps:
            await go[n].wait()
            for _ in range(int(sys.argv[3])):
                result = await {step}
                assert {good}, result
            done[n].release()
async def main():
    rounds = int(sys.argv[4])
    ready = asyncio.Semaphore(0)
    go = [asyncio.Event() for _ in range(rounds)]
    done = [asyncio.Semaphore(0) for _ in range(rounds)]
    tasks = [asyncio.create_task(one(ready, go, done, range(rounds))) for _ in range(sessions)]
    for _ in range(sessions):
        await ready.acquire()
    print("ready", flush=True)
    for n in range(rounds):
        await asyncio.to_thread(sys.stdin.readline)
        began, used = time.perf_counter(), cpu()
        go[n].set()
        for _ in range(sessions):
            await done[n].acquire()
        print(json.dumps([time.perf_counter() - began, cpu() - used]), flush=True)
    await asyncio.gather(*tasks)
asyncio.run(main())
"""
OURS = {"imports": "from rollyard.envs import connect", "connect": "connect(url)"}
THEIRS = {"imports": "from openenv.core import GenericEnvClient", "connect": "GenericEnvClient(base_url=url)"}
STEP = {"step": 'env.step({"message": "hello"})', "good": "result.reward == 5.0"}
OUR_TOOL = {"step": 'env.call("echo", {"message": "hello"})', "good": 'result == "hello"'}
THEIR_TOOL = {
    "step": 'env.step({"type": "call_tool", "tool_name": "echo", "arguments": {"message": "hello"}})',
    "good": 'result.observation["result"]["data"] == "hello"',
}
BARE_SERVER = """
import asyncio, sys, uvloop
class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.transport.write(data)
async def main():
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()
uvloop.run(main())
"""
BARE = {
    "imports": """
class Bare(asyncio.Protocol):
    async def __aenter__(self):
        loop = asyncio.get_running_loop()
        self.transport, _ = await loop.create_connection(lambda: self, "127.0.0.1", int(url.rpartition(":")[2]))
        return self
    async def __aexit__(self, *error):
        self.transport.close()
    def data_received(self, data):
        self.answer.set_result(data)
    async def reset(self):
        pass
    async def step(self):
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(b"x" * 90)
        return await self.answer
""",
    "connect": "Bare()",
    "step": "env.step()",
    "good": "len(result) == 90",
}
WEBSOCKET_SERVER = """
import asyncio, sys, uvloop
from websockets.asyncio.server import serve
async def echo(socket):
    async for text in socket:
        await socket.send(text)
async def main():
    async with serve(echo, "127.0.0.1", int(sys.argv[1]), compression=None) as server:
        await server.serve_forever()
uvloop.run(main())
"""
WEBSOCKET = {
    "imports": """
from websockets.asyncio.client import connect
class Bare:
    async def __aenter__(self):
        self.socket = await connect(url.replace("http", "ws"), compression=None)
        return self
    async def __aexit__(self, *error):
        await self.socket.close()
    async def reset(self):
        pass
    async def step(self):
        await self.socket.send("x" * 90)
        return await self.socket.recv()
""",
    "connect": "Bare()",
    "step": "env.step()",
    "good": "len(result) == 90",
}
IMPORTS = {
    "asyncio and json": "import asyncio, json",
    "ours": "import rollyard.envs.client",
    "rollyard": "import rollyard",
    "theirs": "from openenv.core import GenericEnvClient",
}


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Pair:
    """One client driving one server."""

    def __init__(self, name: str, python: str, code: str, url: str, server: int, args: argparse.Namespace) -> None:
        self.name, self.server, self.steps = name, server, args.sessions * args.steps
        self.wall: list[float] = []
        self.client_ms: list[float] = []
        self.server_ms: list[float] = []
        self.rss = 0.0
        command = [python, "-c", code, url, str(args.sessions), str(args.steps), str(args.rounds)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdin is not None
        assert self.process.stdout.readline() == "ready\n", f"{name} did not get ready"

    def window(self) -> None:
        before = cpu_of(self.server)
        self.rss = rss_mb(self.process.pid)
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        wall, client = json.loads(self.process.stdout.readline())
        self.wall.append(wall)
        self.client_ms.append(1000 * client / self.steps)
        self.server_ms.append(1000 * (cpu_of(self.server) - before) / self.steps)

    @property
    def cpu_ms(self) -> float:
        return statistics.median(c + s for c, s in zip(self.client_ms, self.server_ms, strict=True))

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def import_cost(python: str, code: str) -> tuple[float, float, int]:
    """CPU seconds, peak MB and modules of a fresh interpreter that runs `code`, less those of one that runs nothing."""
    report = "; import sys, resource; u = resource.getrusage(resource.RUSAGE_SELF); "
    report += "print(u.ru_utime + u.ru_stime, u.ru_maxrss / 1024, len(sys.modules))"

    def run(what: str) -> tuple[float, float, int]:
        out = subprocess.run([python, "-c", what + report], capture_output=True, text=True, check=True).stdout.split()
        return float(out[0]), float(out[1]), int(out[2])

    bare = statistics.median(run("pass")[0] for _ in range(5))
    runs = [run(code) for _ in range(5)]
    return statistics.median(r[0] for r in runs) - bare, runs[0][1], runs[0][2]


def serve(command: list[str], port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peers.wait(port)
    return process


def measure(args: argparse.Namespace) -> list[Pair]:
    their_python = str(peers.venv("openenv"))
    ours, theirs, tools, bare, echo = (free_port() for _ in range(5))
    tool = str(Path(sys.executable).with_name("rollyard"))
    servers = [
        serve([tool, "serve", "env", f"{ECHO}:EchoEnv", "--port", str(ours), "--capacity", "512"], ours),
        serve([their_python, "-c", THEIR_SERVER, str(theirs), "step"], theirs),
        serve([their_python, "-c", THEIR_SERVER, str(tools), "tool"], tools),
        subprocess.Popen([sys.executable, "-c", BARE_SERVER, str(bare)]),
        subprocess.Popen([sys.executable, "-c", WEBSOCKET_SERVER, str(echo)]),
    ]
    time.sleep(2)

    def pair(name: str, python: str, client: dict[str, str], port: int, number: int, steps: int) -> Pair:
        asked_here = argparse.Namespace(sessions=args.sessions, steps=steps, rounds=args.rounds)
        url = f"http://127.0.0.1:{port}"
        return Pair(name, python, CLIENT.format(**client), url, servers[number].pid, asked_here)

    try:
        few = max(20, args.steps // 8)  # theirs is slow at it
        pairs = [
            pair("our client, our server", sys.executable, OURS | STEP, ours, 0, args.steps),
            pair("their client, their server", their_python, THEIRS | STEP, theirs, 1, args.steps),
            pair("their client, our server", their_python, THEIRS | STEP, ours, 0, args.steps),
            pair("our client, their server", sys.executable, OURS | STEP, theirs, 1, args.steps),
            pair("a tool: ours, ours", sys.executable, OURS | OUR_TOOL, ours, 0, args.steps),
            pair("a tool: theirs, theirs", their_python, THEIRS | THEIR_TOOL, tools, 2, few),
            pair("bare TCP", sys.executable, BARE, bare, 3, args.steps),
            pair("an echo of `websockets`", sys.executable, WEBSOCKET, echo, 4, args.steps),
        ]
        for _ in range(args.rounds):
            for one in pairs:
                one.window()
        print(f"server RSS: ours {rss_mb(servers[0].pid):.0f} MB, theirs {rss_mb(servers[1].pid):.0f} MB")
        for one in pairs:
            one.end()
        return pairs
    finally:
        for server in servers:
            server.terminate()
            server.wait(30)


def report(pairs: list[Pair], imports: dict[str, tuple[float, float, int]]) -> dict[str, float]:
    print(f"\n{'steps over WebSocket':28} {'steps/s':>9} {'server ms':>10} {'client ms':>10} {'CPU ms/step':>12}")
    for p in pairs:
        rate = p.steps / statistics.median(p.wall)
        server, client = statistics.median(p.server_ms), statistics.median(p.client_ms)
        print(f"{p.name:28} {rate:9.0f} {server:10.3f} {client:10.3f} {p.cpu_ms:12.3f}")
    print(f"\n{'import of':32} {'CPU s':>8} {'RSS MB':>8} {'modules':>8}")
    for name, (cpu, rss, modules) in imports.items():
        print(f"{name:32} {cpu:8.3f} {rss:8.1f} {modules:8}")
    floor = pairs[6].cpu_ms
    above = (pairs[1].cpu_ms - floor) / (pairs[0].cpu_ms - floor)
    print(
        f"\nabove bare TCP, theirs / ours: {above:.1f}; theirs / bare TCP: {pairs[1].cpu_ms / floor:.1f} (the most there is); "
        f"theirs / an echo of `websockets` that reads nothing: {pairs[1].cpu_ms / pairs[7].cpu_ms:.1f}"
    )
    return {
        BUDGETS[0][0]: pairs[1].cpu_ms / pairs[0].cpu_ms,
        BUDGETS[1][0]: pairs[5].cpu_ms / pairs[4].cpu_ms,
        BUDGETS[2][0]: imports["theirs"][0] / imports["ours"][0],
        BUDGETS[3][0]: imports["ours"][0] / imports["asyncio and json"][0],
        BUDGETS[4][0]: pairs[0].rss,
        BUDGETS[5][0]: pairs[0].cpu_ms / floor,
        BUDGETS[6][0]: imports["rollyard"][0] / imports["asyncio and json"][0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="per session and window")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    pairs = measure(args)
    pythons = {"theirs": str(peers.venv("openenv"))}
    figures = report(pairs, {n: import_cost(pythons.get(n, sys.executable), code) for n, code in IMPORTS.items()})
    print()
    return 0 if all([note(name, figures[name], bound, sense) for name, bound, sense in BUDGETS]) else 1


if __name__ == "__main__":
    sys.exit(main())
