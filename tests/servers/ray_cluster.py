"""A throw-away Ray cluster on this machine, for tests and drills: nodes are real `ray start` processes on the loopback.

    with RayCluster(nodes=3) as cluster:
        await drive(config, ..., executor=executor("ray", address=cluster.address))
        cluster.nodes[1].kill()

Every process of a node carries a mark in its environment, by which the node is killed, frozen and cleaned up: nothing else on
the machine is ever touched. `ray stop` is not used, since it ends every cluster of the user.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollyard.core.errors import Error
from tests.servers.postgres import free_port

OBJECTS_BYTES = 80 << 20
MOST_GROWN, IDLE_S = 3, 3.0
START_S = 300.0
_MARK = "ROLLYARD_RAY_NODE"
_WORKER = b"ray::NodeWorker"  # how Ray names the process of a run's worker
_HEAD_KIND = "ray.head.default"  # as Ray's provider calls it
# its own nodes are on the loopback, and it looks every second
_AUTOSCALER_ENV = {
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
# And a digit: every node has an address of its own; 127.0.0.1 itself Ray would take as "any of mine"
_LOOPBACK = "127.0.0.1"


class RayNode:
    """`inside` is a command that runs another one in a place of its own (`ip netns exec NAME`), `options` are of `ray start`."""

    def __init__(
        self,
        place: Path,
        *,
        ip: str,
        head: str | None,
        inside: Sequence[str],
        env: Mapping[str, str],
        grown: Mapping[str, float] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.mark = f"{place.name}-{secrets.token_hex(4)}"
        self.ip = ip
        self._log = place / f"{self.mark}.log"
        command = [*inside, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [f"--node-ip-address={ip}", f"--object-store-memory={OBJECTS_BYTES}", "--num-cpus=1", *options]
        if head is None:
            self.port = free_port(ip)
            command += ["--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={place}"]
            if grown is not None:
                command.append(f"--autoscaling-config={self._autoscaler(place, grown)}")
                env = {**env, **_AUTOSCALER_ENV}
        else:
            command += [f"--address={head}"]
        quiet = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_worker_niceness": "0",  # else whatever else runs here comes before the workers
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **quiet, **env, _MARK: self.mark},
                stdout=log,
                stderr=log,
                cwd=place,
                start_new_session=True,
            )

    def _autoscaler(self, place: Path, grown: Mapping[str, float]) -> Path:
        """What the head starts nodes from: Ray's own provider of nodes on the machine that it is on."""
        kinds: dict[str, Any] = {_HEAD_KIND: {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}}
        resources = {"object_store_memory": OBJECTS_BYTES, "CPU": 1, **grown}
        kinds["grown"] = {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": MOST_GROWN}
        config = {
            "cluster_name": "grown",
            "max_workers": MOST_GROWN,
            "idle_timeout_minutes": IDLE_S / 60,
            "upscaling_speed": 1.0,
            "provider": {"type": "fake_multinode", "gcs_address": f"{self.ip}:{self.port}"},
            "auth": {},
            "available_node_types": kinds,
            "head_node_type": _HEAD_KIND,
        }
        path = place / "autoscaler.json"  # which is YAML too
        path.write_text(json.dumps(config))
        return path

    def pids(self) -> list[int]:
        """By its mark, and by its session: a process that renames itself may overwrite its own environment."""
        return sorted({*find_marked(self.mark), *_of_session(self.process.pid)})

    def kill(self) -> None:
        """As when the machine loses power: every process of the node at once."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)

    def signal(self, number: int) -> None:
        for _ in range(3 if number == signal.SIGKILL else 1):  # a process may have been forked meanwhile
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


class RayCluster:
    """`env` is given to every node; one of `{n}` in a value becomes the node's number. With `grown` the head runs Ray's
    autoscaler, which adds nodes with these resources, up to `MOST_GROWN`, and removes those that are idle for `IDLE_S`.
    `start_s` is for each node."""

    def __init__(
        self,
        nodes: int = 1,
        *,
        env: Mapping[str, str] | None = None,
        ip: str | None = None,
        grown: Mapping[str, float] | None = None,
        start_s: float = START_S,
    ) -> None:
        self.count, self._env, self._ip, self._grown = nodes, dict(env or {}), ip, grown
        self.start_s = start_s
        self._made = 0
        self.nodes: list[RayNode] = []

    def __enter__(self) -> Self:
        self.place = Path(tempfile.mkdtemp(prefix="ry-ray-", dir="/tmp"))
        try:
            # one by one: of those that start together some end with "Address already in use"
            while len(self.nodes) < self.count:
                self.add()
                self.wait(len(self.nodes))
        except BaseException:  # Ctrl-C too: nodes that were started are stopped
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        return f"{self.nodes[0].ip}:{self.nodes[0].port}"

    def add(self, *, ip: str | None = None, inside: Sequence[str] = (), options: Sequence[str] = ()) -> RayNode:
        number, self._made = str(self._made), self._made + 1
        env = {name: value.replace("{n}", number) for name, value in self._env.items()}
        node = RayNode(
            self.place,
            ip=ip or self._ip or f"{_LOOPBACK}{number}",
            head=self.address if self.nodes else None,
            inside=inside,
            env=env,
            grown=self._grown,
            options=options,
        )
        self.nodes.append(node)
        if len(self.nodes) == 1:
            self._until(lambda: _answers(node.ip, node.port), "the head of the Ray cluster did not start")
        return node

    def wait(self, count: int) -> None:
        """Until `count` nodes are known and alive."""
        ray = self.connect()
        self._until(lambda: sum(n["Alive"] for n in ray.nodes()) >= count, f"{count} Ray nodes did not start")

    def count_alive(self) -> int:
        return sum(node["Alive"] for node in self.connect().nodes())

    def explain(self) -> str:
        """What is known of nodes that did not come: which processes ended, and what they and Ray's own logs said last."""
        alive = (
            {node["NodeManagerAddress"] for node in self.connect().nodes() if node["Alive"]} if self.nodes else set()
        )
        said = [f"{len(alive)} of {len(self.nodes)} Ray nodes are alive"]
        for node in self.nodes:
            if node.ip not in alive:
                code = node.process.poll()
                state = "runs" if code is None else f"ended with {code}"
                said.append(f"{node.ip} {state} and said: {node.log()[-600:].strip()}")
        for log in sorted(self.place.glob("session_2*/logs/*.err")):  # beside them is a link to the newest
            if text := log.read_text(errors="replace").strip():
                said.append(f"{log.name}: {text[:600]}")  # why it ended comes before where
        return "\n".join(said)

    def worker_pids(self) -> list[int]:
        """The processes of a run's workers on all nodes, found in one look at the machine's processes."""
        marks = {f"{_MARK}={node.mark}".encode() for node in self.nodes}
        leaders = {node.process.pid for node in self.nodes}
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(_WORKER):
                    own = marks.intersection((entry / "environ").read_bytes().split(b"\0"))
                    if own or _session_of(entry) in leaders:
                        found.append(int(entry.name))
        return found

    def connect(self) -> Any:
        ray: Any = import_module("ray")
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "rollyard"}
            self._until(lambda: _joins(ray, self.address, options), "no connection to the Ray cluster")
        return ray

    def actors(self) -> list[str]:
        """Names of the actors that are alive."""
        self.connect()
        util: Any = import_module("ray.util")
        return sorted(entry["name"] for entry in util.list_named_actors(all_namespaces=True))

    def list_left_actors(self, within_s: float = 30.0) -> list[str]:
        """Names of the actors that are still there after a while: Ray forgets one that was killed a moment later."""
        deadline = time.monotonic() + within_s
        while (names := self.actors()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return names

    def close(self) -> None:
        ray: Any = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            ray.shutdown()
        for node in reversed(self.nodes):
            node.signal(signal.SIGCONT)
            node.kill()
        shutil.rmtree(self.place, ignore_errors=True)

    def _until(self, true: Any, otherwise: str) -> None:
        end = time.monotonic() + self.start_s
        while time.monotonic() < end:
            if true():
                return
            time.sleep(0.2)
        raise Error(f"{otherwise} in {self.start_s:.0f} s: {self.nodes[-1].log()[-600:]}")


def _joins(ray: Any, address: str, options: Mapping[str, Any]) -> bool:
    """On a busy machine Ray itself gives up before the node on this machine has told the head of itself."""
    try:
        ray.init(address=address, **options)
    except ConnectionError:
        return False
    return True


def find_marked(mark: str) -> list[int]:
    """Processes that carry a node's mark, this one not counted."""
    wanted = f"{_MARK}={mark}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _of_session(leader: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if _session_of(entry) == leader:
                    found.append(int(entry.name))
    return found


def _session_of(entry: Path) -> int:
    return int((entry / "stat").read_text().rpartition(")")[2].split()[3])


def _answers(ip: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((ip, port), timeout=1):
        return True
    return False
