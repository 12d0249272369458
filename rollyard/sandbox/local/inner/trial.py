"""Finds out what the kernel lets this user do, by doing it: namespaces, mounts, an overlay, /proc, a trace. Prints JSON."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from rollyard.images import mount_table
from rollyard.sandbox.local.inner import idmap, landlock, mounts, protocol, seccomp, sources, syscalls, tracer
from rollyard.sandbox.local.inner.zygote import NAMESPACES

_USR = {"target": "/usr", "source": "/usr", "writable": True, "over": []}
_LOWER = os.path.dirname(os.path.abspath(__file__))  # any directory that is there will do
PLAN: dict[str, Any] = {
    "writable": None,
    "tmpfs_mb": 1,
    "inodes": 256,
    "lowers": [_LOWER],
    "trees": [_USR],
    "devices": [],
    "binds": [],
}


def attempt(id_map: dict[str, Any], *, proc: bool) -> str | None:
    """What went wrong on the way to a root of our own; None when nothing did."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        pid = syscalls.clone(NAMESPACES | syscalls.CLONE_NEWNET)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    if pid == 0:
        ours.close()
        try:
            try:
                _try_inside(theirs, id_map, proc=proc)
                protocol.send(theirs, {"ok": True})
            except OSError as error:
                protocol.send(theirs, {"error": f"{error.filename}: {error.strerror}"})
        finally:
            os._exit(0)
    theirs.close()
    held = sources.HeldMount()
    try:
        idmap.write(pid, id_map)
        real_root = id_map["kind"] == "range"
        if real_root:  # as the zygote does
            sources.hold(PLAN, held, userns=idmap.namespace(id_map), mounted=mount_table.MountTable())
        protocol.send(ours, {"held": held.message() if real_root else None}, held.fds)
        got = protocol.receive(ours)
        return (got[0].get("error") if got else "the process ended early") or None
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    finally:
        ours.close()
        protocol.close_fds(held.fds)
        os.waitpid(pid, 0)


def _try_inside(channel: socket.socket, id_map: dict[str, Any], *, proc: bool) -> None:
    message, fds = protocol.receive(channel) or ({}, [])
    syscalls.unshare(syscalls.CLONE_NEWCGROUP)
    if id_map["kind"] != "single":
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    stage = mounts.StagingArea(proc=proc)
    if message["held"] is None:
        held = sources.HeldMount()
        sources.hold(PLAN, held)
    else:
        held = sources.HeldMount.receive(message["held"], fds)
    stage.enter(PLAN, held)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(seccomp.program(syscalls.MACHINE))


def main() -> None:
    id_map = json.loads(sys.argv[1])
    full = attempt(id_map, proc=True)
    without_proc = attempt(id_map, proc=False) if full is not None else None
    found = {
        "namespaces": full is None or without_proc is None,
        "proc": full is None,
        "error": full,
        "landlock": landlock.abi(),
        "view": tracer.works(),
    }
    print(json.dumps(found))
