"""The ssh backend over a real OpenSSH server: whose keys it trusts, what becomes of a cut connection and of a dead opener, and
what of it can be seen."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, SandboxUnavailable, Unsupported
from rollyard.sandbox import backend
from tests.sandbox import sshd
from tests.waiting import until

pytestmark = pytest.mark.anyio
OPENER = """
import asyncio, sys, rollyard
async def main():
    host, config, folder = sys.argv[1:]
    async with rollyard.sandbox.backend("ssh", host=host, config=config, folder=folder, lease_s=5.0) as made:
        box = await made.open(rollyard.SandboxSpec())
        await box.start(["sleep", "3600"])
        print(box.id, flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""


@pytest.fixture
def server(tmp_path):
    with sshd.serving(tmp_path / "sshd") as made:
        yield made


@pytest.fixture
def folder():
    with sshd.machine_folder() as made:
        yield made


def make(server, folder, **options):
    return backend("ssh", **{"host": "yard", "config": str(server.config), "folder": folder, **options})


@asynccontextmanager
async def opened(server, folder, **spec):
    async with make(server, folder) as made, made.open(ry.SandboxSpec(**spec)) as box:
        yield made, box


async def test_a_machine_whose_key_is_not_known_or_has_changed_is_refused(server, folder):
    right = server.known.read_text()
    server.known.write_text("")
    with pytest.raises(ConfigError, match="Host key verification failed"):
        await make(server, folder).__aenter__()
    server.config.write_text(server.config.read_text() + " StrictHostKeyChecking no\n")
    with pytest.raises(ConfigError, match="log in once by hand"):
        await make(server, folder).__aenter__()
    other = Path(f"{server.config.parent}/user.pub").read_text()
    server.known.write_text(f"{right.split()[0]} {other}")
    with pytest.raises(ConfigError, match="yard cannot be used over SSH"):
        await make(server, folder).__aenter__()


async def test_a_login_that_is_refused_and_a_port_where_nobody_listens_say_so(server, folder):
    (server.config.parent / "allowed").write_text("")
    with pytest.raises(ConfigError, match="has to work without a question"):
        await make(server, folder).__aenter__()
    server.config.write_text(server.config.read_text().replace(f"Port {server.port}", "Port 1"))
    with pytest.raises(SandboxUnavailable, match="yard is not reached over SSH"):
        await make(server, folder).__aenter__()


async def test_a_program_whose_connection_is_cut_runs_once_and_its_end_is_told(server, folder):
    async with opened(server, folder) as (_, box):
        running = asyncio.ensure_future(
            box.exec("echo x >>/tmp/ran; until [ -e /tmp/go ]; do sleep 0.05; done; echo done", timeout=120)
        )
        await until(lambda: box.exists("/tmp/ran"), within=60)
        assert server.cut() > 0
        await box.write("/tmp/go", b"")
        assert (await running).stdout == b"done\n"
        assert await box.read("/tmp/ran") == b"x\n"


@pytest.mark.slow
async def test_the_gate_is_reached_again_after_the_connection_was_cut(server, folder):
    async with opened(server, folder) as (_, box):
        listener = await box.listen(0)

        async def answer():
            while True:
                stream = await listener.accept()
                await stream.send(b"pong")
                await stream.aclose()

        answering = asyncio.ensure_future(answer())
        ask = f"bash -c 'exec 3<>/dev/tcp/127.0.0.1/{listener.port}; cat <&3'"
        assert (await box.exec(ask, timeout=30)).stdout == b"pong"
        server.cut()
        async with asyncio.timeout(60):
            while (await box.exec(ask, timeout=30)).stdout != b"pong":
                await asyncio.sleep(0.2)
        answering.cancel()


@pytest.mark.slow
async def test_a_killed_opener_leaves_no_sandbox_no_process_and_no_connection(server, folder):
    argv = [sys.executable, "-c", textwrap.dedent(OPENER), "yard", str(server.config), folder]
    opener = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert opener.stdout is not None
    name = opener.stdout.readline().decode().strip()
    place = Path(folder) / "boxes" / name
    first = int((place / "pid").read_text().split()[0])
    opener.send_signal(signal.SIGKILL)
    opener.wait()
    await until(lambda: not place.exists() and not Path(f"/proc/{first}").exists(), within=60)
    await until(lambda: server.cut() == 0)


async def test_nothing_of_a_sandbox_runs_as_root_or_shows_the_users_files(server, folder, tmp_path):
    async with opened(server, folder) as (_, box):
        first = int((Path(folder) / "boxes" / box.id / "pid").read_text().split()[0])
        assert os.stat(f"/proc/{first}").st_uid != 0
        assert (await box.exec("id -u; ls /root /home", timeout=30)).stdout == b"0\n/home:\n\n/root:\n"
        assert not await box.exists(str(server.config))
        refused = await box.exec("echo x >/proc/sys/kernel/hostname || echo no", timeout=30)
        assert refused.stdout == b"no\n" or os.uname().nodename != "x"


async def test_values_of_the_environment_are_in_no_command_line_of_either_machine(server, folder):
    async with opened(server, folder, env={"KEY_A": "secret-of-the-spec"}) as (_, box):
        job = await box.start("echo $KEY_A $KEY_B; touch /tmp/up; sleep 60", env={"KEY_B": "secret-of-the-call"})
        await until(lambda: box.exists("/tmp/up"), within=60)
        lines = b"".join(_read_command_line(path) for path in Path("/proc").glob("[0-9]*/cmdline"))
        assert b"sleep\x0060" in lines
        assert b"secret-of-the" not in lines
        assert await job.tail() == b"secret-of-the-spec secret-of-the-call\n"
        await job.kill()


def _read_command_line(path):
    """Nothing of a process that has ended meanwhile."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def test_what_it_cannot_do_is_refused_by_name(server, folder):
    async with make(server, folder) as made:
        with pytest.raises(Unsupported, match="resources.memory_mb"):
            await made.open(ry.SandboxSpec(resources=ry.Resources(memory_mb=64)))
        with pytest.raises(ConfigError, match="no folder /no/such/image here"):
            await made.open(ry.SandboxSpec(image="/no/such/image"))
        with pytest.raises(Unsupported, match="a-b"):
            await made.open(ry.SandboxSpec(env={"a-b": "x"}))


async def test_a_folder_of_somebody_else_is_not_used(server, folder):
    Path(folder).mkdir(mode=0o755)
    os.chown(folder, 1, 1)
    with pytest.raises(ConfigError, match="is not a folder of"):
        await make(server, folder).__aenter__()


def test_without_a_machine_it_says_which_variable_names_one(monkeypatch):
    monkeypatch.delenv("ROLLYARD_SSH_HOST", raising=False)
    with pytest.raises(ConfigError, match="ROLLYARD_SSH_HOST"):
        backend("ssh")
