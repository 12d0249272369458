"""`serve gate --processes N`: processes that serve one port, and the one that starts them and starts again what died.

The supervisor answers nothing and opens neither policy nor store. It has what must outlive each process: the listening sockets,
so that no connection is refused, and the inboxes, so that nothing that was sent to a process is lost with it. The processes are
forks of it and share its memory until they change it. They end when it ends, however it does.

One more process writes to the store for all of them. It starts first and ends last.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rollyard.core.errors import Error
from rollyard.core.log import Log
from rollyard.gate.processes import GateProcess

STOP_S = 30.0  # for a process to end what it is doing
MOST_FAILED = 5  # starts of one process in a row that come to nothing, before the whole gate gives up
QUICK_S, AGAIN_S = 5.0, 1.0  # a process that lived so short is started again only after a while
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_READY = b"ready"
_log = Log("rollyard.runs.gate_processes")


class GateGaveUp(Error):
    """A process of the gate dies whenever it is started."""


class _Living(NamedTuple):
    number: int  # its place among the processes; the one past them is the writer's
    began: float
    reading: int | None  # the end of a pipe on which it says how its start went; None once that was read


class Start(NamedTuple):
    """What a process is started with: its place in the gate, and where links to the one that writes are sent. It calls `ready`
    once it serves, and ends when `orphaned` can be read."""

    process: GateProcess
    writer: socket.socket
    ready: Callable[[], None]
    orphaned: int


class WriterStart(NamedTuple):
    """What the process that writes is started with: where links to it arrive, and as above."""

    inbox: socket.socket
    ready: Callable[[], None]
    orphaned: int


class GateSupervisor:
    """`serve` is what each process does, from its start to its end, and `write` what the one does that writes for them."""

    def __init__(
        self,
        count: int,
        serve: Callable[[Start], None],
        write: Callable[[WriterStart], None],
        *,
        listener: socket.socket,
        unix_listener: socket.socket | None,
    ) -> None:
        self._serve, self._write = serve, write
        self._listener, self._unix_listener = listener, unix_listener
        self._writer = count
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count + 1)]
        for pair in pairs:
            for end in pair:
                end.setblocking(False)
        *self._inboxes, self._writer_inbox = (inbox for inbox, _ in pairs)
        *self._outboxes, self._writer_outbox = (outbox for _, outbox in pairs)
        self._alive, self._lifeline = os.pipe()  # its end is seen by all when this process is gone
        self._living: dict[int, _Living] = {}  # by pid
        self._failed = [0] * (count + 1)
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def start(self) -> None:
        """All are ready when this returns. They are started one after the other, so that what is wrong is said once."""
        gc.collect()
        gc.freeze()
        for index in (self._writer, *range(self._writer)):
            pid = self._fork(index, again=False)
            living = self._living[pid]
            said = _read(living.reading)
            self._living[pid] = living._replace(reading=None)
            if said != _READY:
                self.stop()
                raise _error_of(said, self._name(index))

    def keep(self) -> None:
        """Until SIGTERM or SIGINT, or until a process cannot be started any more."""
        owed: dict[int, float] = {}  # index -> when to start it again
        while True:
            now = time.monotonic()
            for index in [index for index, at in owed.items() if at <= now]:
                del owed[index]
                self._fork(index, again=True)
            wait_s = max(0.0, min(owed.values()) - now) if owed else 3600.0
            received = signal.sigtimedwait(_SIGNALS, wait_s)
            if received is not None and received.si_signo != signal.SIGCHLD:
                return
            for index, lived_s, code, started in self._reap():
                self._failed[index] = 0 if started else self._failed[index] + 1
                if self._failed[index] >= MOST_FAILED:
                    raise GateGaveUp(
                        f"{self._name(index)} could not be started {MOST_FAILED} times",
                        hint="its own words are above",
                    )
                _log.warning("gate.process_died", process=self._name(index), code=code, lived_s=round(lived_s, 1))
                owed[index] = time.monotonic() + (AGAIN_S if lived_s < QUICK_S else 0.0)

    def stop(self) -> None:
        """All end what they are doing; those that do not are killed."""
        self._stop([pid for pid, living in self._living.items() if living.number != self._writer])
        self._stop(list(self._living))

    def _stop(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while self._living.keys() & pids and (left := deadline - time.monotonic()) > 0:
            self._reap()
            if self._living.keys() & pids:
                signal.sigtimedwait((signal.SIGCHLD,), min(left, 1.0))
        for pid in self._living.keys() & pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            del self._living[pid]

    def _name(self, index: int) -> str:
        return "the process that writes to the store" if index == self._writer else f"process {index} of the gate"

    def _reap(self) -> list[tuple[int, float, int, bool]]:
        """Of each that ended: its number, how long it lived, its exit code, and whether it had started at all."""
        ended: list[tuple[int, float, int, bool]] = []
        for pid, (index, began, reading) in list(self._living.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._living[pid]
                started = reading is None or _read(reading) == _READY
                ended.append((index, time.monotonic() - began, os.waitstatus_to_exitcode(status), started))
        return ended

    def _fork(self, index: int, *, again: bool) -> int:
        reading, telling = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.close(self._lifeline)
            os._exit(self._run(index, again, telling))  # what is on the stack is the supervisor's
        os.close(telling)
        self._living[pid] = _Living(index, time.monotonic(), reading)
        return pid

    def _run(self, index: int, again: bool, telling: int) -> int:
        """In the new process: its exit code."""
        with suppress(OSError):  # what `top` and `ps` show
            name = "rollyard-writer" if index == self._writer else f"rollyard-gate-{index}"
            Path("/proc/self/comm").write_text(name)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            self._start(index, again, lambda: _tell(telling, _READY))
        except Error as error:
            if again:
                _log.error("gate.process_failed", process=self._name(index), error=str(error))
            _tell(telling, pickle.dumps(error))
            return 3
        except KeyboardInterrupt:
            return 130
        except BaseException:  # noqa: BLE001 - a bug shows its trace, as in any other process
            traceback.print_exc()
            return 1
        return 0

    def _start(self, index: int, again: bool, ready: Callable[[], None]) -> None:
        if index == self._writer:
            self._write(WriterStart(self._writer_inbox, ready, self._alive))
            return
        process = GateProcess(
            index,
            listener=self._listener,
            unix_listener=self._unix_listener,
            inbox=self._inboxes[index],
            outboxes=tuple(self._outboxes),
            again=again,
        )
        self._serve(Start(process, self._writer_outbox, ready, self._alive))


def _read(pipe: int | None) -> bytes:
    if pipe is None:
        return b""
    with os.fdopen(pipe, "rb") as file:
        return file.read()


def _tell(pipe: int, said: bytes) -> None:
    """At most once; the supervisor does not listen any more where a process was started again."""
    with suppress(OSError), os.fdopen(pipe, "wb") as file:
        file.write(said)


def _error_of(said: bytes, name: str) -> Error:
    """The process's own error, where it could say one."""
    if not said:
        return GateGaveUp(f"{name} died at its start", hint="its own words are above")
    return pickle.loads(said)  # noqa: S301 - of our own fork
