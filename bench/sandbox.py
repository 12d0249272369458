"""Local sandboxes: open, exec, fork, kill, hand out, as ratios to `subprocess.run(["true"])` measured in between.

Absolute times say more about the machine than about the code; the ratio to the cheapest thing one can do with a program
says something. Every sample of ours is taken next to a sample of that. The last column is the ratio of the tenth
percentiles, which a busy machine disturbs less; budgets are compared with the medians. Opens are sampled with the launcher
at rest (it prepares ahead), and a burst shows what it does without that. Memory is the sum of the proportional set sizes
of the processes of idle sandboxes, and the drop of MemAvailable, which also counts what the kernel keeps.

    python -m bench.sandbox [--samples 60] [--live 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import rollyard as ry
from bench.figures import note
from rollyard.sandbox.local.backend import LocalBackend

# what -> the most times `subprocess.run(["true"])` it may take
BUDGETS = {"open": 10.0, "exec": 4.0}
MAX_MB = 3.0
MAX_FORK_TO_OPEN = 1.2
MAX_POOLED_MS = 1.0
REST_S = 0.05


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


class Times:
    """Samples of one operation and of the calibration taken beside them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.own: list[float] = []
        self.true: list[float] = []

    async def take(self, operation: Callable[[], Awaitable[object]]) -> object:
        start = time.perf_counter()
        subprocess.run(["/bin/true"], check=True)
        middle = time.perf_counter()
        result = await operation()
        self.true.append(middle - start)
        self.own.append(time.perf_counter() - middle)
        return result

    @property
    def ratio(self) -> float:
        return percentile(self.own, 0.5) / percentile(self.true, 0.5)

    def show(self) -> None:
        own, true = (
            f"{percentile(values, 0.5) * 1e3:8.2f} {percentile(values, 0.95) * 1e3:8.2f}"
            for values in (self.own, self.true)
        )
        quiet = percentile(self.own, 0.1) / percentile(self.true, 0.1)
        print(f"{self.name:26} {own}   {true}   {self.ratio:6.1f}x {quiet:6.1f}x", flush=True)


async def latencies(backend: LocalBackend, samples: int) -> dict[str, Times]:
    names = ("open", "open + first exec", "exec", "write 1 kB", "read 1 kB", "open tmpfs", "fork", "kill", "pooled")
    times = {name: Times(name) for name in names}
    await (await backend.open(ry.SandboxSpec())).kill()
    async with backend.open(ry.SandboxSpec()) as template:
        await template.exec("head -c 20M /dev/zero > /workspace/data; seq 2000 | xargs touch", timeout=60)
        image = await template.snapshot()
    await (await backend.open(ry.SandboxSpec(image=image))).kill()
    for _ in range(samples):
        await asyncio.sleep(REST_S)
        box = await times["open"].take(lambda: _open(backend, ry.SandboxSpec()))
        await box.exec(["/bin/true"], timeout=10)
        for _ in range(3):
            await times["exec"].take(lambda box=box: box.exec(["/bin/true"], timeout=10))
        await times["write 1 kB"].take(lambda box=box: box.write("/tmp/f", bytes(1000)))
        await times["read 1 kB"].take(lambda box=box: box.read("/tmp/f"))
        await times["kill"].take(box.kill)
        await asyncio.sleep(REST_S)
        box = await times["open tmpfs"].take(lambda: _open(backend, ry.SandboxSpec(disk="tmpfs")))
        await box.kill()
        await asyncio.sleep(REST_S)
        box = await times["open + first exec"].take(lambda: _first(backend))
        await box.kill()
        await asyncio.sleep(REST_S)
        box = await times["fork"].take(lambda: _open(backend, ry.SandboxSpec(image=image)))
        await box.kill()
    async with backend.pool(ry.SandboxSpec(), 4) as pool:
        for _ in range(samples):
            while pool.ready < 4:
                await asyncio.sleep(0.002)
            box = await times["pooled"].take(pool.take)
            await box.kill()
    return times


async def burst(backend: LocalBackend, count: int) -> None:
    start = time.perf_counter()
    boxes = await asyncio.gather(*(_open(backend, ry.SandboxSpec()) for _ in range(count)))
    each = (time.perf_counter() - start) / count
    await asyncio.gather(*(box.kill() for box in boxes))
    print(f"burst: {count} opened at once, {1 / each:.0f} a second")


async def _open(backend: LocalBackend, spec: ry.SandboxSpec):
    return await backend.open(spec)


async def _first(backend: LocalBackend):
    box = await backend.open(ry.SandboxSpec())
    await box.exec(["/bin/true"], timeout=10)
    return box


def pss_mb(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        match = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
        total += int(match[1]) if match else 0
    return total / 1024


def available_mb() -> float:
    match = re.search(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(), re.M)
    return int(match[1]) / 1024 if match else 0.0


async def density(backend: LocalBackend, count: int) -> float:
    before, start = available_mb(), time.perf_counter()
    boxes = []
    first = last = 0.0
    for number in range(count):
        began = time.perf_counter()
        boxes.append(await backend.open(ry.SandboxSpec()))
        if number < 50:
            first += (time.perf_counter() - began) / min(50, count)
        if number >= count - 50:
            last += (time.perf_counter() - began) / min(50, count)
    opened = time.perf_counter() - start
    await asyncio.sleep(0.5)
    pss = await asyncio.to_thread(pss_mb, [box.info.pid for box in boxes]) / count
    drop = (before - available_mb()) / count
    print(
        f"\n{count} live: opened in {opened:.1f} s (mean of the first 50 {first * 1e3:.1f} ms, "
        f"of the last 50 {last * 1e3:.1f} ms), {pss:.2f} MB of memory each, {drop:.2f} MB less available each"
    )
    done = await asyncio.gather(*(box.exec(["/bin/true"], timeout=120) for box in boxes))
    assert all(exit_.ok for exit_ in done)
    start = time.perf_counter()
    await asyncio.gather(*(box.kill() for box in boxes))
    print(f"one exec in each was fine; all killed in {time.perf_counter() - start:.1f} s")
    return pss


def measure_others(samples: int) -> None:
    """What else this machine has, run to the end of `true` with all namespaces and no network."""
    commands = {
        "unshare": ["unshare", "-r", "-p", "-m", "-n", "-u", "-i", "--fork", "true"],
        "bwrap": ["bwrap", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib",
                  "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--unshare-all", "true"],
    }  # fmt: skip
    for engine in ("docker", "podman"):
        commands[f"{engine} run"] = [
            engine,
            "run",
            "--rm",
            "--pull",
            "never",
            "--network",
            "none",
            "busybox:bench",
            "true",
        ]
    for name, command in commands.items():
        if shutil.which(command[0]) is None:
            print(f"{name:26} not installed")
            continue
        times = Times(name)
        try:
            for _ in range(samples):
                asyncio.run(times.take(lambda command=command: _run(command)))
        except subprocess.CalledProcessError as error:
            print(f"{name:26} does not work here: {error.stderr.decode().strip().splitlines()[-1][:90]}")
            continue
        times.show()


async def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


async def measure(samples: int, live: int) -> bool:
    print(f"{'':26} {'p50 ms':>8} {'p95 ms':>8}   {'true p50':>8} {'true p95':>8}   {'p50':>7} {'p10':>7}")
    with tempfile.TemporaryDirectory(prefix="ry-bench-") as root:
        async with LocalBackend(root=root) as backend:
            print(f"isolation level {backend.level}, cgroups {backend.cgroup_kind}, {samples} samples", flush=True)
            times = await latencies(backend, samples)
            for row in times.values():
                row.show()
            fork = percentile(times["fork"].own, 0.5) / percentile(times["open"].own, 0.5)
            pooled = percentile(times["pooled"].own, 0.5) * 1e3
            await burst(backend, 64)
            memory = await density(backend, live)
    print()
    within = [note(f"{name} / running `true`", times[name].ratio, budget) for name, budget in BUDGETS.items()]
    within.append(note("fork / open", fork, MAX_FORK_TO_OPEN))
    within.append(note("ms of an open from the pool", pooled, MAX_POOLED_MS))
    within.append(note("MB of a live sandbox", memory, MAX_MB))
    return all(within)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--live", type=int, default=1000, help="how many live at the same time")
    options = parser.parse_args()
    fits = asyncio.run(measure(options.samples, options.live))
    measure_others(min(options.samples, 20))
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
