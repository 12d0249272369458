"""The docker backend on real engines, beyond what every backend owes: routes, leftovers, secrets, images."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys

import anyio
import pytest

import rollyard as ry
from rollyard.core.errors import CommandFailed, ConfigError, SandboxGone, UnknownName
from rollyard.core.limits import Deadline
from rollyard.core.sandbox import Resources
from rollyard.core.task import Site
from rollyard.images.store import ImageStore
from rollyard.runs.rollout.provision import Provision
from rollyard.sandbox import backend
from rollyard.sandbox.docker.engine import DockerEngine
from rollyard.testing.pytest_adapter import expect_passed
from rollyard.testing.sandbox import SandboxFixture, cases, missing
from rollyard.testing.suite import run_case

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.slow]
NETWORK = [case for case in cases() if case.id in ("N3", "N4", "N5")]
OWNER = """
import asyncio, sys, rollyard as ry
async def main():
    async with ry.sandbox.backend(sys.argv[1], host=sys.argv[2]) as backend:
        box = await backend.open(ry.SandboxSpec(labels={"drill": sys.argv[3]}))
        await box.start(["sleep", "3600"])
        print(box.id, flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""
LATE = """
import asyncio, sys, rollyard as ry
backend = None
async def main():
    global backend
    backend = await ry.sandbox.backend(sys.argv[1], host=sys.argv[2]).__aenter__()
    for _ in range(3):
        await backend.open(ry.SandboxSpec(labels={"late": sys.argv[3]}))
asyncio.run(main())
print(backend.close_now())
"""


@pytest.fixture
async def opened(engine):
    kind, host = engine
    async with backend(kind, host=host) as made:
        yield made


@pytest.mark.parametrize("route", ["netns", "socket", "exec"])
@pytest.mark.parametrize("case", NETWORK, ids=lambda case: case.id)
async def test_every_route_carries_both_ways(engine, route, case):
    kind, host = engine
    async with backend(kind, host=host, route=route) as made:
        fixture = SandboxFixture(backend=made, name=kind)
        expect_passed(await run_case(case, fixture, missing=missing(fixture)))


@pytest.mark.parametrize("route", ["netns", "socket", "exec"])
async def test_a_listener_outlives_the_end_of_every_program(engine, route):
    kind, host = engine
    ask = "import socket; s = socket.create_connection(('127.0.0.1', %d), 5); print(s.makefile().read())"
    async with backend(kind, host=host, route=route) as made, made.open(ry.SandboxSpec()) as box:
        listener = await box.listen(0)
        await box.kill_processes()

        async def answer():
            stream = await listener.accept()
            await stream.send(b"still here")
            await stream.send_eof()
            await stream.aclose()

        async with anyio.create_task_group() as group:
            group.start_soon(answer)
            done = await box.exec(["python3", "-c", ask % listener.port], timeout=30)
        assert done.stdout == b"still here\n", done


async def test_a_sandbox_ends_when_its_opener_is_killed_and_nobody_reaps(engine, opened):
    kind, host = engine
    label = f"drill-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-c", OWNER, kind, host, label], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"sbx_")
        assert len(await opened.list({"drill": label})) == 1
        process.send_signal(signal.SIGKILL)
    with anyio.fail_after(30):
        while await opened.list({"drill": label}):
            await anyio.sleep(0.2)


LEFT = """
import asyncio, sys, rollyard as ry
async def main():
    async with ry.sandbox.backend(sys.argv[1], host=sys.argv[2]) as backend:
        for _ in range(3):
            print((await backend.open(ry.SandboxSpec(lifetime="ttl", labels={"rollyard.run": sys.argv[3]}))).id, flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""


async def test_clean_removes_what_a_killed_host_left_by_label_alone(engine, opened):
    kind, host = engine
    run, other_run = f"run_{os.getpid()}", f"run_{os.getpid()}_2"
    other = await opened.open(ry.SandboxSpec(labels={"rollyard.run": other_run}))
    async with DockerEngine(host) as wire:
        body = {"Image": "rollyard-host:latest", "Cmd": ["sleep", "3600"], "Labels": {"rollyard.run": run}}
        body["HostConfig"] = {"NetworkMode": "none"}
        foreign = (await wire.call("POST", "containers/create", params={"name": f"foreign-{run}"}, body=body))["Id"]
        await wire.call("POST", f"containers/{foreign}/start")
        with subprocess.Popen(
            [sys.executable, "-c", LEFT, kind, host, run], stdout=subprocess.PIPE, text=True
        ) as child:
            left = {child.stdout.readline().strip() for _ in range(3)}
            child.kill()
        assert {info.id for info in await opened.list({"rollyard.run": run})} == left
        main = [sys.executable, "-c", "from rollyard.cli.main import main; main()"]
        name = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}[kind]
        done = await asyncio.to_thread(
            subprocess.run, [*main, "clean", "--backend", kind, "--run", run, "--json"], env={**os.environ, name: host},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert set(json.loads(done.stdout)["removed"]) == left, done.stderr
        assert await opened.list({"rollyard.run": run}) == []
        assert (await wire.call("GET", f"containers/{foreign}/json"))["State"]["Running"] and await other.alive()
        await wire.call("DELETE", f"containers/{foreign}", params={"force": True})
    await other.kill()


async def test_the_timer_inside_ends_a_sandbox_that_nobody_watches(engine, opened):
    """Its opener is gone and no reaper runs: the first process keeps the time, and a new end counts."""
    kind, host = engine
    short = await opened.open(ry.SandboxSpec(lifetime="ttl", ttl_s=4))
    longer = await opened.open(ry.SandboxSpec(lifetime="ttl", ttl_s=4))
    await longer.extend(600)
    assert (await longer.exec("tr '\\0' ' ' </proc/1/cmdline", timeout=30)).stdout.startswith(b"/bin/sh -c")
    async with DockerEngine(host) as wire:
        with anyio.fail_after(60):
            while True:
                found = await wire.call("GET", "containers/json", params={"all": True})
                if short.container not in {row["Id"] for row in found if row["State"] == "running"}:
                    break
                await anyio.sleep(0.2)
        assert (await wire.call("GET", f"containers/{longer.container}/json"))["State"]["Running"]
    await longer.kill()


async def test_teardown_works_after_the_event_loop_is_gone(engine, opened):
    kind, host = engine
    label = f"late-{os.getpid()}"
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", LATE, kind, host, label], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stderr
    assert await opened.list({"late": label}) == []


async def test_neither_the_engine_nor_a_snapshot_is_told_the_environment(engine, opened):
    _, host = engine
    async with opened.open(ry.SandboxSpec(env={"API_KEY": "canary-77"})) as box, DockerEngine(host) as wire:
        assert (await box.exec("echo $API_KEY", timeout=30)).stdout == b"canary-77\n"
        frozen = await box.snapshot()
        said = [
            await wire.call("GET", f"containers/{box.container}/json"),
            await wire.call("GET", f"images/{frozen}/json"),
        ]
        assert "canary-77" not in str(said)
        assert b"canary-77" not in (await box.exec("cat /proc/1/environ", timeout=30)).stdout
    await opened.remove_image(frozen)
    with pytest.raises(UnknownName):
        await opened.open(ry.SandboxSpec(image=frozen))


async def test_an_image_that_is_not_ours_is_never_removed(opened):
    with pytest.raises(ConfigError, match="not made here"):
        await opened.remove_image("rollyard-host:latest")


async def test_a_dockerfile_is_built_without_a_network_once(opened, tmp_path):
    (tmp_path / "Dockerfile").write_text(
        "FROM rollyard-host\nWORKDIR /srv/app\nCOPY data .\nENV COLOUR=blue\nRUN cat data > copy\n"
    )
    (tmp_path / "data").write_text("from the folder\n")
    options = {"resources": Resources(), "timeout_s": 300.0}
    image = await opened.build_image(str(tmp_path), **options)
    assert await opened.build_image(str(tmp_path), **options) == image
    async with opened.open(ry.SandboxSpec(image=image)) as box:
        done = await box.exec('pwd; cat copy; echo "$COLOUR"', timeout=30)
    assert done.stdout == b"/srv/app\nfrom the folder\nblue\n"
    (tmp_path / "Dockerfile").write_text("FROM rollyard-host\nRUN echo broken; exit 7\n")
    with pytest.raises(CommandFailed, match="7"):
        await opened.build_image(str(tmp_path), **options)
    await opened.remove_image(image)


async def test_a_sandbox_stays_when_its_programs_kill_everything_they_can(opened):
    async with opened.open(ry.SandboxSpec()) as box:
        await box.exec("kill -9 -1; kill -9 1", timeout=30)
        assert (await box.exec("echo on", timeout=30)).stdout == b"on\n"


async def test_zombies_are_reaped(opened):
    async with opened.open(ry.SandboxSpec()) as box:
        await box.exec("for i in 1 2 3 4 5; do (sleep 0.1 &) ; done; sleep 1", timeout=30)
        done = await box.exec("cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ' || true", timeout=30)
        assert done.stdout == b"0\n"


async def test_use_after_a_kill_from_outside_is_gone(engine, opened):
    _, host = engine
    box = await opened.open(ry.SandboxSpec())
    job = await box.start("sleep 600")
    async with DockerEngine(host) as wire:
        await wire.call("DELETE", f"containers/{box.container}", params={"force": True})
    with pytest.raises(SandboxGone):
        await box.exec("true", timeout=30)
    with pytest.raises(SandboxGone):
        await job.wait(30)
    assert await box.kill() is False


async def test_a_sandbox_that_writes_more_than_its_disk_limit_has_its_programs_ended(opened):
    async with opened.open(ry.SandboxSpec(resources=Resources(disk_mb=20))) as box:
        job = await box.start("head -c 60000000 /dev/zero > /srv/fill; sleep 600")
        done = await job.wait(60)
        assert done.exit_code != 0
        assert (await box.exec("stat -c %s /srv/fill", timeout=30)).stdout == b"60000000\n"


FETCH = """
import hashlib, socket, sys, threading
def one():
    s = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 60)
    s.sendall(b"go"); s.shutdown(socket.SHUT_WR)
    seen = hashlib.sha256()
    while data := s.recv(65536): seen.update(data)
    print(seen.hexdigest(), flush=True)
threads = [threading.Thread(target=one) for _ in range(int(sys.argv[2]))]
[t.start() for t in threads]; [t.join() for t in threads]
"""


@pytest.mark.parametrize("route", ["socket", "exec"])
async def test_many_connections_and_large_bodies_share_a_relay_unharmed(engine, route):
    kind, host = engine
    body = os.urandom(1 << 20) * 16
    wanted = hashlib.sha256(body).hexdigest().encode()
    async with backend(kind, host=host, route=route) as made, made.open(ry.SandboxSpec()) as box:
        listener = await box.listen(0)

        async def serve(stream, data):
            assert await stream.receive() == b"go"
            await stream.send(data)
            await stream.send_eof()

        async def accept(count, data):
            async with anyio.create_task_group() as group:
                for _ in range(count):
                    group.start_soon(serve, await listener.accept(), data)

        for count, data, digest in (
            (1, body, wanted),
            (64, body[:50_000], hashlib.sha256(body[:50_000]).hexdigest().encode()),
        ):
            async with anyio.create_task_group() as group:
                group.start_soon(accept, count, data)
                done = await box.exec(["python3", "-c", FETCH, str(listener.port), str(count)], timeout=120)
            assert done.stdout.split() == [digest] * count, done.stderr[-500:]


REACH = """
import os, sys, urllib.request
for url in sys.argv[1:]:
    try: print(urllib.request.urlopen(url, timeout=20).read().decode())
    except Exception as error: print(type(error).__name__)
"""


@pytest.mark.adversarial
@pytest.mark.parametrize("route", ["netns", "exec"])
async def test_an_allow_list_is_kept_by_the_proxy_on_each_route(engine, route):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        await writer.drain()
        writer.close()

    kind, host = engine
    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        backend(kind, host=host, route=route) as made,
    ):
        port = server.sockets[0].getsockname()[1]
        spec = ry.SandboxSpec(network="allowlist", allowed_hosts=(f"web.test:{port}@127.0.0.1",))
        async with made.open(spec) as box:
            urls = [f"http://{name}:{port}/" for name in ("web.test", "evil.test")]
            said = await box.exec(["python3", "-c", REACH, *urls], timeout=120)
            assert said.stdout.split() == [b"hi", b"HTTPError"], said.text
            bare = {"http_proxy": "", "HTTP_PROXY": "", "https_proxy": "", "HTTPS_PROXY": ""}
            said = await box.exec(["python3", "-c", REACH, *urls], timeout=120, env=bare)
            assert said.stdout.split() == [b"hi" if route == "netns" else b"URLError", b"URLError"], said.text


async def test_a_build_with_hosts_is_carried_out_behind_the_proxy(opened, tmp_path):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        fetch = f"import urllib.request as r; open('/got', 'wb').write(r.urlopen('http://web.test:{port}/').read())"
        (tmp_path / "Dockerfile").write_text(f'FROM rollyard-host\nENV A=b\nRUN python3 -c "{fetch}"\n')
        site = Site(build=str(tmp_path), build_hosts=(f"web.test:{port}@127.0.0.1",))
        provision = Provision(ImageStore(tmp_path / "images"), opened)
        built = await provision.image(site, opened, Deadline.after(300, "limits.boot"))
        assert built.env["A"] == "b"
        async with opened.open(ry.SandboxSpec(image=built.image)) as box:
            assert await box.read("/got") == b"hi" and b"127.64" not in await box.read("/etc/resolv.conf")
        await opened.remove_image(built.image)
