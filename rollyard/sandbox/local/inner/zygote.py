"""The process sandboxes are forked from: executed once with an empty environment, so that it cannot leak what it never had.

For each request it makes the id-mapped mounts (only real root can), clones a child into new namespaces, writes its id map
and cgroups, and lets it go; it never waits for one. It is the parent of every PID 1: when one ends, it removes what that
sandbox left on disk, also after its owner was killed. It ends when its owner is gone and no sandbox is left.
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
from typing import Any, NoReturn

from rollyard.sandbox.local.inner import bootstrap, idmap, mounts, protocol, syscalls, tree

_NAMESPACES = (
    syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
)
Plan = dict[str, Any]


class Zygote:
    def __init__(self, control: socket.socket) -> None:
        self._control: socket.socket | None = control
        self._live: dict[int, Plan] = {}
        self._janitors: set[int] = set()
        self._userns: dict[str, int] = {}
        self._settling: list[int] = []

    def serve(self) -> NoReturn:
        wake = protocol.wake_on_children()
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        assert self._control is not None
        control = self._control.fileno()
        poller.register(control, select.POLLIN)
        while self._control is not None or self._live or self._janitors:
            for fd, _event in poller.poll():
                if fd == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                elif self._control is not None and not self._hear(self._control):
                    poller.unregister(control)
                    self._control.close()
                    self._control = None
                    self._settling.clear()
            self._reap()
            self._settle()
        os._exit(0)

    def _settle(self) -> None:
        """Answer those who asked to be told when nothing of their dead sandboxes is left."""
        if self._settling and not self._janitors and not any(plan["owner"] for plan in self._live.values()):
            for number in self._settling:
                with contextlib.suppress(OSError):
                    assert self._control is not None
                    protocol.send(self._control, {"n": number, "ok": {}})
            self._settling.clear()

    def _hear(self, control: socket.socket) -> bool:
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
        try:
            reply, handed = self._open(message, fds)
        except OSError as error:
            reply, handed = {"error": errno.errorcode.get(error.errno or 0, "EIO"), "step": str(error.filename)}, []
        with contextlib.suppress(OSError):  # the owner is gone; the next receive says so
            protocol.send(control, {"n": message["n"], **reply}, handed)
        protocol.close_fds([*handed, *fds])
        return True

    def _open(self, plan: Plan, fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        """`fds`: the control socket, the attach listener, the lock. Answers with the pid and a descriptor for it."""
        mapped = self._mapped(plan)
        go_r, go_w = os.pipe()
        flags = _NAMESPACES | (syscalls.CLONE_NEWNET if plan["network"] == "none" else 0)
        try:
            pid = syscalls.clone(flags if plan["namespace"] else 0)
            if pid == 0:
                bootstrap.become(plan, fds, [fd for fd in mapped if fd >= 0], mapped, go_r)
            self._live[pid] = plan
            try:
                if plan["namespace"]:
                    idmap.write(pid, plan["map"])
                for path in plan["cgroups"]:
                    with open(path, "wb", buffering=0) as file:
                        file.write(str(pid).encode())
                os.write(go_w, b"g")
                return {"ok": {"pid": pid, "shifted": bool(plan["writable"]) and mapped[0] < 0}}, [os.pidfd_open(pid)]
            except OSError:
                os.kill(pid, signal.SIGKILL)
                raise
        finally:
            protocol.close_fds([go_r, go_w, *(fd for fd in mapped if fd >= 0)])

    def _mapped(self, plan: Plan) -> list[int]:
        sources = mounts.sources(plan) if plan["namespace"] else []
        if plan["map"]["kind"] != "range":
            return [-1] * len(sources)
        userns = self._userns_of(plan["map"])
        mapped = [mounts.id_mapped(path, userns) for path in sources]
        if plan["writable"] and mapped[0] < 0:  # this filesystem cannot: the ids on disk are the shifted ones
            os.chown(plan["writable"], plan["map"]["uids"][0][1], plan["map"]["gids"][0][1])
        return mapped

    def _userns_of(self, kind: dict[str, Any]) -> int:
        """A user namespace with this map, for id-mapped mounts; made once."""
        key = str(kind)
        if key not in self._userns:
            self._userns[key] = idmap.namespace(kind)
        return self._userns[key]

    def _reap(self) -> None:
        while True:
            try:
                pid, _status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._janitors.discard(pid)
            plan = self._live.pop(pid, None)
            if plan is not None:
                self._tidy(plan)

    def _tidy(self, plan: Plan) -> None:
        """Remove what a dead sandbox left, in a fork: trees can be large."""
        enter = plan["map"]["kind"] == "helper"
        pid = syscalls.clone(syscalls.CLONE_NEWUSER) if enter else os.fork()
        if pid == 0:
            try:
                if enter:
                    idmap.wait_until_mapped()
                remains(plan["home"], [os.path.dirname(path) for path in plan["cgroups"]])
            finally:
                os._exit(0)
        self._janitors.add(pid)
        if enter:
            with contextlib.suppress(OSError):
                idmap.write(pid, plan["map"])


def remains(home: str, cgroups: list[str]) -> None:
    """The directory and the cgroups of one sandbox, gone. The journal entry goes last."""
    for path in cgroups:
        with contextlib.suppress(OSError):
            os.rmdir(path)
    for name in ("fs", "jobs", "sock"):
        tree.remove(f"{home}/{name}")
    tree.remove(home)


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
