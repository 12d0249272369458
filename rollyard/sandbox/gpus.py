"""GPUs of this machine, reserved for one sandbox at a time.

A GPU is a device node (`/dev/nvidia0`); the driver's other nodes go with each. A reservation is a lock on a file that is named
after it, in a directory that all backends and processes of one user share, and is held by the process that opened the sandbox:
when that is killed its reservations are gone with it, and so are its sandboxes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from rollyard.core.errors import SandboxUnavailable, Unsupported
from rollyard.core.home import data_home, private_dir
from rollyard.core.sandbox import Resources, SandboxSpec

SHARE = "gpu_share"  # the option by which sandboxes that all have it may have the same GPUs
_NODE = re.compile(r"nvidia(\d+)")
_COMMON = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
_DRIVER = Path("/proc/driver/nvidia/gpus")


class Gpu(msgspec.Struct, frozen=True):
    """`kind` is what its driver calls it, where that is known."""

    number: int
    path: str
    kind: str | None = None


class GpuReservation:
    """GPUs that are one sandbox's until it is released; `devices` are the nodes that it is shown."""

    def __init__(self, gpus: Sequence[Gpu], devices: Sequence[str], locks: Sequence[int]) -> None:
        self.gpus, self.devices = tuple(gpus), tuple(devices)
        self._locks = list(locks)

    def share(self) -> GpuReservation:
        """The same GPUs once more: they are free when both are released."""
        return GpuReservation(self.gpus, self.devices, [os.dup(lock) for lock in self._locks])

    def release(self) -> None:
        while self._locks:
            os.close(self._locks.pop())


class GpuPool:
    """`devices` is where device nodes are."""

    def __init__(self, devices: str | Path = "/dev") -> None:
        self._devices = Path(devices)

    def list(self) -> list[Gpu]:
        nodes: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            nodes = os.listdir(self._devices)
        names = [name for node in nodes if (name := _NODE.fullmatch(node)) is not None]
        kinds = _read_kinds() if names else {}
        found = [(int(name[1]), str(self._devices / name[0])) for name in names]
        return [Gpu(number, path, kinds.get(number)) for number, path in sorted(found)]

    def check(self, resources: Resources, *, lifetime: str) -> None:
        """Refuse what can never be had here."""
        if resources.tpu is not None:
            raise Unsupported("there are no TPUs for sandboxes", hint="resources.tpu must be unset")
        if not resources.gpus:
            return
        fitting = self._list_fitting(resources)
        if resources.gpus > len(fitting):
            kinds = f" of type {' or '.join(resources.gpu_types)}" if resources.gpu_types else ""
            raise Unsupported(f"resources.gpus={resources.gpus}: this machine has {len(fitting)} GPUs{kinds}")
        if lifetime != "owner":
            raise Unsupported("GPUs are reserved by the process that opens the sandbox", hint="say lifetime='owner'")

    def reserve(self, resources: Resources, *, share: bool, held: GpuReservation | None = None) -> GpuReservation:
        """As many as are asked for, or an error that may be tried again. Those that are `held` for it already are enough."""
        if not resources.gpus:
            return GpuReservation((), (), ())
        if (
            held is not None
            and set(held.gpus) <= set(self._list_fitting(resources))
            and len(held.gpus) == resources.gpus
        ):
            return held.share()
        place = private_dir(data_home() / "gpus")
        got: list[tuple[Gpu, int]] = []
        for gpu in self._list_fitting(resources):
            if len(got) < resources.gpus and (lock := _lock(place / str(gpu.number), share=share)) is not None:
                got.append((gpu, lock))
        reserved = GpuReservation([gpu for gpu, _ in got], self._nodes(got), [lock for _, lock in got])
        if len(got) < resources.gpus:
            reserved.release()
            raise SandboxUnavailable(
                f"{resources.gpus} GPUs were asked for and {len(got)} are free",
                hint="others have them; try again later",
            )
        return reserved

    def _list_fitting(self, resources: Resources) -> list[Gpu]:
        wanted = [kind.lower() for kind in resources.gpu_types]
        return [gpu for gpu in self.list() if not wanted or any(kind in (gpu.kind or "").lower() for kind in wanted)]

    def _nodes(self, got: Sequence[tuple[Gpu, int]]) -> list[str]:
        common = [str(self._devices / name) for name in _COMMON if (self._devices / name).exists()]
        return [*(gpu.path for gpu, _ in got), *common]


def find_held(
    spec: SandboxSpec, live: Iterable[tuple[Mapping[str, str], GpuReservation | None]]
) -> GpuReservation | None:
    """What a verifier's sandbox has not to reserve: the GPUs of its rollout's own, whose agent has ended. On a machine where
    all are taken no rollout could be judged otherwise. `live` are the labels and reservations of the backend's sandboxes."""
    rollout = spec.labels.get("rollyard.rollout")
    if rollout is None or spec.labels.get("rollyard.role") != "verifier":
        return None
    own = (held for labels, held in live if labels.get("rollyard.rollout") == rollout and "rollyard.role" not in labels)
    return next(own, None)


def _lock(path: Path, *, share: bool) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, (fcntl.LOCK_SH if share else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return fd
    os.close(fd)
    return None


def _read_kinds() -> dict[int, str]:
    """What the driver says of each, by the number of its node."""
    found: dict[int, str] = {}
    for path in _DRIVER.glob("*/information"):
        with contextlib.suppress(OSError, KeyError, ValueError):
            rows = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
            found[int(rows["Device Minor"])] = rows["Model"].strip()
    return found
