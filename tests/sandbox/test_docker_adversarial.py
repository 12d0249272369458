"""What an agent may try against a container engine and its machine, on real engines. Root inside, as most images have it."""

import os

import pytest

import rollyard as ry
from rollyard.sandbox import backend
from rollyard.sandbox.docker.engine import DockerEngine

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.slow, pytest.mark.adversarial]

# Each says HOLE where it came through. busybox is all that the image needs to have.
ATTACKS = {
    "the engine's socket": "for s in /run/docker.sock /run/podman/podman.sock; do [ -S $s ] && echo HOLE; done",
    "a device of the machine": "mknod /tmp/disk b 8 0 && dd if=/tmp/disk of=/dev/null bs=512 count=1 "
    "2>/dev/null && echo HOLE",
    "the machine's memory": "dd if=/dev/mem of=/dev/null bs=1 count=1 2>/dev/null && echo HOLE",
    "a mount": "mkdir -p /m; mount -t tmpfs x /m 2>/dev/null && echo HOLE; mount -t proc x /m 2>/dev/null && echo HOLE",
    "a remount": "mount -o remount,rw /proc/sys 2>/dev/null && echo HOLE; "
    "mount -o remount,rw /sys 2>/dev/null && echo HOLE",
    "a core pattern": "cd /proc/sys/kernel; p=$(cat core_pattern); (echo $p > core_pattern) 2>/dev/null && echo HOLE",
    "a sysrq": "(echo h > /proc/sysrq-trigger) 2>/dev/null && echo HOLE",
    "a release agent": "for d in $(find /sys/fs/cgroup -name release_agent); "
    "do [ -w $d ] && cat $d > $d && echo HOLE; done 2>/dev/null",
    "its own limits": "for f in $(find /sys/fs/cgroup -name memory.limit_in_bytes -o -name memory.max -o -name "
    "pids.max);"
    " do echo max > $f && echo HOLE; done 2>/dev/null",
    "processes of the machine": "[ $(ls -d /proc/[0-9]* | wc -l) -gt 40 ] && echo HOLE; "
    "[ -e /proc/1/root/HOST_MARK ] && echo HOLE",
    "powers of the machine": "c=$(awk '/CapEff/ {print $2}' /proc/self/status);"
    " for n in 16 17 19 20 21 22 25; do [ $((0x$c >> n & 1)) = 1 ] && echo HOLE $n; done",
    "the host's name": "hostname $(hostname) 2>/dev/null && echo HOLE",
    "a network device": "ip link add dummy0 type dummy 2>/dev/null && echo HOLE; "
    "tail -n +3 /proc/net/dev | grep -v ' lo:' && echo HOLE",
    "files of the machine": "[ -e HOST_MARK ] && echo HOLE",
    "a variable of the runner": "env | grep -q HOST_SECRET && echo HOLE",
}


@pytest.fixture
async def made(engine):
    kind, host = engine
    async with backend(kind, host=host) as made:
        yield made


async def test_an_agent_stays_in_its_container(made, tmp_path, monkeypatch):
    monkeypatch.setenv("HOST_SECRET", "very secret")
    mark = tmp_path / "mark"
    mark.touch()
    async with made.open(ry.SandboxSpec()) as box:
        holes = {}
        for attack, script in ATTACKS.items():
            done = await box.exec(f"{script.replace('HOST_MARK', str(mark))}\ntrue", timeout=60)
            if "HOLE" in done.text or not done.ok:
                holes[attack] = done.text
    assert holes == {}


async def test_a_container_without_limits_has_a_share_of_the_machine(made, engine):
    _, host = engine
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    async with made.open(ry.SandboxSpec()), DockerEngine(host) as asked:
        (container,) = await asked.call("GET", "containers/json")
        found = (await asked.call("GET", f"containers/{container['Id']}/json"))["HostConfig"]
    assert 0 < found["Memory"] <= total // 2
    assert found["CpuShares"] == 512


async def test_a_container_ends_at_its_number_of_processes(made):
    script = "n=0; while [ $n -lt 400 ]; do sleep 20 & n=$((n+1)); done; echo all"
    async with made.open(ry.SandboxSpec(resources=ry.Resources(pids=64))) as box:
        done = await box.exec(f"({script}) 2>&1 | tail -1", timeout=120)
        assert "all" not in done.text
