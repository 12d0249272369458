"""Sandboxes whose programs run in a virtual machine (`inner/microvm.py`): when a spec gets one, and what this machine has for it.

`qemu` and `virtiofsd` come from the machine's packages, the kernel from `ROLLYARD_MICROVM_KERNEL` or /boot. KVM is used where the
processor has it; a `/dev/kvm` alone says nothing. Elsewhere `qemu` computes every instruction, which is slow.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.errors import IsolationTooWeak, Unsupported
from rollyard.core.sandbox import Capabilities, Resources, SandboxSpec
from rollyard.sandbox.local import guest_image
from rollyard.sandbox.local.binds import make_bind
from rollyard.sandbox.local.cgroups import DEFAULT_PIDS
from rollyard.sandbox.local.inner import microvm
from rollyard.sandbox.local.journal import Home
from rollyard.sandbox.local.probe import Level

VARIABLE = "ROLLYARD_MICROVM_KERNEL"
# By a name on PATH, or where packages put them
PROGRAMS = {
    "qemu-system-x86_64": ("qemu-system-x86_64",),
    "virtiofsd": ("virtiofsd", "/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd", "/usr/lib/virtiofsd"),
}
_LINKS = tuple(map(Path, ("/lib", "/lib64", "/bin", "/sbin")))
_OVERHEAD_MB = 384  # qemu, virtiofsd and what keeps programs, beside the guest's memory
_GUEST_MB = 128  # the guest's kernel, its first files and its first program, beside what programs may use
_DEFAULT_MB, _DEFAULT_CPUS = 2048, 2


class MicrovmUse:
    """`always`: every sandbox of the backend, else those whose spec asks for it by `min_isolation`."""

    def __init__(self, *, always: bool, level: Level, root: Path) -> None:
        self.always, self._level, self._root = always, level, root
        self._images: dict[Path, Path] = {}

    def takes(self, spec: SandboxSpec) -> bool:
        """Whether a sandbox is to be in a virtual machine; refused where there can be none."""
        if not self.always and spec.min_isolation != "microvm":
            return False
        if self._level not in ("full", "no_cgroups"):
            raise IsolationTooWeak(
                f"isolation 'microvm' needs namespaces and /proc, and the level here is {self._level!r}",
                hint="`rollyard doctor` says what is missing",
            )
        if platform.machine() != "x86_64":
            raise IsolationTooWeak(f"isolation 'microvm' needs an x86-64 processor, this is {platform.machine()}")
        _find_programs()
        find_kernel()
        _refuse(spec)
        return True

    def settings(self, spec: SandboxSpec) -> dict[str, Any]:
        """What `inner/microvm.py` needs to start one."""
        qemu, virtiofsd = _find_programs()
        kvm = can_use_kvm()
        return {
            "qemu": qemu,
            "virtiofsd": virtiofsd,
            "links": {path.name: str(path.readlink()) for path in _LINKS if path.is_symlink()},
            "memory_mb": (spec.resources.memory_mb or _DEFAULT_MB) + _GUEST_MB,
            "cpus": min(os.cpu_count() or 1, math.ceil(spec.resources.cpus or _DEFAULT_CPUS)) if kvm else 1,
            "pids": spec.resources.pids or DEFAULT_PIDS,
            "accelerator": "kvm" if kvm else "tcg",
            "words": []
            if kvm
            else [f"tsc_early_khz={_clock_khz()}"],  # this machine type has no clock to measure it by
            "boot_s": max(spec.boot_s - 1, spec.boot_s / 2),  # so that the reason is told before the opener gives up
        }

    def make_image(self) -> Path:
        """What its machines start from; made once, which takes a moment."""
        kernel = find_kernel()
        if kernel not in self._images:
            self._images[kernel] = guest_image.make(self._root, kernel)
        return self._images[kernel]

    def binds(self) -> list[dict[str, Any]]:
        """What is shown to `qemu` and to nothing in the guest."""
        shown = {"usr": "/usr", "kernel": str(find_kernel().resolve()), "image": str(self.make_image())}
        return [make_bind(f"{microvm.PLACE}/{name}", source) for name, source in shown.items()]


def _refuse(spec: SandboxSpec) -> None:
    """What the guest cannot be given is refused by name, and not left out."""
    asked = {
        "network='allowlist'": spec.network == "allowlist",
        "network='host'": spec.network == "host",
        "services and volumes": bool(spec.beside or spec.volumes or spec.names),
        "options.nesting": "nesting" in spec.options,
        "resources.gpus": bool(spec.resources.gpus),
    }
    if found := [name for name, is_asked in asked.items() if is_asked]:
        raise Unsupported(
            f"a virtual machine of the local backend has no {' and no '.join(found)}",
            hint="lower min_isolation, or use network='none' and one sandbox",
        )


def outer_resources(spec: SandboxSpec, tmpfs_mb: int) -> Resources:
    """The limits of the sandbox around the machine: the guest keeps its programs to their own."""
    memory = (spec.resources.memory_mb or _DEFAULT_MB) + _GUEST_MB + _OVERHEAD_MB
    memory += tmpfs_mb if spec.disk == "tmpfs" else 0
    return msgspec.structs.replace(spec.resources, memory_mb=memory, pids=DEFAULT_PIDS)


def devices(home: Home) -> Sequence[str]:
    """The node by which `qemu` uses KVM. The sandbox's root may not open the machine's own, so real root makes it one."""
    if not can_use_kvm():
        return ()
    if os.geteuid() != 0:
        return ("/dev/kvm",)
    node = home.path / "kvm"
    os.mknod(node, stat.S_IFCHR | 0o600, Path("/dev/kvm").stat().st_rdev)
    node.chmod(0o666)  # below a directory that only this user may enter
    return (str(node),)


def can_use_kvm() -> bool:
    flags = Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split()
    return bool({"vmx", "svm"} & set(flags)) and os.access("/dev/kvm", os.R_OK | os.W_OK)


def find_kernel() -> Path:
    named = os.environ.get(VARIABLE)
    found = [Path(named)] if named else sorted(Path("/boot").glob("vmlinuz-*"), key=_version)
    if not found or not found[-1].is_file():
        raise IsolationTooWeak(
            f"isolation 'microvm' needs a kernel, and {f'there is none at {named}' if named else '/boot has no vmlinuz-*'}",
            hint=f"Debian: apt-get install linux-image-cloud-amd64; or name a file vmlinuz-VERSION in {VARIABLE}",
        )
    guest_image.find_modules(found[-1])
    return found[-1]


def _version(path: Path) -> list[int]:
    words = path.name.partition("-")[2].replace("-", ".").split(".")
    return [int(word) for word in words if word.isdigit()]


def _find_programs() -> tuple[str, ...]:
    """The paths of `PROGRAMS`, in that order."""
    paths: list[str] = []
    for name, places in PROGRAMS.items():
        found = next(filter(None, map(shutil.which, places)), None)
        if found is None or not os.path.realpath(found).startswith("/usr/"):
            raise IsolationTooWeak(
                f"isolation 'microvm' needs {name}, which is not below /usr on this machine",
                hint="Debian: apt-get install qemu-system-x86 (and virtiofsd, from Debian 13 on)",
            )
        paths.append(os.path.realpath(found))
    return tuple(paths)


def _clock_khz() -> int:
    words = Path("/proc/cpuinfo").read_text().partition("\ncpu MHz")[2].partition("\n")[0].split()
    return round(float(words[-1]) * 1000)


def with_microvm(found: Capabilities) -> Capabilities:
    """The guest bounds memory and processes itself."""
    return msgspec.structs.replace(
        found,
        isolation="microvm",
        network_allowlist=False,
        services=False,
        gpus=False,
        memory_limit=True,
        pids_limit=True,
    )
