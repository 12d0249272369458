"""`ray`: a run's workers on the nodes of a Ray cluster. Imported only when chosen; the extra is `rollyard[ray]`.

One worker (or `per_node`) sits on every live node and pulls attempts from the shared store. The driver starts workers, starts
them again where they died and where a node joined, shows what the store says, and cancels. It carries no rollout: workers are
detached, so a driver that dies leaves the run going, and one that comes back with `resume` finds its workers by name.

On nodes that are marked for rollouts a worker holds a little of that mark, so that Ray's autoscaler never takes a node with
rollouts for an idle one. With `nodes` the driver asks the autoscaler for as many, and gives them back at its end.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec

from rollyard.core.errors import ConfigError, Error, MissingExtra, Unsupported
from rollyard.core.numbers import check_least
from rollyard.runs.run.assignment import Assignment
from rollyard.runs.run.distant_worker import NodeAssignment, WorkerEnd
from rollyard.runs.run.distant_workers import DistantWorkers
from rollyard.runs.run.executor import Record, RunResources, Workers
from rollyard.runs.run.ray_worker import NodeWorker
from rollyard.runs.run.shipping import pack_work

T = TypeVar("T")

NAMESPACE = "rollyard"
MARK = "rollyard"  # the resource of a node that is for rollouts
HELD = 0.001  # how much of it a worker holds: runs share nodes
_LOOK_S = 1.0  # between looks at the cluster's nodes
_CALL_S = 60.0  # for one request to the cluster
_NODES_S = 15.0  # for the one after its nodes
_AWAY_S = 30.0  # without an answer to that: after a minute Ray itself ends this process, with no word on how to go on
_NO_NODE_S = 15.0  # without a node to work on, until that is said
_STOP_S = 45.0  # for a worker to close its sandboxes


class Ray:
    """`address` is `auto` (the cluster this machine belongs to), `host:port`, or `local` for a throw-away one here.
    Workers that are not `detached` end with the process that started them. `nodes` asks the cluster's autoscaler for so many
    that are marked for rollouts; without it the nodes are those that there are."""

    name = "ray"

    def __init__(
        self, address: str = "auto", *, per_node: int = 1, nodes: int | None = None, detached: bool = True
    ) -> None:
        if find_spec("ray") is None:
            raise MissingExtra("ray", "ray", why="the executor 'ray'")
        check_least(1, per_node=per_node, nodes=nodes)
        self._address, self._per_node, self._detached = address, per_node, detached
        self._wanted = nodes

    async def check(self, work: Assignment, given: RunResources) -> None:
        if not isinstance(given.sandbox, str):
            raise Unsupported("workers on other machines open their own sandboxes", hint="give the backend's name")
        if given.gate is not None or given.policies:
            raise Unsupported(
                "workers on other machines open their own gate and policies",
                hint='leave out gate= and policies=, and name them in the config: policies={"policy": "upstream:URL"}',
            )
        if not work.config.answers:
            raise ConfigError(
                "no policy is given to answer the model calls", hint='policies={"policy": "upstream:URL"}'
            )
        ray = await self._connect()
        nodes = self._wanted or len(await _off_loop(lambda: _live_nodes(ray)))
        if nodes > 1 and not given.store.shared:
            raise Unsupported(
                f"a SQLite store is a file of one machine, and this Ray cluster has {nodes} nodes",
                hint="--store postgresql://USER@HOST/NAME",
            )

    async def _connect(self) -> Any:
        return await _off_loop(lambda: connect_ray(self._address))

    @asynccontextmanager
    async def open(self, work: Assignment, given: RunResources, record: Record) -> AsyncGenerator[Workers]:
        ray = await self._connect()
        nodes = self._wanted or len(await _off_loop(lambda: _live_nodes(ray)))
        most = await _off_loop(lambda: max(count_gpus(ray.nodes()).values(), default=0))
        if self._wanted is None:
            check_gpus(work, most)
        await record()
        posting = NodeAssignment(
            work=work,
            store=_reachable(given.store.where),
            slots=work.config.slots(nodes * self._per_node),
            sharers=self._per_node,
            shipment=await pack_work(work, given.store),
            gpus=0 if most else None,
            secrets=read_secrets(work.config.key_env),
        )
        crew = _RayWorkers(ray, posting, given, self._per_node, self._detached, marked=self._wanted is not None)
        await crew.listen()
        if self._wanted is not None:
            await _off_loop(lambda: _request_nodes(nodes))
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(crew.supervise, group)
                try:
                    yield crew
                finally:
                    group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):  # after the group: a worker may have been starting until then
                await crew.dismiss()
                if self._wanted is not None and not crew.away:
                    await _off_loop(lambda: _request_nodes(0))


class _RayWorkers(DistantWorkers):
    """`marked`: on no other nodes than those that are for rollouts, also while there are none."""

    def __init__(
        self, ray: Any, posting: NodeAssignment, given: RunResources, per_node: int, detached: bool, *, marked: bool
    ) -> None:
        super().__init__(posting.work, given)
        self._marked = marked
        self._ray, self._posting = ray, posting
        self._per_node, self._detached = per_node, detached
        self._actors: dict[str, Any] = {}  # by name, those that were alive when last seen
        self._finished: set[str] = set()
        self._away_since: float | None = None

    @property
    def ended(self) -> bool:
        return bool(self._finished) and not self._actors and self._places <= self._finished

    @property
    def away(self) -> bool:
        return self._away_since is not None

    # the workers

    async def supervise(self, group: Any) -> None:
        """A worker on every node that is alive, also on one that joined or came back."""
        seen, told = time.monotonic(), False
        while self.broken is None and not self._cancelled:
            nodes = await self._nodes()
            if not nodes and not told and self._away_since is None and time.monotonic() - seen > _NO_NODE_S:
                told = True
                why = f"the cluster has none that is alive and has the resource {MARK!r}; is there an autoscaler?"
                self._log.warning("cluster.no_node", wait_s=round(_NO_NODE_S), why=why)
            if nodes:
                seen, told = time.monotonic(), False
                there = {f"{self._run_id}/{node}/{n}": node for node in nodes for n in range(self._per_node)}
                self._places = set(there)
                for name in self._places - self._actors.keys() - self._finished:
                    await self._start(name, there[name], group)
            await anyio.sleep(_LOOK_S)

    async def _nodes(self) -> list[str]:
        began = time.monotonic()
        try:
            found = await _off_loop(lambda: _live_nodes(self._ray, marked=self._marked), limit_s=_NODES_S)
        except (self._ray.exceptions.RayError, OSError, RuntimeError, TimeoutError) as error:
            self._away_since = since = self._away_since or began
            away_s = round(time.monotonic() - since)
            self._log.warning("cluster.away", away_s=away_s, error=str(error) or type(error).__name__)
            if away_s >= _AWAY_S:
                self.broken = Error(f"the head of the Ray cluster has not answered for {away_s} s")
            return []
        self._away_since = None
        return found

    async def _start(self, name: str, node: str, group: Any) -> None:
        try:
            with anyio.CancelScope(shield=True):  # one that starts while the run ends must be known, to be dismissed
                self._actors[name] = await _off_loop(
                    lambda: _actor(self._ray, name, node, self._posting, self._detached)
                )
        except (self._ray.exceptions.RayError, ValueError, TimeoutError) as error:  # the node went away meanwhile
            self._log.warning("worker.not_started", node=node, error=str(error))
            return
        group.start_soon(self._follow, name, self._actors[name])

    async def _follow(self, name: str, actor: Any) -> None:
        self.note_start(name)
        try:
            ended: WorkerEnd = await actor.run.remote()
        except self._ray.exceptions.RayError as error:  # its leases run out and its attempts are done elsewhere
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self.note_death(name, reason)
            is_over = False
        else:
            is_over = self.note_end(name, ended)
        await self._remove(actor)  # it may live on with nothing to do, and would be found in place of a new one
        if is_over:
            self._finished.add(name)
        else:
            await anyio.sleep(self.pause_s(name))
        self._actors.pop(name, None)

    async def _remove(self, actor: Any) -> None:
        """Of one that is dead already there is nothing to remove; a cluster that is too busy to do it is asked again later."""
        wrong = (self._ray.exceptions.RayError, TimeoutError)
        with anyio.CancelScope(shield=True), suppress(*wrong):  # the run may end at this moment
            await _off_loop(lambda: self._ray.kill(actor))

    async def dismiss(self) -> None:
        """Every worker that is left gives its attempts back, removes its sandboxes and ends."""
        actors, self._actors = self._actors, {}
        if self.away:  # they lose their leases, or end by themselves
            return
        async with anyio.create_task_group() as group:
            for actor in actors.values():
                group.start_soon(self._dismiss, actor)

    async def _dismiss(self, actor: Any) -> None:
        try:
            with anyio.move_on_after(_STOP_S):
                await actor.stop.remote()
            await _off_loop(lambda: self._ray.kill(actor))
        except (self._ray.exceptions.RayError, TimeoutError) as error:  # it is dead already, which is what was wanted
            self._log.info("worker.gone", error=type(error).__name__)


def connect_ray(address: str) -> Any:
    """Ray itself, this process being a driver of the cluster at `address`."""
    if find_spec("ray") is None:
        raise MissingExtra("ray", "ray", why="the executor 'ray'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray: Any = import_module("ray")
    if not ray.is_initialized():
        try:
            _join(ray, address)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster answers at {address!r}: {str(error).splitlines()[0]}",
                hint="start one with `ray start --head`, or give --ray-address HOST:PORT",
            ) from error
    return ray


def _join(ray: Any, address: str) -> None:
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():  # Ray itself would wait half a minute in vain
        socket.create_connection((host.rpartition("/")[2], int(port)), timeout=5).close()
    ray.init(
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="ERROR",
        **({"include_dashboard": False} if address == "local" else {}),
    )


def choose_nodes(nodes: Iterable[Mapping[str, Any]], *, marked: bool = False) -> list[str]:
    """Those that are alive; where some say that they are for rollouts, those alone, and if they must be `marked`, no others."""
    alive = [node for node in nodes if node["Alive"]]
    chosen = [node for node in alive if node.get("Resources", {}).get(MARK)]
    return sorted(node["NodeID"] for node in (chosen if marked else chosen or alive))


def _live_nodes(ray: Any, *, marked: bool = False) -> list[str]:
    return choose_nodes(ray.nodes(), marked=marked)


def count_gpus(nodes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The GPUs of each node that rollouts run on, as Ray counts them."""
    nodes = list(nodes)
    chosen = set(choose_nodes(nodes))
    return {node["NodeID"]: int(node.get("Resources", {}).get("GPU", 0)) for node in nodes if node["NodeID"] in chosen}


def check_gpus(work: Assignment, most: int) -> None:
    """What needs more than any node has would wait for ever. Where none has any, each such attempt is refused by its node."""
    for task in work.tasks.values():
        if most and (task.resources.gpus or 0) > most:
            raise ConfigError(
                f"task {task.id!r} needs {task.resources.gpus} GPUs, and no node for rollouts has more than {most}",
                hint="add a node that has as many (`ray start --num-gpus`), or leave the task out",
            )


def _request_nodes(count: int) -> None:
    """Of the autoscaler: as many marked nodes, in place of what was requested before."""
    sdk: Any = import_module("ray.autoscaler.sdk")
    sdk.request_resources(bundles=[{MARK: 1}] * count)


def _actor(ray: Any, name: str, node: str, posting: NodeAssignment, detached: bool) -> Any:
    strategies: Any = import_module("ray.util.scheduling_strategies")
    nodes = ray.nodes()
    if posting.gpus is not None:
        posting = msgspec.structs.replace(posting, gpus=count_gpus(nodes).get(node, 0))
    return (
        ray.remote(NodeWorker)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached" if detached else None,
            get_if_exists=True,
            num_cpus=0,
            resources={MARK: HELD} if node in choose_nodes(nodes, marked=True) else None,
            max_restarts=0,
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        )
        .remote(posting)
    )


async def _off_loop(call: Callable[[], T], *, limit_s: float = _CALL_S) -> T:
    """Ray's own calls block; none of them may stop the loop, nor wait for ever."""
    with anyio.fail_after(limit_s):
        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True)


def _reachable(where: str) -> str:
    """The store as a worker names it, whose working directory is another."""
    return where if "://" in where else str(Path(where).absolute())


def read_secrets(variable: str | None) -> dict[str, str]:
    """The one variable of this machine that workers need, by its name."""
    value = os.environ.get(variable) if variable is not None else None
    return {variable: value} if variable is not None and value else {}
