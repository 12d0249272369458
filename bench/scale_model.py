"""A discrete-event model of a run on many machines, fed with constants that `bench/scale.py` measures.

A closed system: `concurrent` rollouts are always in flight. Each claims (database), opens its sandbox (node CPU and the worker's
own loop), takes `turns` turns (gate on the worker, model server, one committed call, then the tool on the node's CPU), is judged
and committed. Every resource is a queue with servers; a rollout that finds them busy waits. Heartbeats and event batches, which
come by worker and not by rollout, take their share of the database. What one worker writes at the same time shares a transaction,
as in `rollyard/store/shared_writes.py`. The first bottleneck is the resource that is used most.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator

import msgspec

from rollyard.store.batches import DISTANT
from rollyard.store.shared_writes import UNDER_WAY


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one core unless said otherwise."""

    worker_rollout_s: float  # the worker's loop, per rollout beside its calls
    worker_call_s: float  # and per model call: gate, capture, commit
    node_rollout_s: float  # sandbox, agent and verifier processes, per rollout
    node_call_s: float  # the agent's own share per turn
    store_txn_s: float  # the database server's CPU per transaction
    store_write_s: float  # and per write in it
    flush_s: float = 2.0  # between a worker's batches of events
    lease_s: float = 60.0
    gather_share: float = DISTANT.share  # of its own time that a call waits for other writes
    gather_s: float = DISTANT.most_s  # and at most
    turns_s: float = 0.001  # that every write waits: two turns of a worker's loop


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """The machines. `model_calls` is how many calls the model servers take at once."""

    node_cores: int = 32
    rollouts_per_node: int = 256
    workers_per_node: int = 1
    store_cores: int = 16
    model_calls: int = 1_000_000
    turns: int = 20
    answer_s: float = 5.0  # a model's answer, on average
    tool_s: float = 2.0  # a tool's wall time, on average, beside its CPU


class Server:
    """`count` equal servers and a line before them; keeps how long they were busy."""

    def __init__(self, name: str, count: int, background: float = 0.0) -> None:
        self.name, self.count = name, count
        self.background = background  # share of the time that is taken by what is not simulated
        self.free = [0.0] * count
        self.busy = 0.0
        heapq.heapify(self.free)

    def serve(self, now: float, seconds: float) -> float:
        """When a job that comes now is done."""
        seconds /= max(1e-6, 1.0 - self.background)
        start = max(now, heapq.heappop(self.free))
        heapq.heappush(self.free, start + seconds)
        self.busy += seconds
        return start + seconds

    def used(self, span: float) -> float:
        return min(1.0, self.busy / (span * self.count) + self.background)


class Batch:
    """Writes of one worker that share a transaction."""

    def __init__(self, due: float) -> None:
        self.due, self.size = due, 0
        self.done: float | None = None


class Writer:
    """One worker's writes: each waits a moment for others, and two transactions are under way at most."""

    def __init__(self, store: Server, constants: Constants) -> None:
        self._store, self._constants = store, constants
        self._open: Batch | None = None
        self._under_way: list[float] = []  # when they end

    def write(self, now: list[float], wait_s: float) -> Iterator[float]:
        batch = self._open = self._open or Batch(now[0] + wait_s)
        batch.due = min(batch.due, now[0] + wait_s)
        batch.size += 1
        while batch.done is None:
            yield max(now[0], batch.due)
            if batch.done is None and now[0] >= batch.due:
                self._hand_in(batch, now[0])
        if batch.done > now[0]:
            yield batch.done

    def _hand_in(self, batch: Batch, now: float) -> None:
        self._under_way = [end for end in self._under_way if end > now]
        if len(self._under_way) >= UNDER_WAY:
            batch.due = min(self._under_way)
            return
        self._open = None
        constants = self._constants
        batch.done = self._store.serve(now, constants.store_txn_s + batch.size * constants.store_write_s)
        self._under_way.append(batch.done)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    concurrent: int
    nodes: int
    rollouts_per_s: float
    unhindered_per_s: float  # with no line anywhere
    wall_s: float
    used: dict[str, float]

    @property
    def bottleneck(self) -> str:
        return max(self.used, key=lambda name: self.used[name])


def simulate(constants: Constants, site: Site, concurrent: int, *, rounds: float = 1.5, seed: int = 1) -> Outcome:
    chance = random.Random(seed)
    nodes = max(1, -(-concurrent // site.rollouts_per_node))
    workers = nodes * site.workers_per_node
    by_worker = 2 * 3 / constants.lease_s + 1 / constants.flush_s  # heartbeats, and what its rollouts told
    alone_s = constants.store_txn_s + constants.store_write_s
    store = Server("database CPU", site.store_cores, min(0.95, workers * by_worker * alone_s / site.store_cores))
    writers = [Writer(store, constants) for _ in range(workers)]
    model = Server("model servers", min(site.model_calls, 2_000_000) if site.model_calls < concurrent else concurrent)
    loops = [Server("worker loop", 1) for _ in range(workers)]
    cpus = [Server("node CPU", site.node_cores) for _ in range(nodes)]

    def life(number: int, at: float) -> Iterator[float]:
        loop, cpu, writer = loops[number % workers], cpus[number % nodes], writers[number % workers]
        yield store.serve(at, alone_s)  # the claim
        at = loop.serve(now[0], constants.worker_rollout_s / 2)
        yield cpu.serve(at, constants.node_rollout_s / 2)
        yield from writer.write(now, constants.turns_s)  # the session
        for _ in range(site.turns):
            yield loop.serve(now[0], constants.worker_call_s)
            took = chance.expovariate(1 / site.answer_s)
            yield model.serve(now[0], took)
            yield from writer.write(now, min(constants.gather_share * took, constants.gather_s))
            yield cpu.serve(now[0], constants.node_call_s) + chance.expovariate(1 / site.tool_s)
        yield from writer.write(now, constants.turns_s)  # the session's end
        yield cpu.serve(now[0], constants.node_rollout_s / 2)
        yield loop.serve(now[0], constants.worker_rollout_s / 2)
        yield from writer.write(now, constants.turns_s)  # the rollout

    now = [0.0]
    ideal = site.turns * (site.answer_s + site.tool_s) + constants.node_rollout_s + constants.worker_rollout_s
    ideal += site.turns * (constants.worker_call_s + constants.node_call_s)
    horizon = ideal * rounds
    walls, done = run(life, now, concurrent, ideal, horizon, chance)
    kinds = {"worker loop": loops, "node CPU": cpus, "database CPU": [store]}
    used = {name: max(server.used(now[0]) for server in servers) for name, servers in kinds.items()}
    if site.model_calls < concurrent:
        used["model servers"] = model.used(now[0])
    return Outcome(
        concurrent=concurrent,
        nodes=nodes,
        rollouts_per_s=done / max(1e-9, now[0] - horizon / 2) if now[0] > horizon / 2 else 0.0,
        unhindered_per_s=concurrent / ideal,
        wall_s=sum(walls) / len(walls) if walls else float("nan"),
        used={name: round(value, 3) for name, value in used.items()},
    )


def run(
    life: Callable[[int, float], Iterator[float]],
    now: list[float],
    concurrent: int,
    ideal: float,
    horizon: float,
    chance: random.Random,
) -> tuple[list[float], int]:
    """Begin spread over one life, let another begin where one ends, count the second half."""
    queue: list[tuple[float, int, float, Iterator[float] | None]] = []
    for number in range(concurrent):
        queue.append((chance.uniform(0, ideal / 2), number, 0.0, None))
    heapq.heapify(queue)
    walls: list[float] = []
    done = 0
    while queue:
        at, number, began, steps = heapq.heappop(queue)
        if at > horizon:
            break
        now[0] = at
        if steps is None:
            began, steps = at, life(number, at)
        following = next(steps, None)
        if following is not None:
            heapq.heappush(queue, (following, number, began, steps))
            continue
        if at > horizon / 2:
            walls.append(at - began)
            done += 1
        heapq.heappush(queue, (at, number, at, None))
    return walls, done
