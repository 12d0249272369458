"""From a fresh clone to PID 1 of a ready sandbox: identity, network, root, limits, privileges given up, then serve.

The order is the point. Descriptors of sources are opened while this is still the host's user; the map is in force before
anything is created; nothing is answered before no_new_privs, capabilities, dumpable and the filter are all in place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import struct
from typing import Any, NoReturn

from rollyard.sandbox.local.inner import mounts, protocol, seccomp, syscalls
from rollyard.sandbox.local.inner.supervisor import Supervisor

Plan = dict[str, Any]
# chown dac_override fowner fsetid kill setgid setuid net_bind_service sys_chroot setfcap
KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10, 18, 31})
NESTING_CAPABILITIES = KEPT_CAPABILITIES | {8, 12, 21}  # setpcap net_admin sys_admin
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def become(plan: Plan, fds: list[int], inherited: list[int], mapped: list[int], go: int) -> NoReturn:
    """Never returns. A failure is told to the owner, with the step it was in, and ends the process."""
    control, listener, lock = fds
    try:
        os.dup2(0, 1)
        os.dup2(0, 2)
        syscalls.close_all_but({control, listener, lock, go, *inherited})
        sock = socket.socket(fileno=control)
        try:
            upper = _enter(plan, mapped, go)
            supervisor = Supervisor(plan, sock, socket.socket(fileno=listener), upper)
            protocol.send(sock, {"n": 0, "ok": {}})
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "EIO")
            protocol.send(sock, {"n": 0, "error": name, "step": str(error.filename)})
            os._exit(1)
        supervisor.serve()
    finally:
        os._exit(70)


def _enter(plan: Plan, mapped: list[int], go: int) -> int | None:
    upper = None
    if plan["namespace"]:
        held = mounts.hold(plan, mapped)
        devices = [syscalls.open_tree(f"/dev/{name}") for name in mounts.DEVICES]
        if os.read(go, 1) != b"g":
            raise OSError(errno.ECANCELED, "the zygote is gone", "start")
        os.close(go)
        syscalls.unshare(syscalls.CLONE_NEWCGROUP)  # only now: it is in its own groups, and sees them as the root
        if plan["map"]["kind"] != "single":
            os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        if plan["network"] == "none":
            _loopback_up()
        upper = mounts.enter(plan, held, devices)
        syscalls.sethostname(plan["hostname"])
    for name, value in plan["rlimits"].items():
        _, hard = resource.getrlimit(getattr(resource, name))
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(getattr(resource, name), (limit, limit))
    nesting: bool = plan["nesting"]
    if plan["namespace"]:
        keep = NESTING_CAPABILITIES if nesting else KEPT_CAPABILITIES
        syscalls.set_capabilities(keep, plan["last_capability"])
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(seccomp.program(syscalls.MACHINE, nesting=nesting))
    return upper


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
