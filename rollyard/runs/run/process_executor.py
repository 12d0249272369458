"""`ProcessExecutor`: a run's workers as processes of this machine, for more cores than one Python process can use.

They meet in the store like all workers: the same leases, the same fencing, SQLite or PostgreSQL. The driver starts them, starts
one again that died, after giving its attempts back, and shows what the store says. Workers end with their driver.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import msgspec
from anyio.abc import ByteReceiveStream, Process

from rollyard.core.errors import ConfigError, Unsupported
from rollyard.runs.run.assignment import Assignment, owner_is_dead
from rollyard.runs.run.distant_worker import NodeAssignment, WorkerEnd
from rollyard.runs.run.distant_workers import DistantWorkers
from rollyard.runs.run.executor import Record, RunResources, Workers
from rollyard.runs.run.store_retry import repeat_until_done
from rollyard.sandbox.local.cgroups import find_own
from rollyard.sandbox.local.memory import MachineMemory

_PER_CORE = 8  # workers; one alone can keep a core busy
WORKER_BYTES = 60 * 2**20  # of a process that has no rollout yet, measured
_STOP_S = 45.0  # for a worker to close its sandboxes
_TAIL = 20  # lines of a worker's own words that are kept


class ProcessExecutor:
    """`workers` processes share the run's `parallel` rollouts."""

    name = "processes"

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        self._workers = workers

    async def check(self, work: Assignment, given: RunResources) -> None:
        if not isinstance(given.sandbox, str):
            raise Unsupported("workers in other processes open their own sandboxes", hint="give the backend's name")
        if given.gate is not None or given.policies:
            raise Unsupported(
                "workers in other processes open their own gate and policies",
                hint='leave out gate= and policies=, and name them in the config: policies={"policy": "upstream:URL"}',
            )
        if self._workers > work.config.slots():
            raise ConfigError(
                f"{self._workers} workers for {work.config.parallel} rollouts at a time",
                hint="raise parallel, or ask for fewer workers",
            )
        self._refuse_too_many()

    def _refuse_too_many(self) -> None:
        cores = len(os.sched_getaffinity(0))
        if self._workers > (most := cores * _PER_CORE):
            raise ConfigError(f"{self._workers} workers for {cores} cores", hint=f"ask for at most {most}")
        available = MachineMemory(groups=find_own()).read({}).available
        if self._workers > (most := max(1, available // WORKER_BYTES)):
            raise ConfigError(
                f"{self._workers} workers hold {self._workers * WORKER_BYTES // 10**6} MB before they begin, and "
                f"{available // 10**6} MB are available here",
                hint=f"ask for at most {most}",
            )

    @asynccontextmanager
    async def open(self, work: Assignment, given: RunResources, record: Record) -> AsyncGenerator[Workers]:
        packed = _pack(NodeAssignment(work=work, store=given.store.where, slots=work.config.slots(), alone=True))
        await record()
        shares = _divide(work.config.slots(), await self._count(work, given))
        crew = _ProcessWorkers(work, given, packed)
        await crew.listen()
        try:
            async with anyio.create_task_group() as group:
                for number, slots in enumerate(shares, 1):
                    group.start_soon(crew.keep, f"worker {number}", pickle.dumps((slots, len(shares))))
                try:
                    yield crew
                finally:
                    with anyio.CancelScope(shield=True):
                        await crew.dismiss()
                    group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await crew.give_back()

    async def _count(self, work: Assignment, given: RunResources) -> int:
        """No more than there are attempts to do, unless more may come."""
        if work.stays or work.config.tree is not None:
            return self._workers
        counts = await given.store.progress(work.run_id)
        return min(self._workers, counts.get("owed", 0) + counts.get("leased", 0))


def _divide(slots: float, count: int) -> list[float]:
    """The slots of each worker; together they are no more than `slots`."""
    if math.isinf(slots):
        return [slots] * count
    least, over = divmod(int(slots), max(1, count))
    return [least + (number < over) for number in range(count)]


class _ProcessWorkers(DistantWorkers):
    def __init__(self, work: Assignment, given: RunResources, packed: bytes) -> None:
        super().__init__(work, given)
        self._packed = packed
        self._living: dict[str, Process] = {}
        self._left = 0  # ended by themselves
        self._started = 0
        self._dismissed = False

    @property
    def ended(self) -> bool:
        return self._left > 0 and self._left == self._started

    async def keep(self, name: str, share: bytes) -> None:
        """One worker with its share of the slots, started again for as long as it dies without a word."""
        self._started += 1
        while self.broken is None and not self._dismissed:
            self.note_start(name)
            said, ended = await self._run(name, share)
            if self._dismissed or (ended is not None and self.note_end(name, ended)):
                break
            if ended is None:
                self.note_death(name, said[-1] if said else "it said nothing")
            await self.give_back()
            await anyio.sleep(self.pause_s(name))
        self._left += 1

    async def _run(self, name: str, share: bytes) -> tuple[deque[str], WorkerEnd | None]:
        said, answer = deque[str](maxlen=_TAIL), bytearray()
        command = [sys.executable, "-m", "rollyard.runs.run.process_worker"]
        # In a session of its own: Ctrl-C at the terminal is for the driver, which lets workers close their sandboxes.
        async with await anyio.open_process(command, start_new_session=True) as process:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            self._living[name] = process
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._listen_to, name, process.stderr, said)
                    try:
                        await process.stdin.send(self._packed + share)
                        if self._dismissed:
                            await process.stdin.aclose()
                    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                        pass  # it died at once, or was dismissed meanwhile: its end is seen below
                    async for data in process.stdout:
                        answer += data
                await process.wait()
            finally:
                self._living.pop(name, None)
        return said, msgspec.json.decode(answer, type=WorkerEnd) if answer else None

    async def _listen_to(self, name: str, stderr: ByteReceiveStream, said: deque[str]) -> None:
        rest = b""
        async for data in stderr:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                said.append(line.decode(errors="replace"))
                self._log.warning("worker.said", worker=name, line=said[-1])

    async def dismiss(self) -> None:
        self._dismissed = True
        async with anyio.create_task_group() as group:
            for name, process in list(self._living.items()):
                group.start_soon(self._end, name, process)

    async def _end(self, name: str, process: Process) -> None:
        assert process.stdin is not None
        await process.stdin.aclose()
        with anyio.move_on_after(_STOP_S):
            await process.wait()
            return
        self._log.warning("worker.killed", worker=name, why=f"it did not end in {_STOP_S:.0f} s")
        process.send_signal(signal.SIGKILL)
        await process.wait()

    async def give_back(self) -> None:
        """What dead workers held is owed again at once."""
        for lease in await repeat_until_done(lambda: self._given.store.leases(self._run_id)):
            if owner_is_dead(lease.owner):
                await repeat_until_done(lambda lease=lease: self._given.store.expire(lease))


def _pack(posting: NodeAssignment) -> bytes:
    try:
        return pickle.dumps(sys.path) + pickle.dumps(posting)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise Unsupported(
            f"what the run was given cannot go to another process: {error}",
            hint="define verifiers and hooks at the top of a module, or run without workers",
        ) from error
