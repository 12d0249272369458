"""What drills stand on: a PostgreSQL server, a model server, a driver process; and the questions asked after each of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import asyncpg

from rollyard.sandbox import backend as open_backend
from rollyard.sandbox.local import cgroups
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


def _heed_interrupts() -> None:
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
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, preexec_fn=_heed_interrupts
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


async def committed(url: str, run_id: str) -> int:
    """How many rollouts a run has, asked of the database itself."""
    connection = await asyncpg.connect(url, timeout=10)
    try:
        return await connection.fetchval("SELECT count(*) FROM rollouts WHERE run_id = $1", run_id)
    finally:
        await connection.close(timeout=5)


async def wait_for(url: str, run_id: str, count: int, limit_s: float = 180.0) -> None:
    """Until a run has so many rollouts, however slow the machine is; `limit_s` without a new one is too long."""
    before, end = -1, 0.0
    while (now := await committed(url, run_id)) < count:
        if now > before:
            before, end = now, time.monotonic() + limit_s
        if time.monotonic() > end:
            raise TimeoutError(f"{now} rollouts of {count}, and no new one for {limit_s:.0f} s")
        await asyncio.sleep(0.1)


LOST = "SELECT count(*) FROM attempts a WHERE a.run_id = $1 AND (a.state NOT IN ('done', 'failed') OR NOT EXISTS "
LOST += "(SELECT 1 FROM rollouts r WHERE r.id = a.rollout_id AND r.fence = a.fence))"
TWICE = (
    "SELECT count(*) FROM (SELECT task_id, attempt FROM rollouts WHERE run_id = $1 GROUP BY 1, 2 HAVING count(*) > 1) x"
)
STRANGE = "SELECT count(*) FROM rollouts WHERE run_id = $1 AND boundary <> 'agent' AND reward IS NOT NULL"
# a takeover notes the time before it waits for a call that is being kept at that moment: hence the second
LATE = "SELECT count(*) FROM calls c JOIN sessions s USING (rollout_id) JOIN attempts a ON a.id = s.attempt_id "
LATE += "WHERE a.run_id = $1 AND s.fence < a.fence AND c.received_at > s.closed_at + 1 "
LATE += "AND c.received_at < extract(epoch FROM now()) + 60"  # a worker whose clock is ahead dates its calls so
OPEN = (
    "SELECT count(*) FROM sessions s JOIN attempts a ON a.id = s.attempt_id WHERE a.run_id = $1 AND s.closed_at IS NULL"
)
COUNTS = {
    "attempts": "SELECT count(*) FROM attempts WHERE run_id = $1",
    "committed": "SELECT count(*) FROM rollouts WHERE run_id = $1",
    "scored": "SELECT count(*) FROM rollouts WHERE run_id = $1 AND reward IS NOT NULL",
    "claims": "SELECT coalesce(sum(tries), 0) FROM attempts WHERE run_id = $1",
    "lost": LOST,
    "twice": TWICE,
    "reward_of_infra": STRANGE,
    "zombie_calls": LATE,
    "open_sessions": OPEN,
    "unscored": "SELECT count(*) FROM rollouts WHERE run_id = $1 AND reward IS NULL",
    "leases": "SELECT count(*) FROM attempts WHERE run_id = $1 AND state = 'leased'",
    "owed": "SELECT count(*) FROM attempts WHERE run_id = $1 AND state = 'owed'",
}


WHY = "SELECT boundary || ': ' || cause AS why, count(*) AS n FROM rollouts WHERE run_id = $1 AND reward IS NULL GROUP BY 1"


async def causes(url: str, run_id: str) -> dict[str, int]:
    """Why rollouts of a run have no reward."""
    connection = await asyncpg.connect(url, timeout=30)
    try:
        return {str(row["why"]): row["n"] for row in await connection.fetch(WHY, run_id)}
    finally:
        await connection.close(timeout=5)


DOING = "SELECT name || ' ' || coalesce(fields::json ->> 'stage', '') AS what, count(*) AS n FROM events "
DOING += "WHERE run_id = $1 GROUP BY 1 ORDER BY 2 DESC LIMIT 12"


async def doing(url: str, run_id: str) -> dict[str, int]:
    """What the rollouts of a run told: where one that does not end is stuck."""
    connection = await asyncpg.connect(url, timeout=30)
    try:
        return {str(row["what"]): row["n"] for row in await connection.fetch(DOING, run_id)}
    finally:
        await connection.close(timeout=5)


AGAIN = "SELECT coalesce(fields::json ->> 'cause', '') AS why, count(*) AS n FROM events "
AGAIN += "WHERE run_id = $1 AND name = 'attempt.retried' GROUP BY 1 ORDER BY 2 DESC LIMIT 12"


async def retried(url: str, run_id: str) -> dict[str, int]:
    """Why rollouts of a run were given back for another try. Claims beyond these are those of leases that ran out."""
    connection = await asyncpg.connect(url, timeout=30)
    try:
        return {str(row["why"]): row["n"] for row in await connection.fetch(AGAIN, run_id)}
    finally:
        await connection.close(timeout=5)


SAID = "SELECT (fields::json ->> 'stage') || ': ' || (fields::json ->> 'error') AS why, count(*) AS n FROM events "
SAID += "WHERE run_id = $1 AND name = 'stage.finished' AND fields::json ->> 'error' IS NOT NULL GROUP BY 1"
_ID = re.compile(r"\b[a-z]+[_-][0-9a-z]{8,}\b")


async def stage_errors(url: str, run_id: str) -> dict[str, int]:
    """What stages of a run failed with, whoever they were."""
    connection = await asyncpg.connect(url, timeout=30)
    try:
        said: Counter[str] = Counter()
        for row in await connection.fetch(SAID, run_id):
            said[_ID.sub("ID", str(row["why"]))] += row["n"]
        return dict(said.most_common(12))
    finally:
        await connection.close(timeout=5)


class Starvation:
    """Whether processes stood in line for a processor: on a busy machine a run makes no progress because nobody lets it."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def tell(self, pids: Iterable[int]) -> str:
        """Seconds of CPU that they had and seconds that they waited for it, all together, since each began."""
        had = waited = 0.0
        for pid in pids:
            with contextlib.suppress(OSError, ValueError):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    on, line, _ = map(int, (thread / "schedstat").read_text().split())
                    had, waited = had + on / 1e9, waited + line / 1e9
        return f"workers had {had:.0f} s of CPU and waited {waited:.0f} s for it, in {time.monotonic() - self._began:.0f} s"


SETTLED_LOST = "SELECT count(*) FROM attempts a WHERE a.run_id = $1 AND a.state IN ('done', 'failed') AND NOT EXISTS "
SETTLED_LOST += "(SELECT 1 FROM rollouts r WHERE r.id = a.rollout_id AND r.fence = a.fence)"
SO_FAR = {name: COUNTS[name] for name in ("committed", "claims", "twice", "zombie_calls", "leases", "owed")}
SO_FAR["lost"] = SETTLED_LOST


async def account_so_far(url: str, run_id: str) -> dict[str, int]:
    """Of a run that goes on: *lost* are attempts that count as done and have no rollout."""
    connection = await asyncpg.connect(url, timeout=30)
    try:
        return {name: int(await connection.fetchval(query, run_id)) for name, query in SO_FAR.items()}
    finally:
        await connection.close(timeout=5)


async def account(url: str, run_id: str) -> dict[str, int]:
    connection = await asyncpg.connect(url, timeout=30)
    try:
        return {name: int(await connection.fetchval(query, run_id)) for name, query in COUNTS.items()}
    finally:
        await connection.close(timeout=5)


def find_zygotes(home: str) -> list[int]:
    """The processes that make the sandboxes of a home: they write to its log."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "fd/2") == f"{home}/launcher.log":
                found.append(int(entry.name))
    return found


def sandbox_pids(home: str) -> set[int]:
    """With everything in the control groups that they made, which are named after them."""
    makers = find_zygotes(home)
    found, names = set(makers), tuple(f"/rollyard/{pid}-" for pid in makers)
    for entry in Path("/proc").iterdir() if makers else ():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and any(name in (entry / "cgroup").read_text() for name in names):
                found.add(int(entry.name))
    return found


class Leftovers:
    """What is on this machine that its owner should have removed. Others on the machine may leave groups too, and a group says no
    more than which process made it: so those that make the sandboxes of this home are remembered while it is watched."""

    def __init__(self, home: str) -> None:
        self.home = home
        self.makers: set[int] = set()

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()

    async def after(self, limit_s: float = 30.0) -> dict[str, int]:
        """Once the workers are gone; given a moment, since dying takes one."""
        end = time.monotonic() + limit_s
        while True:
            found = await self._found()
            if not any(found.values()) or time.monotonic() > end:
                return found
            await asyncio.sleep(0.5)

    async def _watch(self) -> None:
        while True:
            self.makers.update(await asyncio.to_thread(find_zygotes, self.home))
            await asyncio.sleep(1)

    async def _found(self) -> dict[str, int]:
        async with open_backend("local", root=self.home) as backend:  # which removes groups that are empty
            sandboxes = len(await backend.list())
        boxes = Path(self.home) / "boxes"
        mounts = sum(self.home in line for line in Path("/proc/self/mountinfo").read_text().splitlines())
        groups = self._groups()
        return {
            "sandboxes": sandboxes + sum(1 for _ in boxes.iterdir()),
            "processes": len(sandbox_pids(self.home).union(*groups.values())),
            "mounts": mounts,
            "cgroups": len(groups),
        }

    def _groups(self) -> dict[Path, set[int]]:
        """Control groups whose maker is dead, which are named after its process id, and the processes that live in them."""
        dead = {str(pid) for pid in self.makers if not Path("/proc", str(pid)).exists()}
        groups = (path for h in cgroups.find().hierarchies for path in Path(h.root).glob("*-*"))
        found: dict[Path, set[int]] = {}
        for path in groups:
            with contextlib.suppress(OSError):
                if path.name.partition("-")[0] in dead:
                    found[path] = set(map(int, (path / "cgroup.procs").read_text().split()))
        return found
