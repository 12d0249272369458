"""GPUs as a resource, with device nodes that only look like some: shown to one sandbox, reserved, and given back."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

import rollyard as ry
from rollyard.core.errors import SandboxUnavailable, Unsupported
from rollyard.core.sandbox import Capabilities, Resources
from rollyard.core.task import Task
from rollyard.sandbox.docker import container
from rollyard.sandbox.gpus import GpuPool
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.sandbox.retry import OpenLimits
from rollyard.tasks.requirements import refuse

pytestmark = pytest.mark.anyio
ONE, TWO = Resources(gpus=1), Resources(gpus=2)
SHOW = "ls /dev | grep nvidia; for node in /dev/nvidia?; do head -c 3 $node | od -An -tx1; done"


@pytest.fixture
def devices(tmp_path, monkeypatch):
    """A directory with two nodes that give zeros without end, and the driver's own."""
    monkeypatch.setenv("ROLLYARD_HOME", str(tmp_path / "home"))
    place = tmp_path / "dev"
    place.mkdir()
    try:
        for name in ("nvidia0", "nvidia1", "nvidiactl"):
            os.mknod(place / name, stat.S_IFCHR | 0o666, os.makedev(1, 5))
            (place / name).chmod(0o666)
        (place / "nvidia0").open("rb").close()
    except PermissionError:
        pytest.skip("device nodes cannot be made here (root with CAP_MKNOD, and a file system that has them)")
    (place / "nvidia-caps").mkdir()
    return place


@pytest.fixture
async def backend(devices, tmp_path):
    limits = OpenLimits(attempts=1)
    async with LocalBackend(root=tmp_path / "home", devices=devices, limits=limits) as made:
        yield made


async def test_a_sandbox_sees_the_gpu_that_it_has_and_no_other(backend):
    async with backend.open(ry.SandboxSpec(resources=ONE)) as box:
        assert (await box.exec(SHOW, timeout=20)).stdout.decode().split() == ["nvidia0", "nvidiactl", "00", "00", "00"]
        async with backend.open(ry.SandboxSpec(resources=ONE)) as other:
            done = await other.exec(SHOW, timeout=20)
            assert done.stdout.decode().split() == ["nvidia1", "nvidiactl", "00", "00", "00"]
    async with backend.open(ry.SandboxSpec()) as plain:
        assert (await plain.exec("ls /dev | grep nvidia", timeout=20)).stdout == b""


async def test_two_never_have_the_same_unless_both_ask_for_it(backend):
    share = {"options": {"gpu_share": "yes"}}
    async with backend.open(ry.SandboxSpec(resources=TWO)) as box:
        for spec in (ry.SandboxSpec(resources=ONE), ry.SandboxSpec(resources=ONE, **share)):
            with pytest.raises(SandboxUnavailable, match="1 GPUs were asked for and 0 are free"):
                await backend.open(spec)
        await box.kill()
    async with backend.open(ry.SandboxSpec(resources=TWO, **share)):
        async with backend.open(ry.SandboxSpec(resources=ONE, **share)) as second:
            assert b"nvidia0" in (await second.exec("ls /dev", timeout=20)).stdout
        with pytest.raises(SandboxUnavailable, match="are free"):
            await backend.open(ry.SandboxSpec(resources=ONE))


async def test_an_open_that_fails_gives_back_what_it_reserved(backend):
    for _ in range(3):
        with pytest.raises(ry.core.errors.UnknownName):
            await backend.open(ry.SandboxSpec(image="no-such-image", resources=TWO))
    async with backend.open(ry.SandboxSpec(resources=TWO)):
        pass


HOLD = """
import sys
from rollyard.core.sandbox import Resources
from rollyard.sandbox.gpus import GpuPool
held = GpuPool(sys.argv[1]).reserve(Resources(gpus=1), share=False)
print(held.gpus[0].number, flush=True)
sys.stdin.read()
"""


def test_another_process_has_its_own_and_its_reservation_ends_with_it(devices):
    pool = GpuPool(devices)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(devices)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "0\n"
        with pytest.raises(SandboxUnavailable, match="2 GPUs were asked for and 1 are free"):
            pool.reserve(TWO, share=False)
        held = pool.reserve(ONE, share=False)
        assert [gpu.number for gpu in held.gpus] == [1]
        with pytest.raises(SandboxUnavailable):
            pool.reserve(ONE, share=True)
        held.release()
    finally:
        child.kill()
        child.wait()
    pool.reserve(TWO, share=False).release()


async def test_what_there_is_not_is_refused_by_name_before_anything_opens(backend, tmp_path):
    assert backend.capabilities.gpus
    with pytest.raises(Unsupported, match="this machine has 2 GPUs"):
        backend.open(ry.SandboxSpec(resources=Resources(gpus=3)))
    with pytest.raises(Unsupported, match="0 GPUs of type h100"):
        backend.open(ry.SandboxSpec(resources=Resources(gpus=1, gpu_types=("h100",))))
    with pytest.raises(Unsupported, match="TPU"):
        backend.open(ry.SandboxSpec(resources=Resources(tpu="v5:2x2")))
    with pytest.raises(Unsupported, match="lifetime='owner'"):
        backend.open(ry.SandboxSpec(resources=ONE, lifetime="ttl"))
    none = LocalBackend(root=tmp_path / "none", devices=tmp_path / "none")
    with pytest.raises(Unsupported, match="no GPU for sandboxes here"):
        none.open(ry.SandboxSpec(resources=ONE))


def test_a_task_that_asks_for_one_is_refused_only_where_there_is_none():
    task = Task(id="t", instruction="x", resources=ONE)
    refuse(task, "big", Capabilities(isolation="namespace", gpus=True))
    with pytest.raises(Unsupported, match="accelerators"):
        refuse(task, "small", Capabilities(isolation="namespace"))


@pytest.mark.slow
async def test_a_rollout_has_the_gpu_its_task_asks_for_and_is_judged_with_it_when_no_other_is_free(backend, devices):
    (devices / "nvidia1").unlink()
    task = Task(id="t", instruction="x", resources=ONE)
    script = ry.policy.scripted({"steps": [{"shell": "ls /dev | grep -c nvidia0 > out.txt"}, {"text": "done"}]})
    check = ['test "$(cat out.txt)" = 1']
    done = await ry.run_rollout(task, agent="shell-agent", policy=script, sandbox=backend, verify=check)
    assert (done.failure, done.reward) == (None, 1.0)


def test_an_engine_is_told_of_the_devices_and_of_the_numbers_where_it_has_the_driver(devices):
    reserved = GpuPool(devices).reserve(ONE, share=False)
    try:
        shown = container.show_gpus(reserved, {"runc": {}})["Devices"]
        assert [(one["PathOnHost"], one["PathInContainer"]) for one in shown] == [
            (f"{devices}/nvidia0", "/dev/nvidia0"),
            (f"{devices}/nvidiactl", "/dev/nvidiactl"),
        ]
        (asked,) = container.show_gpus(reserved, {"nvidia": {}})["DeviceRequests"]
        assert asked["DeviceIDs"] == ["0"]
    finally:
        reserved.release()


@pytest.mark.engine
@pytest.mark.slow
async def test_a_container_sees_the_gpu_that_it_has_and_no_other(engine, devices):
    kind, host = engine
    async with ry.sandbox.backend(kind, host=host, devices=devices) as backend:
        async with (
            backend.open(ry.SandboxSpec(resources=ONE)) as box,
            backend.open(ry.SandboxSpec(resources=ONE)) as other,
        ):
            for sandbox, own in ((box, "nvidia0"), (other, "nvidia1")):
                done = await sandbox.exec("ls /dev | grep nvidia", timeout=60)
                assert done.stdout.decode().split() == [own, "nvidiactl"]
