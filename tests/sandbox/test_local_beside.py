"""Sandboxes beside another one: its network and volumes are theirs, and nothing else is."""

from __future__ import annotations

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, SandboxGone, Unsupported
from rollyard.core.sandbox import Volume
from rollyard.sandbox.local.backend import LocalBackend

pytestmark = pytest.mark.anyio
DATA = Volume(name="data", path="/data")
SERVE = [
    "python3",
    "-c",
    "import socket; s = socket.create_server(('127.0.0.1', 7000)); print('up', flush=True); s.accept()[0].send(b'hello')",
]
ASK = ["python3", "-c", "import socket; print(socket.create_connection(('db', 7000), 10).recv(9).decode())"]


@pytest.fixture
async def main(backend):
    async with backend.open(ry.SandboxSpec(names=("db",), volumes=(DATA,))) as opened:
        yield opened


@pytest.fixture
async def service(backend, main):
    spec = ry.SandboxSpec(beside=main.id, names=("db",), volumes=(DATA,), disk="tmpfs")
    async with backend.open(spec) as opened:
        yield opened


async def listening(job):
    async for _, _ in job.stream():
        return


async def test_it_shares_the_network_and_is_found_by_its_name(main, service):
    await listening(await service.start(SERVE))
    assert (await main.exec(ASK, timeout=20)).stdout == b"hello\n"


async def test_it_shares_volumes_and_no_other_file_process_or_user_of_the_host(main, service):
    await main.exec("echo 1 > /data/a; echo 1 > /tmp/private; chmod 600 /data/a", timeout=20)
    found = await service.exec(
        "cat /data/a; test -e /tmp/private; echo $?; touch /data/b; stat -c %u /data/a", timeout=20
    )
    assert found.stdout == b"1\n1\n0\n"
    assert await main.exists("/data/b")
    await main.start("exec sleep 3333")
    assert b"3333" not in (await service.exec("cat /proc/[0-9]*/cmdline", timeout=20)).stdout


async def test_another_user_writes_to_a_volume_and_nobody_to_one_that_is_read_only(backend, main):
    shown = Volume(name="data", path="/shown", writable=False)
    async with backend.open(ry.SandboxSpec(beside=main.id, volumes=(shown,))) as reader:
        assert (await main.exec("echo 1 > /data/mine", user="agent", timeout=20)).ok
        done = await reader.exec("cat /shown/mine; echo 2 > /shown/mine", timeout=20)
        assert (done.stdout, done.ok) == (b"1\n", False)


async def test_each_ends_alone_and_a_volume_with_the_sandbox_it_belongs_to(backend, main, service):
    await service.exec("echo 1 > /data/a", timeout=20)
    await service.kill()
    assert await main.read("/data/a") == b"1\n"
    held = backend.root / "boxes" / main.id / "fs" / "volumes" / "data" / "a"
    assert held.exists()
    await main.kill()
    async with LocalBackend(root=backend.root) as second:
        await second.reap()
        assert not held.exists()


async def test_a_sandbox_opened_after_it_has_a_network_of_its_own(backend, main, service):
    await listening(await service.start(SERVE))
    async with backend.open(ry.SandboxSpec(names=("db",))) as stranger:
        assert b"ConnectionRefusedError" in (await stranger.exec(ASK, timeout=20)).stderr


async def test_a_sandbox_that_is_not_there_and_a_level_without_namespaces_are_refused(backend, tmp_path):
    with pytest.raises(SandboxGone, match="sbx_none"):
        await backend.open(ry.SandboxSpec(beside="sbx_none"))
    assert await backend.list() == []
    weak = LocalBackend(root=tmp_path / "weak", level="landlock")
    assert not weak.capabilities.services
    with pytest.raises(Unsupported, match="share a network or volumes"):
        weak.open(ry.SandboxSpec(volumes=(DATA,)))


@pytest.mark.parametrize(
    ("name", "path"), [("../x", "/d"), ("a/b", "/d"), ("", "/d"), ("a", "d"), ("a", "/"), ("a", "/x/../..")]
)
def test_a_volume_has_a_plain_name_and_an_absolute_place(name, path):
    with pytest.raises(ConfigError):
        Volume(name=name, path=path)
