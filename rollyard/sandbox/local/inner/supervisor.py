"""PID 1 of a sandbox: answers its owner (and processes that attached), starts keepers, reaps, and ends everything in time.

It is a fork of the zygote and holds nothing worth reading. When the owner's socket closes it exits, and the kernel kills
all that is left in the namespace: there is no other mechanism to trust. One thread, one poll loop, no blocking call but
short file operations; anything long is done by a forked worker that answers by itself.

What it is asked for is in its parts: `programs`, `file_operations`, `network_operations`. Here are the loop, its clients, its
children and its own end.
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

from rollyard.sandbox.local.inner import keeper, landlock, path_view, protocol, shared_memory, syscalls
from rollyard.sandbox.local.inner.file_operations import FileOperations
from rollyard.sandbox.local.inner.microvm import Microvm
from rollyard.sandbox.local.inner.network_operations import NetworkOperations
from rollyard.sandbox.local.inner.programs import Programs
from rollyard.sandbox.local.inner.protocol import Message
from rollyard.sandbox.local.inner.requests import Client, Request, operations


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
        rules: dict[str, Any] | None = plan["landlock"]
        if rules is not None:
            self._confine = landlock.ruleset(rules["read"], rules["write"], rules["ports"])
        if not plan["namespace"]:
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        self._clients = {control.fileno(): Client(control, owner=plan["owner"])}
        self._listener = listener
        listener.setblocking(False)
        self._upper = upper
        self._workers: dict[int, Request] = {}
        self._namespace: bool = plan["namespace"]
        self._machine = machine
        self._expires = time.monotonic() + plan["ttl_s"]
        self._idle: float | None = plan["idle_ttl_s"]
        self._touched = time.monotonic()
        self._poller = select.poll()
        view = path_view.make(plan["view"])
        self._programs = Programs(
            self._poller, self._answer, confine=self._confine, view=view, gvisor=plan["gvisor"], machine=machine
        )
        self._files = FileOperations(view, self._work)
        self._file_operations = operations(self._files)
        self._operations = operations(self, self._programs, self._files, NetworkOperations(self._confine, machine))

    def serve(self) -> NoReturn:
        wake, _ = protocol.wake_on_children()
        link = -1 if self._machine is None else self._machine.link.fileno()
        for fd in (wake, self._listener.fileno(), *self._clients, *([] if link < 0 else [link])):
            self._poller.register(fd, select.POLLIN)
        while True:
            for fd, _event in self._poller.poll(self._poll_ms()):
                if fd == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                elif fd == link:  # the virtual machine ended, and with it all there was
                    self._exit()
                elif fd == self._listener.fileno():
                    self._accept()
                elif fd in self._clients:
                    self._receive(self._clients[fd])
                elif self._programs.receive(fd):
                    self._touched = time.monotonic()
            self._reap()
            if self._over():
                self._exit()

    def _exit(self) -> NoReturn:
        if not self._namespace:
            self._end_all()
        os._exit(0)

    def _poll_ms(self) -> float:
        now = time.monotonic()
        left = self._expires - now
        if self._idle is not None:
            left = min(left, max(self._touched + self._idle - now, 0.05))
        return max(0.0, min(left, 3600.0)) * 1000 + 1

    def _over(self) -> bool:
        now = time.monotonic()
        if self._idle is not None and self._programs.running:
            self._touched = now
        return now >= self._expires or (self._idle is not None and now >= self._touched + self._idle)

    # -- clients

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            self._clients[sock.fileno()] = Client(sock, owner=False)
            self._poller.register(sock.fileno(), select.POLLIN)

    def _drop(self, client: Client) -> None:
        if client.owner:
            self._exit()
        fd = client.sock.fileno()
        if self._clients.pop(fd, None):
            self._poller.unregister(fd)
            client.sock.close()

    def _answer(self, client: Client, number: int, message: Message, fds: tuple[int, ...] = ()) -> None:
        if client.sock.fileno() < 0:
            return
        try:
            protocol.send(client.sock, {"n": number, **message}, fds)
        except OSError:  # gone, or not reading its answers
            self._drop(client)

    def _receive(self, client: Client) -> None:
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
        asked = Request(*got, client)
        try:
            reply = self._do(asked)
        except OSError as error:
            self._answer(client, asked.number, self._refuse(error))
        except Exception as error:  # noqa: BLE001 - a request that makes no sense must not end the sandbox; it is answered
            self._answer(client, asked.number, {"error": "EPROTO", "path": None, "text": repr(error)[:500]})
        else:
            if reply is not None:
                handed: tuple[int, ...] = reply.pop("fds", ())
                self._answer(client, asked.number, {"ok": reply}, handed)
                protocol.close_fds(handed)
        finally:
            protocol.close_fds(asked.fds)

    def _do(self, asked: Request) -> Message | None:
        """File operations of a sandbox under Landlock are done under its rules too, in a worker."""
        name: str = asked.message["op"]
        operation = self._operations[name]
        if name in self._file_operations:
            asked.message["path"] = self._files.outside(asked.message["path"])
        if self._confine is None or name not in self._file_operations:
            return operation(asked)
        rules = self._confine

        def task() -> Message:
            landlock.restrict(rules)
            self._inline = True
            return operation(asked) or {}

        return self._work(asked, task)

    def _refuse(self, error: OSError) -> Message:
        path = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
        name = errno.errorcode.get(error.errno or 0, "EIO")
        known = isinstance(path, str) and path.startswith("/") and not path.startswith("/proc/self/fd/")
        return {"error": name, "path": self._files.inside(path) if known else None, "text": error.strerror}

    # -- all processes

    def op_end_all(self, _asked: Request) -> Message:
        self._programs.expect_end()
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

    def op_pause(self, asked: Request) -> Message:
        stop: bool = asked.message["on"]
        if self._machine is not None and stop:
            self._machine.ask({"sync": True})
        number = signal.SIGSTOP if stop else signal.SIGCONT
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
            self._programs.keepers.discard(pid)
            asked = self._workers.pop(pid, None)
            if asked is not None and status != 0:
                self._answer(
                    asked.client, asked.number, {"error": "EINTR", "path": None, "text": "the worker was killed"}
                )

    def _end_strays(self) -> None:
        """A keeper that was killed from inside leaves orphans, and they come here: they end with it."""
        try:
            with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
                children = {int(word) for word in file.read().split()}
        except OSError:
            return
        own = set[int]() if self._machine is None else self._machine.pids
        for pid in children - self._programs.keepers - set(self._workers) - own:
            for victim in (*keeper.descendants(pid), pid):
                with contextlib.suppress(OSError):
                    os.kill(victim, signal.SIGKILL)

    def _work(self, asked: Request, task: Callable[[], Message]) -> Message | None:
        """Do `task` in a fork that answers the client itself."""
        if self._inline:
            return task()
        pid = os.fork()
        if pid:
            self._workers[pid] = asked
            return None
        try:
            try:
                reply: Message = {"ok": task()}
            except OSError as error:
                reply = self._refuse(error)
            handed: tuple[int, ...] = reply.get("ok", {}).pop("fds", ())
            protocol.send(asked.client.sock, {"n": asked.number, **reply}, handed)
            os._exit(0)
        finally:
            os._exit(70)

    # -- the sandbox itself

    def op_ping(self, _asked: Request) -> Message:
        return {"ttl_s": self._expires - time.monotonic(), "jobs": self._programs.names}

    def op_extend(self, asked: Request) -> Message:
        self._expires = time.monotonic() + asked.message["ttl_s"]
        return {}

    def op_upper(self, _asked: Request) -> Message:
        return {} if self._upper is None else {"fds": (os.dup(self._upper),)}

    def op_exit(self, _asked: Request) -> NoReturn:
        self._exit()
