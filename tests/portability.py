"""`make portability`: machines made here out of namespaces, mounts and wrappers. For each: the level that the local backend
reaches, what is not to be had there, and whether one rollout ended with reward 1.0."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import rollyard as ry
from tests.servers.venvs import make_venv

ROOT = Path(__file__).parents[1]
USER = 65011
ROLLOUT = """
import asyncio, json, sys
import rollyard as ry
from rollyard.sandbox.local.backend import LocalBackend
SHOWN = ("users", "network_none", "network_allowlist", "memory_limit", "disk_limit", "dial", "tree_kill")
async def main():
    task = ry.Taskset.load(sys.argv[1])[0]
    async with LocalBackend() as backend:
        can = backend.capabilities
        refused = [name for name in SHOWN if not getattr(can, name)]
        done = await ry.run_rollout(task, agent="oracle", sandbox=backend)
    why = done.failure.message if done.failure is not None else (done.verdict.error or "") if done.verdict is not None else ""
    found = {"level": backend.level, "cgroups": backend.cgroup_kind, "refused": refused}
    print(json.dumps({**found, "reward": done.reward, "why": why}))
asyncio.run(main())
"""
NEW_ROOT = """
t=$(mktemp -d); mount -t tmpfs -o mode=755 none $t; cd $t; mkdir m u w; {mounts}
cd m; for d in proc sys dev work root tmp {binds}; do mkdir -p $d; mount --rbind /$d $d; done
mkdir -p old; pivot_root . old; cd /; umount -l /old
"""
OVERLAY = NEW_ROOT.format(mounts="mount -t overlay -o lowerdir=/,upperdir=$t/u,workdir=$t/w none m", binds="")
MEMORY = NEW_ROOT.format(
    mounts="mount -t tmpfs -o mode=755 none m; cp -a /bin /sbin /lib /lib64 m/", binds="usr etc opt var home run"
)
CGROUP_V2 = "mount -t cgroup2 none /sys/fs/cgroup"
READ_ONLY = 'mount -t tmpfs none "$PWD"; cd "$PWD"; mount -o remount,bind,ro /'
CHROOT = "mount --rbind / /"  # the process stays at what lies below, and the kernel takes that for a chroot
GPU = """
mount -t tmpfs none /usr/local/games; echo driver > /usr/local/games/driver
f=$(mktemp); for p in /usr/lib/os-release /etc/issue; do mount --bind $f $p; done; mount -t tmpfs none /opt
"""
SMALL = "mount -t tmpfs -o size=1m,mode=1777 none /tmp; mount -t tmpfs -o size=64k,mode=1777 none /dev/shm"
NO_CGROUPS = "mount -t tmpfs none /sys/fs/cgroup"
RANGE = f"""
d=$(mktemp -d); chmod 755 $d; cp /etc/passwd /etc/group $d/
echo "ryport:x:{USER}:{USER}::/tmp:/bin/sh" >> $d/passwd
echo "ryport:x:{USER}:" >> $d/group
for f in passwd group; do mount --bind $d/$f /etc/$f; done
for f in subuid subgid; do echo "ryport:700000:65536" > $d/$f; mount --bind $d/$f /etc/$f; done
"""
PROXIES = {
    name: "http://127.0.0.1:9" for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY")
}


class Machine(NamedTuple):
    """`before` is done in a mount namespace of its own; `levels` are those that the backend may reach there."""

    name: str
    levels: tuple[str, ...]
    before: str = ""
    user: bool = False
    barred: bool = False
    apart: tuple[str, ...] = ()
    env: dict[str, str] = {}
    home: bool = True
    version: str | None = None  # of Python, where it is not the one that runs this


STRONG, USERS = ("full", "no_cgroups"), ("no_cgroups",)
MACHINES = (
    Machine("root", STRONG),
    Machine("ordinary user", USERS, user=True),
    Machine("ordinary user with a range of ids (uidmap)", USERS, before=RANGE, user=True),
    Machine("no cgroups", USERS, before=NO_CGROUPS),
    Machine("cgroup v2 alone", STRONG, before=CGROUP_V2),
    Machine("namespaces barred, root without capabilities", ("landlock",), barred=True),
    Machine("namespaces barred, ordinary user", ("landlock",), barred=True, user=True),
    Machine(
        "namespaces barred, ordinary user, read-only root", ("landlock",), before=READ_ONLY, barred=True, user=True
    ),
    Machine("mounts below /usr, /etc and /opt (GPU container)", STRONG, before=GPU),
    Machine("root on overlayfs", ("landlock",), before=OVERLAY),
    Machine("root on overlayfs, ordinary user", USERS, before=OVERLAY, user=True),
    Machine("root on tmpfs", STRONG, before=MEMORY),
    Machine("read-only root", STRONG, before=READ_ONLY),
    Machine("in a chroot", ("landlock",), before=CHROOT),
    Machine("small /tmp and /dev/shm", STRONG, before=SMALL),
    Machine("no HOME", STRONG, home=False),
    Machine("LANG=C", STRONG, env={"LANG": "C", "LC_ALL": "C"}),
    Machine("proxy variables set", STRONG, env=PROXIES),
    Machine("no network", STRONG, apart=("--net",)),
    Machine("Python 3.12", STRONG, version="3.12"),
    Machine("Python 3.13", STRONG, version="3.13"),
)


class Found(NamedTuple):
    level: str
    cgroups: str
    refused: tuple[str, ...]
    reward: float | None
    why: str


def ordinary_python() -> str:
    """A Python of this version that other users may run too."""
    for place in (sys.executable, f"/usr/bin/python3.{sys.version_info[1]}"):
        if all(parent.stat().st_mode & 0o001 for parent in Path(place).resolve().parents):
            return place
    raise FileNotFoundError("no Python of this version that another user may run")


def find_python(version: str) -> str | None:
    """The interpreter of that version on this machine: on the search path, or below pyenv."""
    if (found := shutil.which(f"python{version}", path="/usr/local/bin:/usr/bin")) is not None:
        return found
    return next(map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))), None)


def other_python(version: str) -> str:
    """Python of that version with what the package needs, made once and kept in the cache."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return make_venv(f"portability-{version}", needs, python=find_python(version) or f"python{version}")


def attempt(machine: Machine, home: Path) -> Found:
    """One rollout there, in a process of its own. What it keeps is below `home`."""
    packages = [str(Path(ry.__file__).parents[1])]
    if machine.version is None:
        packages += [path for path in sys.path if path.endswith("site-packages")]
    else:  # agents and verifiers are found by what was written down when the package was installed
        packages.append(str(home / "installed"))
        written = Path(str(metadata.distribution("rollyard").locate_file("")))
        for folder in written.glob("rollyard-*.dist-info"):
            shutil.copytree(folder, home / "installed" / folder.name)
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONPATH": ":".join(packages), **machine.env}
    env["ROLLYARD_HOME"] = str(home / "rollyard")
    if machine.home:
        env["HOME"] = str(home)
    own = ordinary_python() if machine.user else sys.executable
    python = own if machine.version is None else other_python(machine.version)
    command = [python, "-c", ROLLOUT, str(ROOT / "examples/tasks/file-edit")]
    if machine.barred:
        command = [python, str(ROOT / "tests/barred.py"), *command]
    if machine.user:
        os.chown(home, USER, USER)
        command = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *command]
    if machine.before or machine.apart:
        owner = f'chown {USER} "$PWD"' if machine.user else ""
        script = f'set -e\nmount --make-rprivate /\n{machine.before}\n{owner}\nexec "$@"'
        command = ["unshare", "--mount", *machine.apart, "sh", "-c", script, "machine", *command]
    done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        return Found("-", "-", (), None, " ".join((done.stderr or done.stdout).split())[-300:])
    found = json.loads(done.stdout.splitlines()[-1])
    return Found(found["level"], found["cgroups"], tuple(found["refused"]), found["reward"], found["why"])


def main() -> int:
    print("| machine | level | cgroups | not to be had | reward |\n|---|---|---|---|---|")
    failed = 0
    for machine in MACHINES:
        if machine.version is not None and find_python(machine.version) is None:
            print(f"| {machine.name} | not on this machine | - | - | - |", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="ry-machine-", dir="/var/tmp") as home:
            found = attempt(machine, Path(home))
        failed += found.reward != 1.0 or found.level not in machine.levels
        reward = "1.0" if found.reward == 1.0 else f"{found.reward}: {found.why}"
        print(
            f"| {machine.name} | {found.level} | {found.cgroups} | {', '.join(found.refused) or '-'} | {reward} |",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
