"""`ProcessExecutor`: a run's workers as processes of this machine, for more cores than one Python process can use.

They meet in the store like all workers: the same leases, the same fencing, SQLite or PostgreSQL. The driver starts them, starts
one again that died, after giving its attempts back, and shows what the store says. Workers end with their driver.
"""

from __future__ import annotations

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
from rollyard.runs.run.store_retry import insist
from rollyard.sandbox.local.memory import MachineMemory

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
        available = MachineMemory().read({}).available
        if (most := max(1, available // WORKER_BYTES)) < self._workers:
            raise ConfigError(
                f"{self._workers} workers hold {self._workers * WORKER_BYTES // 10**6} MB before they begin, and this machine "
                f"has {available // 10**6} MB available",
                hint=f"ask for at most {most}",
            )

    @asynccontextmanager
    async def open(self, work: Assignment, given: RunResources, record: Record) -> AsyncGenerator[Workers]:
        slots = work.config.slots(self._workers)
        posting = _pack(NodeAssignment(work=work, store=given.store.where, slots=slots, sharers=self._workers))
        await record()
        crew = _ProcessWorkers(work, given, posting)
        await crew.listen()
        try:
            async with anyio.create_task_group() as group:
                for number in range(self._workers):
                    group.start_soon(crew.keep, f"worker {number + 1}")
                try:
                    yield crew
                finally:
                    with anyio.CancelScope(shield=True):
                        await crew.dismiss()
                    group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await crew.give_back()


class _ProcessWorkers(DistantWorkers):
    def __init__(self, work: Assignment, given: RunResources, posting: bytes) -> None:
        super().__init__(work, given)
        self._posting = posting
        self._living: dict[str, Process] = {}
        self._left = 0  # ended by themselves
        self._started = 0
        self._dismissed = False

    @property
    def ended(self) -> bool:
        return self._left > 0 and self._left == self._started

    async def keep(self, name: str) -> None:
        """One worker, started again for as long as it dies without a word."""
        self._started += 1
        while self.broken is None and not self._dismissed:
            self.note_start(name)
            said, ended = await self._run(name)
            if self._dismissed or (ended is not None and self.note_end(name, ended)):
                break
            if ended is None:
                self.note_death(name, said[-1] if said else "it said nothing")
            await self.give_back()
            await anyio.sleep(self.pause_s(name))
        self._left += 1

    async def _run(self, name: str) -> tuple[deque[str], WorkerEnd | None]:
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
                        await process.stdin.send(self._posting)
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
        for lease in await insist(lambda: self._given.store.leases(self._run_id)):
            if owner_is_dead(lease.owner):
                await insist(lambda lease=lease: self._given.store.expire(lease))


def _pack(posting: NodeAssignment) -> bytes:
    try:
        return pickle.dumps(sys.path) + pickle.dumps(posting)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise Unsupported(
            f"what the run was given cannot go to another process: {error}",
            hint="define verifiers and hooks at the top of a module, or run without workers",
        ) from error
