"""A program in a gVisor kernel of its own, inside the sandbox: `runsc` takes its place, with the sandbox's root as its root.

What the sandbox is stays as it is: files, volumes and the loopback of its network namespace are shown to the program by
`runsc`, whose system calls they become; the program's own never reach this machine's kernel. `runsc` needs namespaces and
mounts for that, so the sandbox keeps the rights to make them; no program has them. Its state lies in /dev, which programs
see another one of.
"""

from __future__ import annotations

import errno
import json
import os
from typing import Any

PLACE = "/dev/gvisor"
RUNSC = f"{PLACE}/runsc"
_FLAGS = ("--platform=ptrace", "--network=host", "--file-access=shared", "--ignore-cgroups")
_CAPABILITIES = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_NET_BIND_SERVICE",
    "CAP_SYS_CHROOT", "CAP_SETFCAP",
)  # fmt: skip
# runsc would put a directory in memory over one that is empty, which the next program does not have
_TMP = {"destination": "/tmp", "type": "bind", "source": "/tmp", "options": ["rw"]}
Launch = dict[str, Any]


def wrap(launch: Launch) -> Launch:
    """The launch of `runsc` with the program in it. The program is looked for here, so that one that is missing is an error
    of the launch and no exit code of `runsc`'s. The working directory is this process's."""
    program = _find(launch["argv"][0], launch["env"].get("PATH", "/usr/local/bin:/usr/bin:/bin"))
    bundle = f"{PLACE}/{launch['job']}"
    os.makedirs(bundle, mode=0o700, exist_ok=True)
    with open(f"{bundle}/config.json", "w") as file:
        json.dump(_describe(launch, [program, *launch["argv"][1:]]), file)
    argv = [RUNSC, "--root", f"{PLACE}/state", *_FLAGS, "run", "--bundle", bundle, launch["job"]]
    return {**launch, "argv": argv, "env": {"PATH": "/usr/bin:/bin"}, "uid": 0, "gid": 0, "groups": []}


def _find(name: str, search: str) -> str:
    candidates = [name] if "/" in name else [f"{part or '.'}/{name}" for part in search.split(":")]
    found = [path for path in candidates if os.path.exists(path)]
    for path in found:
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return os.path.abspath(path)
    number = errno.EACCES if found else errno.ENOENT
    raise OSError(number, os.strerror(number), name)


def _describe(launch: Launch, argv: list[str]) -> dict[str, Any]:
    kept = [] if launch["uid"] else list(_CAPABILITIES)
    return {
        "ociVersion": "1.0.0",
        "hostname": "sandbox",
        "root": {"path": "/", "readonly": False},
        "process": {
            "args": argv,
            "env": [f"{name}={value}" for name, value in launch["env"].items()],
            "cwd": os.getcwd(),
            "user": {"uid": launch["uid"], "gid": launch["gid"], "additionalGids": list(launch["groups"])},
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), kept),
            "noNewPrivileges": True,
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            *([_TMP] if os.path.isdir("/tmp") else []),
        ],
        "linux": {},
    }
