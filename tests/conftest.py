"""Async tests run on asyncio, the loop the product runs on. Images, layers and sandboxes of tests lie apart from the user's
own, in a directory that lasts from run to run, so that a layer is built once and not once a run."""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from rollyard.core.cache import cache_home


def pytest_configure(config):
    if "ROLLYARD_HOME" not in os.environ:
        checkout = hashlib.sha256(str(config.rootpath).encode()).hexdigest()[:8]
        os.environ["ROLLYARD_HOME"] = str(cache_home() / f"tests-{checkout}")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts what runs in its background with Ctrl-C ignored, and programs inherit that; tests send it to theirs.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def anyio_backend():
    return "asyncio"


def _binaries():
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    return found[-1] if found else None


def _as_postgres():
    """The server refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    return {"user": "postgres", "group": "postgres", "extra_groups": []}


@pytest.fixture(scope="session")
def postgres_server():
    """A server of its own in a temporary directory, on a free port of the loopback."""
    binaries = _binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server is installed (Debian package postgresql)")
    home = Path(tempfile.mkdtemp(prefix="ry-pg-"))
    who = _as_postgres()
    if who:
        shutil.chown(home, who["user"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": home, **who}
    subprocess.run([binaries / "initdb", "-D", home / "data", "-A", "trust", "-U", "ry", "-N", "-E", "UTF8"], **run)
    options = f"-k {home} -p {port} -c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=50"
    subprocess.run(
        [binaries / "pg_ctl", "-D", home / "data", "-w", "-t", "60", "-l", home / "log", "-o", options, "start"], **run
    )
    try:
        yield f"postgresql://ry@127.0.0.1:{port}"
    finally:
        subprocess.run([binaries / "pg_ctl", "-D", home / "data", "-m", "immediate", "stop"], **run)
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
async def postgres_url(postgres_server, request):
    """An empty database on the server."""
    import asyncpg

    name = f"t{abs(hash(request.node.nodeid))}"
    admin = await asyncpg.connect(f"{postgres_server}/postgres")
    await admin.execute(f"CREATE DATABASE {name}")
    yield f"{postgres_server}/{name}"
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request, tmp_path):
    return str(tmp_path / "runs.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture(scope="session", params=["docker", "podman"])
def engine(request):
    """(kind, address) of a container engine started for these tests and gone after them."""
    from rollyard.testing.engines import lacking, running

    if why := lacking(request.param):
        pytest.skip(why)
    with running(request.param) as host:
        yield request.param, host
