"""The same sandboxes for a user who is not root: one id without newuidmap, many with it.

As root these tests become another user for a child process; as an ordinary user the whole suite is that test already.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollyard as ry
from tests.sandbox.test_level_attacks import SCRIPT as ATTACKS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; these run as one already")
SINGLE = 65011

SCRIPT = """
import asyncio, json, rollyard as ry
from rollyard.core.errors import Error
async def main():
    async with ry.sandbox.backend("local") as backend, backend.open(ry.SandboxSpec()) as box:
        got = {"level": backend.level, "users": box.capabilities.users}
        done = await box.exec("id -u; echo out > /workspace/f; cat /workspace/f; ls /sys/class/net /proc/1/fd", timeout=20)
        got["text"] = done.stdout.decode()
        got["bomb"] = (await box.exec("sleep 300 & setsid sleep 301", timeout=0.3)).timed_out
        try:
            done = await box.exec("id -u; touch /tmp/mine; stat -c %u /tmp/mine", user="agent", timeout=20)
            got["agent"] = done.stdout.decode()
        except Error as error:
            got["agent"] = type(error).__name__
        listener = await box.listen()
        got["port"] = listener.port > 0
        volume = ry.core.sandbox.Volume(name="v", path="/v")
        async with backend.open(ry.SandboxSpec(names=("db",), volumes=(volume,))) as main:
            async with backend.open(ry.SandboxSpec(beside=main.id, volumes=(volume,))) as service:
                await service.exec("echo shared > /v/f", timeout=20)
                got["volume"] = (await main.read("/v/f")).decode()
                listener = await service.listen()
                connect = f"import socket; socket.create_connection(('db', {listener.port}), 10)"
                got["beside"] = (await main.exec(["python3", "-c", connect], timeout=20)).exit_code
        image = await box.snapshot()
    async with ry.sandbox.backend("local") as backend, backend.open(ry.SandboxSpec(image=image)) as box:
        got["snapshot"] = (await box.read("/workspace/f")).decode()
    got["left"] = len(list((backend.root / "boxes").iterdir()))
    print(json.dumps(got))
asyncio.run(main())
"""


def interpreter() -> str:
    """A Python that other users may run: this one, or the system's of the same version."""
    candidates = [sys.executable, f"/usr/bin/python3.{sys.version_info[1]}"]
    for candidate in candidates:
        code = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]} or sys.prefix == '')"
        command = ["setpriv", f"--reuid={SINGLE}", f"--regid={SINGLE}", "--clear-groups", candidate, "-c", code]
        reachable = all(os.stat(parent).st_mode & 0o001 for parent in Path(candidate).resolve().parents)
        if shutil.which("setpriv") and reachable and subprocess.run(command, check=False).returncode == 0:
            return candidate
    pytest.skip("no Python of this version that another user may run")


@pytest.fixture
def home() -> Iterator[Path]:
    """Not below pytest's own directory, which no other user may enter."""
    with tempfile.TemporaryDirectory(prefix="ry-user-") as path:
        yield Path(path)


def run_as(uid: int, home: Path, gid: int | None = None, script: str = SCRIPT) -> dict:
    os.chown(home, uid, gid or uid)
    packages = [str(Path(ry.__file__).parents[1]), *(path for path in sys.path if path.endswith("site-packages"))]
    env = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": ":".join(packages)}
    command = ["setpriv", f"--reuid={uid}", f"--regid={gid or uid}", "--clear-groups", interpreter(), "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd="/", check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_user_with_one_id_gets_everything_but_other_users(home):
    got = run_as(SINGLE, home)
    assert (got["level"], got["users"], got["agent"]) == ("no_cgroups", False, "Unsupported")
    assert got["text"] == "0\nout\n" and got["bomb"] and got["port"]
    assert (got["snapshot"], got["left"]) == ("out\n", 0)
    assert (got["volume"], got["beside"]) == ("shared\n", 0)


ATTACK = f"""
import asyncio, json, os, socket, subprocess
import rollyard as ry
home = os.environ["HOME"]
async def main():
    open(home + "/secret", "w").write("of the user")
    victim = subprocess.Popen(["sleep", "300"])
    server, named = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", 0))
    datagrams.setblocking(False)
    named.bind(home + "/socket")
    named.listen()
    try:
        async with ry.sandbox.backend("local") as backend, backend.open(ry.SandboxSpec()) as box:
            ports = [str(one.getsockname()[1]) for one in (server, datagrams)]
            words = [home, str(victim.pid), ports[0], home + "/socket", ports[1]]
            done = await box.exec(["python3", "-c", {ATTACKS!r}, *words], timeout=60)
    finally:
        victim.kill()
    found = json.loads(done.stdout)
    try:
        found["send a datagram"] = "open" if datagrams.recv(8) else "held"
    except BlockingIOError:
        found["send a datagram"] = "held"
    print(json.dumps(found))
asyncio.run(main())
"""


@pytest.mark.adversarial
def test_an_agent_of_an_ordinary_user_reaches_nothing_of_that_user(home):
    """Files, processes and sockets of the very user whose id the agent's programs have."""
    found = run_as(SINGLE, home, script=ATTACK)
    assert len(found) == 10 and set(found.values()) == {"held"}, found


@pytest.fixture
def user_with_range() -> Iterator[int]:
    if not (shutil.which("newuidmap") and shutil.which("useradd")):
        pytest.skip("newuidmap and useradd are not installed (apt: uidmap passwd)")
    name = f"ry{os.getpid()}"
    subprocess.run(["useradd", "--no-create-home", "--user-group", name], check=True, capture_output=True)
    try:
        uid = int(subprocess.run(["id", "-u", name], capture_output=True, check=True).stdout)
        if name not in Path("/etc/subuid").read_text():
            pytest.skip("useradd gives no range of subordinate ids here")
        yield uid
    finally:
        subprocess.run(["userdel", name], check=True, capture_output=True)


def test_a_user_with_a_range_of_ids_gets_users_too_and_leaves_nothing_under_them(home, user_with_range):
    got = run_as(user_with_range, home, pwd.getpwuid(user_with_range).pw_gid)
    assert (got["level"], got["users"], got["agent"]) == ("no_cgroups", True, "1000\n1000\n")
    assert got["text"] == "0\nout\n" and got["bomb"]
    assert (got["snapshot"], got["left"]) == ("out\n", 0)
    assert (got["volume"], got["beside"]) == ("shared\n", 0)


def test_a_range_that_newuidmap_refuses_falls_back_to_one_id(home, user_with_range):
    got = run_as(user_with_range, home, 65012)
    assert (got["level"], got["users"], got["left"]) == ("no_cgroups", False, 0)
