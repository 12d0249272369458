"""PID 1 of a sandbox: answers its owner (and whoever attached), starts keepers, reaps, and ends everything in time.

It is a fork of the zygote and holds nothing worth reading. When the owner's socket closes it exits, and the kernel kills
all that is left in the namespace: there is no other mechanism to trust. One thread, one poll loop, no blocking call but
short file operations; anything long is done by a forked worker that answers by itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, NoReturn

from rollyard.core import folders
from rollyard.images import tree_pipe
from rollyard.sandbox.local.inner import files, keeper, landlock, path_view, protocol, shared_memory, syscalls, users
from rollyard.sandbox.local.inner.microvm import Microvm
from rollyard.sandbox.local.inner.protocol import Message

_FINISHED_KEPT = 4096
_FILE_OPS = frozenset({"open", "stat", "exists", "list", "mkdir", "remove", "pack", "unpack"})
_TICK = os.sysconf("SC_CLK_TCK")


class _Client:
    def __init__(self, sock: socket.socket, *, owner: bool) -> None:
        self.sock, self.owner = sock, owner
        sock.setblocking(False)


class _Job:
    def __init__(self, job_id: str, pid: int, control: socket.socket, *, ephemeral: bool) -> None:
        self.id, self.pid, self.control, self.ephemeral = job_id, pid, control, ephemeral
        self.program: int | None = None
        self.result: Message | None = None
        self.started: list[tuple[_Client, int]] = []
        self.waiting: list[tuple[_Client, int]] = []
        self.feed: int | None = None
        self.killed = False


class Supervisor:
    """`plan` is the zygote's; `namespace` says whether this process is PID 1 of its own pid namespace."""

    def __init__(
        self,
        plan: dict[str, Any],
        control: socket.socket,
        listener: socket.socket,
        upper: int | None,
        lock: int,
        machine: Microvm | None,
    ) -> None:
        self._lock = lock  # of the journal entry, held for as long as this process lives
        self._confine: int | None = None
        self._inline = False
        self._view = path_view.make(plan["view"])
        rules: dict[str, Any] | None = plan["landlock"]
        if rules is not None:
            self._confine = landlock.ruleset(rules["read"], rules["write"], rules["ports"])
        if not plan["namespace"]:
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        self._clients = {control.fileno(): _Client(control, owner=plan["owner"])}
        self._listener = listener
        listener.setblocking(False)
        self._upper = upper
        self._jobs: dict[str, _Job] = {}
        self._by_control: dict[int, _Job] = {}
        self._workers: dict[int, tuple[_Client, int]] = {}
        self._keepers: set[int] = set()
        self._spare: tuple[int, socket.socket] | None = None  # it has kept a program before and waits for the next
        self._namespace: bool = plan["namespace"]
        self._gvisor: bool = plan["gvisor"]
        self._machine = machine
        self._proc_dev = os.stat("/proc").st_dev if os.path.exists("/proc/self") else None
        self._expires = time.monotonic() + plan["ttl_s"]
        self._idle: float | None = plan["idle_ttl_s"]
        self._touched = time.monotonic()
        self._poller = select.poll()
        self._ops: dict[str, Callable[[Message, list[int], _Client], Any]] = {
            name.removeprefix("op_"): getattr(self, name) for name in dir(self) if name.startswith("op_")
        }

    def serve(self) -> NoReturn:
        wake, _ = protocol.wake_on_children()
        link = -1 if self._machine is None else self._machine.link.fileno()
        for fd in (wake, self._listener.fileno(), *self._clients, *([] if link < 0 else [link])):
            self._poller.register(fd, select.POLLIN)
        while True:
            for fd, _event in self._poller.poll(self._patience()):
                if fd == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                elif fd == link:  # the virtual machine ended, and with it all there was
                    self._exit()
                elif fd == self._listener.fileno():
                    self._accept()
                elif fd in self._clients:
                    self._hear(self._clients[fd])
                elif fd in self._by_control:
                    self._hear_job(self._by_control[fd])
            self._reap()
            if self._over():
                self._exit()

    def _exit(self) -> NoReturn:
        if not self._namespace:
            self._end_all()
        os._exit(0)

    def _patience(self) -> float:
        now = time.monotonic()
        left = self._expires - now
        if self._idle is not None:
            left = min(left, max(self._touched + self._idle - now, 0.05))
        return max(0.0, min(left, 3600.0)) * 1000 + 1

    def _over(self) -> bool:
        now = time.monotonic()
        if self._idle is not None and any(job.result is None for job in self._jobs.values()):
            self._touched = now
        return now >= self._expires or (self._idle is not None and now >= self._touched + self._idle)

    # -- clients

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            self._clients[sock.fileno()] = _Client(sock, owner=False)
            self._poller.register(sock.fileno(), select.POLLIN)

    def _drop(self, client: _Client) -> None:
        if client.owner:
            self._exit()
        fd = client.sock.fileno()
        if self._clients.pop(fd, None):
            self._poller.unregister(fd)
            client.sock.close()

    def _answer(self, client: _Client, number: int, message: Message, fds: tuple[int, ...] = ()) -> None:
        if client.sock.fileno() < 0:
            return
        try:
            protocol.send(client.sock, {"n": number, **message}, fds)
        except OSError:  # gone, or not reading its answers
            self._drop(client)

    def _hear(self, client: _Client) -> None:
        try:
            got = protocol.receive(client.sock)
        except BlockingIOError:
            return
        except OSError:
            got = None
        if got is None:
            self._drop(client)
            return
        self._touched = time.monotonic()
        message, fds = got
        number = message.get("n", 0)
        try:
            reply = self._do(message, fds, client)
        except OSError as error:
            self._answer(client, number, self._refuse(error))
        except Exception as error:  # noqa: BLE001 - a request that makes no sense must not end the sandbox; it is answered
            self._answer(client, number, {"error": "EPROTO", "path": None, "text": repr(error)[:500]})
        else:
            if reply is not None:
                handed: tuple[int, ...] = reply.pop("fds", ())
                self._answer(client, number, {"ok": reply}, handed)
                protocol.close_fds(handed)
        finally:
            protocol.close_fds(fds)

    def _do(self, message: Message, fds: list[int], client: _Client) -> Message | None:
        """File operations of a sandbox under Landlock are done under its rules too, in a worker."""
        operation = self._ops[message["op"]]
        if message["op"] in _FILE_OPS:
            message["path"] = self._outside(message["path"])
        if self._confine is None or message["op"] not in _FILE_OPS:
            return operation(message, fds, client)
        rules = self._confine

        def task() -> Message:
            landlock.restrict(rules)
            self._inline = True
            return operation(message, fds, client) or {}

        return self._work(message, client, task)

    def _outside(self, path: str) -> str:
        """Where a path of the sandbox is for this process."""
        return path if self._view is None else os.fsdecode(self._view.outside(os.fsencode(path)))

    def _inside(self, path: str) -> str:
        return path if self._view is None else os.fsdecode(self._view.inside(os.fsencode(path)))

    def _describe(self, entry: Message) -> Message:
        target = entry["target"]
        return {
            **entry,
            "path": self._inside(entry["path"]),
            "target": target if target is None else self._inside(target),
        }

    def _refuse(self, error: OSError) -> Message:
        path = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
        name = errno.errorcode.get(error.errno or 0, "EIO")
        known = isinstance(path, str) and path.startswith("/") and not path.startswith("/proc/self/fd/")
        return {"error": name, "path": self._inside(path) if known else None, "text": error.strerror}

    # -- programs

    def op_run(self, message: Message, fds: list[int], client: _Client) -> Message | None:
        known = self._jobs.get(message["job"])
        if known is not None:
            return self._rejoin(known, message, client)
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
        (job.waiting if message["wait"] else job.started).append((client, message["n"]))
        return None

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
        self._keepers.add(pid)
        return pid, ours

    def _rejoin(self, job: _Job, message: Message, client: _Client) -> Message | None:
        """At most once: a launch with a known id joins that job instead of starting another."""
        if message["wait"] and job.result is None:
            job.waiting.append((client, message["n"]))
            return None
        return {"job": job.id, "pid": job.program, "known": True, **(job.result or {})}

    def _hear_job(self, job: _Job) -> None:
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
            for client, number in (*job.started, *job.waiting):
                self._answer(client, number, message)
            job.started.clear()
            job.waiting.clear()
            self._jobs.pop(job.id, None)
        else:
            self._finish(job, message)

    def _finish(self, job: _Job, result: Message) -> None:
        job.result = result
        self._touched = time.monotonic()
        for client, number in (*job.started, *job.waiting):
            self._answer(client, number, {"ok": {"job": job.id, "pid": job.program, **result}})
        job.started.clear()
        job.waiting.clear()
        if job.feed is not None:
            os.close(job.feed)
            job.feed = None
        if job.ephemeral:
            self._jobs.pop(job.id, None)
        elif len(self._jobs) > _FINISHED_KEPT:
            oldest = next((known for known in self._jobs.values() if known.result is not None), None)
            if oldest is not None:
                del self._jobs[oldest.id]

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

    def _job(self, message: Message) -> _Job:
        job = self._jobs.get(message["job"])
        if job is None:
            raise OSError(errno.ESRCH, "no such job", message["job"])
        return job

    def op_wait(self, message: Message, _fds: list[int], client: _Client) -> Message | None:
        job = self._job(message)
        if job.result is None and not message.get("now"):
            job.waiting.append((client, message["n"]))
            return None
        return {"job": job.id, "pid": job.program, "running": job.result is None, **(job.result or {})}

    def op_kill(self, message: Message, _fds: list[int], _client: _Client) -> Message:
        """The keeper ends its whole tree. `force` does it from here, for a keeper that was itself stopped or killed."""
        job = self._jobs.get(message["job"])
        if job is None or job.control.fileno() not in self._by_control:
            return {}
        job.killed = True
        if message.get("force"):
            keeper.kill_below(job.pid, lambda: False)  # what slips through becomes a stray, and those end too
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.pid, signal.SIGKILL)
        else:
            with contextlib.suppress(OSError):
                protocol.send(job.control, {"op": "kill"})
        return {}

    def op_stdin(self, message: Message, _fds: list[int], _client: _Client) -> Message:
        job = self._job(message)
        if message.get("close") and job.feed is not None:
            os.close(job.feed)
            job.feed = None
            return {}
        if job.feed is None:
            raise OSError(errno.EPIPE, "stdin is closed", job.id)
        return {"fds": (os.dup(job.feed),)}

    def op_cpu(self, message: Message, _fds: list[int], _client: _Client) -> Message:
        job = self._job(message)
        if self._machine or not os.path.exists("/proc/self/stat"):  # nothing to count with: unknown is not zero
            return {"cpu_s": None}
        ticks = sum(_ticks(job.pid)[2:]) + sum(sum(_ticks(pid)) for pid in keeper.descendants(job.pid))
        return {"cpu_s": ticks / _TICK}

    def op_end_all(self, _message: Message, _fds: list[int], _client: _Client) -> Message:
        for job in self._jobs.values():
            job.killed = True
        if self._machine is not None:
            self._machine.ask({"end_all": True})  # keepers, which have nothing left to keep then, end by themselves
            return {}
        self._end_all()
        if self._namespace:
            shared_memory.remove_shared_memory()
        return {}

    def _end_all(self) -> None:
        """Kill every process but this one, until there is none."""
        if not self._namespace:
            keeper.kill_below(os.getpid(), self._reap_left)
            return
        for round_ in range(200):
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                return
            if not self._reap_left():
                return
            time.sleep(0.001 * min(round_ + 1, 20))

    def op_pause(self, message: Message, _fds: list[int], _client: _Client) -> Message:
        if self._machine is not None and message["on"]:
            self._machine.ask({"sync": True})
        number = signal.SIGSTOP if message["on"] else signal.SIGCONT
        for pid in [-1] if self._namespace else keeper.descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return {}

    # -- children

    def _reap(self) -> None:
        if self._reap_left():
            self._end_strays()

    def _reap_left(self) -> bool:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self._keepers.discard(pid)
            asked = self._workers.pop(pid, None)
            if asked is not None and status != 0:
                self._answer(*asked, {"error": "EINTR", "path": None, "text": "the worker was killed"})

    def _end_strays(self) -> None:
        """A keeper that was killed from inside leaves orphans, and they come here: they end with it."""
        try:
            with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
                children = {int(word) for word in file.read().split()}
        except OSError:
            return
        own = set[int]() if self._machine is None else self._machine.pids
        for pid in children - self._keepers - set(self._workers) - own:
            for victim in (*keeper.descendants(pid), pid):
                with contextlib.suppress(OSError):
                    os.kill(victim, signal.SIGKILL)

    def _work(self, message: Message, client: _Client, task: Callable[[], Message]) -> Message | None:
        """Do `task` in a fork that answers the client itself."""
        if self._inline:
            return task()
        pid = os.fork()
        if pid:
            self._workers[pid] = (client, message["n"])
            return None
        try:
            try:
                reply: Message = {"ok": task()}
            except OSError as error:
                reply = self._refuse(error)
            handed: tuple[int, ...] = reply.get("ok", {}).pop("fds", ())
            protocol.send(client.sock, {"n": message["n"], **reply}, handed)
            os._exit(0)
        finally:
            os._exit(70)

    # -- files

    def op_open(self, message: Message, _fds: list[int], _client: _Client) -> Message:
        fd = files.open_file(
            message["path"],
            write=message["write"],
            mode=message.get("mode"),
            owner=users.find(message.get("user")),
            proc_dev=self._proc_dev,
        )
        return {"fds": (fd,), "size": os.fstat(fd).st_size}

    def op_stat(self, message: Message, _fds: list[int], _client: _Client) -> Message:
        return self._describe(files.look(message["path"]))

    def op_exists(self, message: Message, _fds: list[int], _client: _Client) -> Message:
        return {"exists": os.path.exists(message["path"])}

    def op_list(self, message: Message, _fds: list[int], _client: _Client) -> Message:
        return {"entries": [self._describe(entry) for entry in files.listing(message["path"])]}

    def op_mkdir(self, message: Message, _fds: list[int], _client: _Client) -> Message:
        files.make_dirs(message["path"], message["mode"], users.find(message.get("user")))
        return {}

    def op_remove(self, message: Message, _fds: list[int], client: _Client) -> Message | None:
        path: str = message["path"]
        os.lstat(path)

        def remove(anyones: bool) -> Message:
            at, name = files.open_parent(path, follow=False, anyones=anyones)
            folders.remove(path if anyones or self._proc_dev is None else f"/proc/self/fd/{at}/{name}")
            os.close(at)
            return {}

        return self._work(message, client, lambda: files.as_link_owner(remove))

    def op_unpack(self, message: Message, fds: list[int], client: _Client) -> Message | None:
        user = users.find(message.get("user"))
        files.make_dirs(message["path"], 0o755, user)

        path: str = message["path"]

        def unpack(anyones: bool) -> Message:
            at, name = files.open_parent(path, follow=True, anyones=anyones)
            where = path if anyones or self._proc_dev is None else f"/proc/self/fd/{at}/{name}"
            owner = (user.uid, user.gid) if (user.uid or user.gid) and not anyones else None
            with open(fds[0], "rb", closefd=False) as source:
                tree_pipe.unpack(source, where, owner=owner, link=self._outside)
            os.close(at)
            return {}

        return self._work(message, client, lambda: files.as_link_owner(unpack))

    def op_pack(self, message: Message, fds: list[int], client: _Client) -> Message | None:
        def task() -> Message:
            with open(fds[0], "wb", closefd=False) as out:
                tree_pipe.pack(message["path"], out, max_bytes=message["max_bytes"], link=self._inside)
            return {}

        return self._work(message, client, task)

    # -- network

    def op_listen(self, message: Message, _fds: list[int], _client: _Client) -> Message:
        datagrams: bool = message.get("datagrams", False)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM if datagrams else socket.SOCK_STREAM) as sock:
            if not datagrams:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((message["address"], message["port"]))
            if not datagrams:
                sock.listen(1024)
            port = sock.getsockname()[1]
            if self._confine is not None:
                landlock.allow_port(self._confine, port)
            if self._machine is not None:
                self._machine.ask({"listen": [message["address"], port]})
            return {"port": port, "fds": (os.dup(sock.fileno()),)}

    def op_socket(self, message: Message, _fds: list[int], _client: _Client) -> Message:
        """A TCP socket of this network namespace; the host connects it. A virtual machine has another network: there the socket
        is connected already."""
        if self._machine is not None:
            return {"fds": (self._dial(self._machine, message["port"]),), "connected": True}
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            return {"fds": (os.dup(sock.fileno()),)}

    def _dial(self, machine: Microvm, port: int) -> int:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            machine.ask({"dial": port}, [theirs.fileno()])
            return os.dup(ours.fileno())

    def op_namespaces(self, _message: Message, _fds: list[int], _client: _Client) -> Message:
        """The namespaces that a sandbox beside this one joins."""
        names = ("user", "net")
        return {"fds": tuple(os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names)}

    # -- the sandbox itself

    def op_ping(self, _message: Message, _fds: list[int], _client: _Client) -> Message:
        return {"ttl_s": self._expires - time.monotonic(), "jobs": list(self._jobs)}

    def op_extend(self, message: Message, _fds: list[int], _client: _Client) -> Message:
        self._expires = time.monotonic() + message["ttl_s"]
        return {}

    def op_upper(self, _message: Message, _fds: list[int], _client: _Client) -> Message:
        return {} if self._upper is None else {"fds": (os.dup(self._upper),)}

    def op_exit(self, _message: Message, _fds: list[int], _client: _Client) -> NoReturn:
        self._exit()


def _ticks(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return [0, 0, 0, 0]
    return [int(word) for word in fields[11:15]]
