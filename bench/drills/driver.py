"""The processes of a drill: a PostgreSQL server, a model server and a driver that can be killed and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import deque
from pathlib import Path

from tests.servers.postgres import PostgresServer as PostgresServer
from tests.servers.postgres import free_port as free_port

ROLLYARD = Path(sys.executable).with_name("rollyard")
READY_S = 60.0


class Upstream:
    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host, self.port = host, free_port(host)
        command = [sys.executable, "-m", "bench.drills.upstream", str(self.port), host]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.process.stdout.readline()
        self.url = f"http://{host}:{self.port}/v1"

    def ask(self, path: str) -> dict:
        with urllib.request.urlopen(f"http://{self.host}:{self.port}{path}", timeout=10) as answer:
            return json.load(answer)

    def fault(self, kind: str) -> None:
        self.ask(f"/fault?kind={kind}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)


def _restore_interrupts() -> None:
    """In the background of a shell SIGINT is ignored, and what is ignored stays so in a program that is started there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Driver:
    """`rollyard run`, in a process that can be killed and started again with `--resume`."""

    def __init__(self, store: str, config: Path, address: str | None, home: str, *, per_node: int = 1) -> None:
        self.store, self.config, self.address, self.home, self.per_node = store, config, address, home, per_node
        self.run_id = ""
        self.lines: deque[str] = deque(maxlen=200)  # the last that it said
        self.resumed_s: list[float] = []  # from the start of each that came back until it knew its run
        self.start([str(config)])

    def start(self, what: list[str]) -> None:
        command = [str(ROLLYARD), "run", *what, "--store", self.store, "--display", "plain"]
        if self.address is not None:
            command += ["--executor", "ray", "--ray-address", self.address, "--per-node", str(self.per_node)]
        env = {**os.environ, "ROLLYARD_HOME": self.home, "RAY_USAGE_STATS_ENABLED": "0"}
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, preexec_fn=_restore_interrupts
        )
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("run run_"):
                self.run_id = line.split()[1].rstrip(":")
                break
        else:
            raise RuntimeError(f"the driver ended at once: {''.join([*self.lines][-5:])}{self.process.stdout.read()}")
        os.set_blocking(self.process.stderr.fileno(), False)

    def drain(self) -> None:
        with contextlib.suppress(OSError, TypeError):
            self.lines += (self.process.stderr.read() or "").splitlines()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def interrupt(self) -> None:
        """As Ctrl-C does: what is under way ends, and its attempts stay owed."""
        self.process.send_signal(signal.SIGINT)

    def resume(self) -> None:
        began = time.monotonic()
        self.start(["--resume", self.run_id])
        self.resumed_s.append(time.monotonic() - began)

    def wait(self, limit_s: float) -> int:
        end = time.monotonic() + limit_s
        while self.process.poll() is None:
            self.drain()
            if time.monotonic() > end:
                self.process.send_signal(signal.SIGINT)
                raise TimeoutError(f"the run did not end in {limit_s:.0f} s: {[*self.lines][-4:]}")
            time.sleep(0.1)
        return self.process.returncode
