"""From a fresh clone to PID 1 of a ready sandbox, in two steps.

`Blank` is everything that can be done before it is known what the sandbox is for: identity, cgroups, loopback, staging
area, /proc and /dev. The zygote keeps some waiting, because joining a cgroup alone can cost more than all the rest. A
plan turns a blank into a sandbox: root, limits, privileges given up, then serve. Nothing is answered before no_new_privs,
capabilities, dumpable and the filter are all in place.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from typing import Any, NoReturn

from rollyard.sandbox.local.inner import microvm, mounts, protocol, seccomp, sources, syscalls
from rollyard.sandbox.local.inner.supervisor import Supervisor

Plan = dict[str, Any]
NESTING_CAPABILITIES = syscalls.KEPT_CAPABILITIES | {8, 12, 21}  # setpcap net_admin sys_admin
FILTERS = {nesting: seccomp.program(syscalls.MACHINE, nesting=nesting) for nesting in (False, True)}
TCP_FILTER = seccomp.tcp_program(syscalls.MACHINE)


class Kind:
    """What a blank must fit: recipes that are equal can share one."""

    def __init__(self, plan: Plan) -> None:
        self.namespace: bool = plan["namespace"]
        self.proc: bool = plan["proc"]
        self.network: bool = plan["network"] == "host"
        self.id_map: dict[str, Any] = plan["map"]
        self.cgroups: list[str] = plan["cgroup_roots"]
        # It joins namespaces that no other blank does
        self.beside: str | None = plan["home"] if plan["beside"] else None

    @property
    def key(self) -> str:
        return repr((self.namespace, self.proc, self.network, self.id_map, self.cgroups, self.beside))


def become(kind: Kind, channel: socket.socket, joins: list[int]) -> NoReturn:
    """The clone's whole life. `joins` are open `cgroup.procs` files; `channel` leads to the zygote, which sends the plan
    once it has one. A failure is told to the process that listens at that point, with the step it was in."""
    listening = channel
    try:
        os.dup2(0, 1)
        os.dup2(0, 2)
        syscalls.close_all_but({channel.fileno(), *joins})
        try:
            stage = _run_blank(kind, channel, joins)
            protocol.send(channel, {"ready": True})
            plan, fds = _plan(channel)
            control, listener, lock, *held = fds
            listening = socket.socket(fileno=control)
            channel.close()
            upper = _enter(kind, stage, plan, held)
            machine = microvm.boot(plan, listening) if plan["microvm"] else None
            supervisor = Supervisor(plan, listening, socket.socket(fileno=listener), upper, lock, machine)
            protocol.send(listening, {"n": 0, "ok": {}})
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "EIO")
            protocol.send(listening, {"n": 0, "error": name, "step": str(error.filename)})
            os._exit(1)
        supervisor.serve()
    finally:
        os._exit(70)


def _plan(channel: socket.socket) -> tuple[Plan, list[int]]:
    got = protocol.receive(channel)
    if got is None:
        os._exit(0)
    return got


def _run_blank(kind: Kind, channel: socket.socket, joins: list[int]) -> mounts.StagingArea | None:
    for fd in joins:
        os.write(fd, b"0")
        os.close(fd)
    if not kind.namespace:
        return None
    _plan(channel)  # the id map is written
    syscalls.unshare(syscalls.CLONE_NEWCGROUP)  # only now: it is in its own groups, and sees them as the root
    if kind.id_map["kind"] != "single":
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    if not kind.network and kind.beside is None:
        syscalls.bring_loopback_up()
    stage = mounts.StagingArea(proc=kind.proc)
    syscalls.sethostname("sandbox")
    return stage


def _enter(kind: Kind, stage: mounts.StagingArea | None, plan: Plan, held: list[int]) -> int | None:
    upper = None
    if stage is not None:
        if plan["held"] is None:
            own = sources.HeldMount()
            sources.hold(plan, own)
        else:
            own = sources.HeldMount.receive(plan["held"], held)
        upper = stage.enter(plan, own)
    for name, value in plan["rlimits"].items():
        _, hard = resource.getrlimit(getattr(resource, name))
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(getattr(resource, name), (limit, limit))
    nesting: bool = plan["nesting"]
    if kind.namespace:
        keep = NESTING_CAPABILITIES if nesting else syscalls.KEPT_CAPABILITIES
        syscalls.set_capabilities(keep, plan["last_capability"])
    elif plan["landlock"] is not None and os.geteuid() == 0:
        try:
            syscalls.set_capabilities(frozenset(), plan["last_capability"])
        except PermissionError:
            # Root of a container that took that right away: no_new_privs keeps the rest from coming back
            syscalls.set_capabilities(frozenset(), -1)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    if kind.namespace or plan["landlock"] is not None:
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.install(FILTERS[nesting])
    if plan["tcp_only"]:
        seccomp.install(TCP_FILTER)
    return upper
