"""The process sandboxes are forked from: executed once with an empty environment, so that it cannot leak what it never had.

It keeps a few blanks (see `bootstrap`) ahead of demand. For each request it makes the id-mapped mounts (only real root
can), writes the limits and hands the plan to a blank; it waits for none. It is the parent of every PID 1: when one ends,
it removes what that sandbox left, also after its owner was killed. It ends when its owner is gone and no sandbox is left.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from rollyard.images import mount_table
from rollyard.sandbox.local.inner import bootstrap, idmap, protocol, remains, sources, syscalls
from rollyard.sandbox.local.inner.janitor import Janitor

NAMESPACES = (
    syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
)
_SPARE = 4
Plan = dict[str, Any]


class _Blank:
    def __init__(self, pid: int, kind: bootstrap.Kind, channel: socket.socket, groups: list[str]) -> None:
        self.pid, self.kind, self.channel, self.groups = pid, kind, channel, groups
        self.ready = False


class _Request:
    """`joins` are the user and network namespaces of the sandbox that this one is to be beside of."""

    def __init__(self, plan: Plan, fds: list[int]) -> None:
        self.plan, self.kind = plan, bootstrap.Kind(plan)
        self.fds, self.joins = (fds[:-2], fds[-2:]) if self.kind.beside is not None else (fds, [])

    def close(self) -> None:
        protocol.close_fds([*self.fds, *self.joins])


class Zygote:
    def __init__(self, control: socket.socket) -> None:
        self._control: socket.socket | None = control
        self._live: dict[int, tuple[Plan, list[str]]] = {}
        self._blanks: dict[int, _Blank] = {}
        self._waiting: list[_Request] = []
        self._janitor = Janitor()
        self._userns: dict[str, int] = {}
        self._settling: list[int] = []
        self._made = 0
        self._mounted = mount_table.MountTable()
        self._poller = select.poll()

    def serve(self) -> NoReturn:
        wake, _ = protocol.wake_on_children()
        assert self._control is not None
        control = self._control.fileno()
        self._poller.register(wake, select.POLLIN)
        self._poller.register(control, select.POLLIN)
        while self._control is not None or self._live or self._janitor.busy or self._blanks:
            for fd, _event in self._poller.poll():
                if fd == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                elif fd == self._janitor.fileno:
                    if not self._janitor.receive():
                        self._poller.unregister(fd)
                elif fd != control:
                    self._blank_spoke(fd)
                elif self._control is not None and not self._receive(self._control):
                    self._owner_gone(control)
            self._reap()
            self._answer_settled()
        os._exit(0)

    def _owner_gone(self, control: int) -> None:
        self._poller.unregister(control)
        assert self._control is not None
        self._control.close()
        self._control = None
        self._settling.clear()
        for request in self._waiting:
            request.close()
        self._waiting.clear()
        self._dismiss()

    def _dismiss(self) -> None:
        for blank in self._blanks.values():
            if blank.channel.fileno() >= 0:
                self._poller.unregister(blank.channel.fileno())
                blank.channel.close()

    def _answer_settled(self) -> None:
        """Answer those who asked to be told when nothing of their dead sandboxes is left."""
        if not self._settling:
            return
        self._dismiss()
        if self._janitor.busy or self._blanks or any(plan["owner"] for plan, _ in self._live.values()):
            return
        for number in self._settling:
            self._answer(number, {"ok": {}})
        self._settling.clear()

    def _answer(self, number: int, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):  # the owner is gone; the next receive says so
                protocol.send(self._control, {"n": number, **message}, fds)

    def _receive(self, control: socket.socket) -> bool:
        try:
            got = protocol.receive(control)
        except OSError:
            return False
        if got is None:
            return False
        message, fds = got
        if message["op"] == "settle":
            self._settling.append(message["n"])
            return True
        request = _Request(message, fds)
        self._waiting.append(request)
        if request.kind.beside is not None:
            self._try_blank(request.kind, request.joins)
            return True
        self._serve_waiting()
        self._fill_stock(request.kind)
        return True

    # -- blanks

    def _fill_stock(self, kind: bootstrap.Kind) -> None:
        """Have one blank for every waiting request and a few more; drop those that no longer fit."""
        for blank in list(self._blanks.values()):
            if blank.kind.key != kind.key and blank.channel.fileno() >= 0:
                if any(request.kind.key == blank.kind.key for request in self._waiting):
                    continue
                self._poller.unregister(blank.channel.fileno())
                blank.channel.close()
        fit = sum(1 for blank in self._blanks.values() if blank.kind.key == kind.key and blank.channel.fileno() >= 0)
        same = sum(1 for request in self._waiting if request.kind.key == kind.key)
        for _ in range(same + (_SPARE if kind.namespace else 0) - fit):
            if not self._try_blank(kind, []):
                return

    def _try_blank(self, kind: bootstrap.Kind, joined: list[int]) -> bool:
        try:
            self._make_blank(kind, joined)
        except OSError as error:
            self._refuse(kind, error)
            return False
        return True

    def _refuse(self, kind: bootstrap.Kind, error: OSError) -> None:
        name = errno.errorcode.get(error.errno or 0, "EIO")
        for request in [r for r in self._waiting if r.kind.key == kind.key]:
            self._answer(request.plan["n"], {"error": name, "step": str(error.filename)})
            request.close()
            self._waiting.remove(request)

    def _make_blank(self, kind: bootstrap.Kind, joined: list[int]) -> None:
        self._made += 1
        groups = [f"{root}/{os.getpid()}-{self._made}" for root in kind.cgroups]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        joins: list[int] = []
        try:
            for group in groups:
                os.mkdir(group)
                joins.append(os.open(f"{group}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
            if joined:
                pid = _clone_beside(joined, lambda: bootstrap.become(kind, theirs, joins))
            else:
                flags = NAMESPACES | (0 if kind.network else syscalls.CLONE_NEWNET)
                pid = syscalls.clone(flags if kind.namespace else 0)
                if pid == 0:
                    bootstrap.become(kind, theirs, joins)
            self._blanks[pid] = _Blank(pid, kind, ours, groups)
            self._poller.register(ours.fileno(), select.POLLIN)
            if kind.namespace:
                if not joined:
                    idmap.write(pid, kind.id_map)
                protocol.send(ours, {"mapped": True})
        except OSError:
            remains.remove_groups(groups)
            raise
        finally:
            theirs.close()
            protocol.close_fds(joins)

    def _blank_spoke(self, fd: int) -> None:
        blank = next((b for b in self._blanks.values() if b.channel.fileno() == fd), None)
        if blank is None:
            return
        got = None
        with contextlib.suppress(OSError):
            got = protocol.receive(blank.channel)
        if got is None or "error" in got[0]:
            self._poller.unregister(fd)
            blank.channel.close()
            if got is not None:
                number = getattr(errno, got[0]["error"], errno.EIO)
                self._refuse(blank.kind, OSError(number, "", got[0]["step"]))
            return
        blank.ready = True
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        for request in list(self._waiting):
            ready = (b for b in self._blanks.values() if b.ready and b.kind.key == request.kind.key)
            blank = next(ready, None)
            if blank is not None:
                self._waiting.remove(request)
                self._assign(request, blank)

    def _assign(self, request: _Request, blank: _Blank) -> None:
        plan, number = request.plan, request.plan["n"]
        del self._blanks[blank.pid]
        self._live[blank.pid] = (plan, blank.groups)
        self._poller.unregister(blank.channel.fileno())
        held = sources.HeldMount()
        try:
            message = self._hold_mounts(plan, held)
            for group, limits in zip(blank.groups, plan["limits"], strict=True):
                for name, value in limits.items():
                    idmap.write_text(f"{group}/{name}", value)
            protocol.send(blank.channel, {**plan, "held": message}, [*request.fds, *held.fds])
            pidfd = os.pidfd_open(blank.pid)
            self._answer(number, {"ok": {"pid": blank.pid, "shifted": held.shifted, "cgroups": blank.groups}}, (pidfd,))
            os.close(pidfd)
        except OSError as error:
            self._answer(number, {"error": errno.errorcode.get(error.errno or 0, "EIO"), "step": str(error.filename)})
        finally:
            blank.channel.close()
            protocol.close_fds(held.fds)
            request.close()

    def _hold_mounts(self, plan: Plan, held: sources.HeldMount) -> dict[str, Any] | None:
        """Real root holds the sources here, id-mapped where their filesystem can; a writable part that cannot keeps shifted
        ids on disk. Everybody else's sandbox holds them itself."""
        if not plan["namespace"] or plan["map"]["kind"] != "range":
            return None
        sources.hold(plan, held, userns=self._userns_of(plan["map"]), mounted=self._mounted)
        if held.shifted:
            os.chown(plan["writable"], plan["map"]["uids"][0][1], plan["map"]["gids"][0][1])
        return held.message()

    def _userns_of(self, kind: dict[str, Any]) -> int:
        """A user namespace with this map, for id-mapped mounts; made once."""
        key = repr(kind)
        if key not in self._userns:
            self._userns[key] = idmap.namespace(kind)
        return self._userns[key]

    # -- ends

    def _reap(self) -> None:
        while True:
            try:
                pid, _status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._janitor.pids.discard(pid)
            blank = self._blanks.pop(pid, None)
            if blank is not None:
                if blank.channel.fileno() >= 0:
                    self._poller.unregister(blank.channel.fileno())
                    blank.channel.close()
                remains.remove_groups(blank.groups)
            ended = self._live.pop(pid, None)
            if ended is not None:
                plan, groups = ended
                fd = self._janitor.remove(plan["home"], groups, plan["map"])
                if fd is not None:
                    self._poller.register(fd, select.POLLIN)


def _clone_beside(joined: list[int], become: Callable[[], NoReturn]) -> int:
    """A clone in the user and network namespaces of another sandbox, with all others of its own. Only a process that has entered
    the user namespace may make it, and nothing leads back out of one, so a fork does both; the clone is this process's child."""
    heard, told = os.pipe2(os.O_CLOEXEC)
    helper = os.fork()
    if helper == 0:
        try:
            for fd in joined:
                syscalls.setns(fd)
            pid = syscalls.clone(NAMESPACES & ~syscalls.CLONE_NEWUSER | syscalls.CLONE_PARENT)
            if pid == 0:
                become()
            os.write(told, str(pid).encode())
        except OSError as error:
            os.write(told, f"-{error.errno} {error.filename}".encode())
        finally:
            os._exit(0)
    os.close(told)
    with os.fdopen(heard, "rb") as answer:
        number, _, step = answer.read().decode().partition(" ")
    os.waitpid(helper, 0)
    pid = int(number or -errno.EIO)
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid), step or "a sandbox beside another one")
    return pid


def main() -> NoReturn:
    control = socket.socket(fileno=int(sys.argv[1]))
    syscalls.hide_arguments("rollyard")
    os.chdir("/")
    if os.fork():  # nobody's child: it may have to outlive the process that started it
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o022)
    sys.argv[:] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    Zygote(control).serve()
