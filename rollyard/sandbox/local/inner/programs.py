"""The programs of a sandbox: each has a keeper, a fork of the supervisor, and a job that outlives it for those who ask later."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket

from rollyard.sandbox.local.inner import keeper, protocol, users
from rollyard.sandbox.local.inner.microvm import Microvm
from rollyard.sandbox.local.inner.path_view import PathView
from rollyard.sandbox.local.inner.protocol import Message
from rollyard.sandbox.local.inner.requests import Answer, Client, Request

_FINISHED_KEPT = 4096
_TICK = os.sysconf("SC_CLK_TCK")


class _Job:
    def __init__(self, job_id: str, pid: int, control: socket.socket, *, ephemeral: bool) -> None:
        self.id, self.pid, self.control, self.ephemeral = job_id, pid, control, ephemeral
        self.program: int | None = None
        self.result: Message | None = None
        self.started: list[tuple[Client, int]] = []
        self.waiting: list[tuple[Client, int]] = []
        self.feed: int | None = None
        self.killed = False


class Programs:
    def __init__(
        self,
        poller: select.poll,
        answer: Answer,
        *,
        confine: int | None,
        view: PathView | None,
        gvisor: bool,
        machine: Microvm | None,
    ) -> None:
        self.keepers: set[int] = set()
        self._poller, self._answer = poller, answer
        self._confine, self._view, self._gvisor, self._machine = confine, view, gvisor, machine
        self._jobs: dict[str, _Job] = {}
        self._by_control: dict[int, _Job] = {}
        self._spare: tuple[int, socket.socket] | None = None  # it has kept a program before and waits for the next

    @property
    def names(self) -> list[str]:
        return list(self._jobs)

    @property
    def running(self) -> bool:
        return any(job.result is None for job in self._jobs.values())

    def expect_end(self) -> None:
        """All of them are about to be killed, so none is lost."""
        for job in self._jobs.values():
            job.killed = True

    def receive(self, fd: int) -> bool:
        """A word of a keeper's; False if the descriptor is none of theirs."""
        job = self._by_control.get(fd)
        if job is not None:
            self._receive(job)
        return job is not None

    def op_run(self, asked: Request) -> Message | None:
        message, fds = asked.message, asked.fds
        known = self._jobs.get(message["job"])
        if known is not None:
            return self._rejoin(known, asked)
        user = users.find(message["user"])
        env = {"HOME": user.home, "USER": user.name, "LOGNAME": user.name, **message["env"]}
        launch = {**message, "env": env, "uid": user.uid, "gid": user.gid, "groups": user.groups}
        launch["gvisor"], launch["microvm"] = self._gvisor, self._machine is not None
        pid, control = self._send_to_keeper(launch, fds[:3])
        job = _Job(message["job"], pid, control, ephemeral=message["ephemeral"])
        if len(fds) > 3:
            job.feed = os.dup(fds[3])
        self._jobs[job.id] = job
        self._by_control[control.fileno()] = job
        self._poller.register(control.fileno(), select.POLLIN)
        (job.waiting if message["wait"] else job.started).append((asked.client, asked.number))
        return None

    def _rejoin(self, job: _Job, asked: Request) -> Message | None:
        """At most once: a launch with a known id joins that job instead of starting another."""
        if asked.message["wait"] and job.result is None:
            job.waiting.append((asked.client, asked.number))
            return None
        return {"job": job.id, "pid": job.program, "known": True, **(job.result or {})}

    def op_wait(self, asked: Request) -> Message | None:
        job = self._job(asked)
        if job.result is None and not asked.message.get("now"):
            job.waiting.append((asked.client, asked.number))
            return None
        return {"job": job.id, "pid": job.program, "running": job.result is None, **(job.result or {})}

    def op_kill(self, asked: Request) -> Message:
        """The keeper ends its whole tree. `force` does it from here, for a keeper that was itself stopped or killed."""
        job = self._jobs.get(asked.message["job"])
        if job is None or job.control.fileno() not in self._by_control:
            return {}
        job.killed = True
        if asked.message.get("force"):
            keeper.kill_below(job.pid, lambda: False)  # what slips through becomes a stray, and those end too
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.pid, signal.SIGKILL)
        else:
            with contextlib.suppress(OSError):
                protocol.send(job.control, {"op": "kill"})
        return {}

    def op_stdin(self, asked: Request) -> Message:
        job = self._job(asked)
        if asked.message.get("close") and job.feed is not None:
            os.close(job.feed)
            job.feed = None
            return {}
        if job.feed is None:
            raise OSError(errno.EPIPE, "stdin is closed", job.id)
        return {"fds": (os.dup(job.feed),)}

    def op_cpu(self, asked: Request) -> Message:
        job = self._job(asked)
        if self._machine or not os.path.exists("/proc/self/stat"):  # nothing to count with: unknown is not zero
            return {"cpu_s": None}
        ticks = sum(_ticks(job.pid)[2:]) + sum(sum(_ticks(pid)) for pid in keeper.descendants(job.pid))
        return {"cpu_s": ticks / _TICK}

    def _job(self, asked: Request) -> _Job:
        job = self._jobs.get(asked.message["job"])
        if job is None:
            raise OSError(errno.ESRCH, "no such job", asked.message["job"])
        return job

    # -- keepers

    def _send_to_keeper(self, launch: Message, fds: list[int]) -> tuple[int, socket.socket]:
        """The spare keeper takes it, if there is one and nobody killed it."""
        if self._spare is not None:
            spare, self._spare = self._spare, None
            try:
                protocol.send(spare[1], launch, fds)
                return spare
            except OSError:
                spare[1].close()
        fresh = self._fork_keeper()
        protocol.send(fresh[1], launch, fds)
        return fresh

    def _fork_keeper(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                keeper.serve(theirs, self._confine, self._view)
            finally:
                os._exit(70)
        theirs.close()
        ours.setblocking(False)
        self.keepers.add(pid)
        return pid, ours

    def _receive(self, job: _Job) -> None:
        try:
            got = protocol.receive(job.control)
        except BlockingIOError:
            return
        except OSError:
            got = None
        if got is None:
            if job.result is None:
                self._finish(job, {"exit_code": None, "signal": signal.SIGKILL, "lost": not job.killed})
            self._forget_control(job)
            return
        message = got[0]
        if "idle" in message:
            self._keep_or_dismiss(job)
        elif "pid" in message:
            job.program = message["pid"]
            for client, number in job.started:
                self._answer(client, number, {"ok": {"job": job.id, "pid": job.program}})
            job.started.clear()
        elif "error" in message:
            self._answer_all(job, message)
            self._jobs.pop(job.id, None)
        else:
            self._finish(job, message)

    def _finish(self, job: _Job, result: Message) -> None:
        job.result = result
        self._answer_all(job, {"ok": {"job": job.id, "pid": job.program, **result}})
        if job.feed is not None:
            os.close(job.feed)
            job.feed = None
        if job.ephemeral:
            self._jobs.pop(job.id, None)
        elif len(self._jobs) > _FINISHED_KEPT:
            oldest = next((known for known in self._jobs.values() if known.result is not None), None)
            if oldest is not None:
                del self._jobs[oldest.id]

    def _answer_all(self, job: _Job, message: Message) -> None:
        for client, number in (*job.started, *job.waiting):
            self._answer(client, number, message)
        job.started.clear()
        job.waiting.clear()

    def _keep_or_dismiss(self, job: _Job) -> None:
        """A keeper with nothing left to keep waits for the next program, if no other does."""
        self._by_control.pop(job.control.fileno(), None)
        self._poller.unregister(job.control.fileno())
        if self._spare is None:
            self._spare = (job.pid, job.control)
        else:
            job.control.close()

    def _forget_control(self, job: _Job) -> None:
        fd = job.control.fileno()
        self._by_control.pop(fd, None)
        with contextlib.suppress(KeyError):
            self._poller.unregister(fd)
        job.control.close()


def _ticks(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return [0, 0, 0, 0]
    return [int(word) for word in fields[11:15]]
