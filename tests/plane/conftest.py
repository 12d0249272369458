"""A control plane on SQLite, PostgreSQL and Redis, with an engine that makes nothing and a clock that tests move."""

import hashlib
import shutil
import socket
import subprocess
import time
from types import SimpleNamespace

import pytest

from rollyard.core.plane import ApiKey
from rollyard.plane.api.app import plane_app
from rollyard.plane.engines.noop import NoopEngine
from rollyard.plane.parts import assemble as assemble_parts
from rollyard.plane.service.create_request import CreateDefaults
from rollyard.plane.storage.open import open_plane
from tests.waiting import Clock

ADMIN = ApiKey(id="key_admin", digest=b"", role="admin", owner="admin", created_at=0.0)
OWNER = ApiKey(id="key_owner", digest=b"", role="owner", owner="team", created_at=0.0)


async def assembled(store, engines, clock, **settings):
    """All parts of a plane over one store, and its application."""
    await store.agree("identity", "test-plane")
    parts = await assemble_parts(
        store, engines, settings=CreateDefaults(**settings), clock=clock, signing_secret="sign-" + "s" * 20
    )
    return SimpleNamespace(**parts._asdict(), app=plane_app(parts))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def noop(clock):
    return NoopEngine(clock=clock)


@pytest.fixture
def assemble():
    return assembled


@pytest.fixture
async def plane(plane_url, clock, noop):
    async with open_plane(plane_url) as opened:
        yield await assembled(opened.records, {"noop": noop}, clock)


# Users of the Redis server: one may not use what transactions need, one may not run scripts either, one has what a plane needs.
LEAST_RIGHTS = "+@connection +@read +@write +eval +evalsha +script|load +time -@dangerous"
_USERS = {
    "redis": "",
    "redis-no-multi": "nomulti:x@",
    "redis-least": "least:x@",
    "redis-no-scripts": "noscripts:x@",
}


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    if shutil.which("redis-server") is None:
        pytest.skip("no Redis server is installed (Debian package redis-server)")
    home = tmp_path_factory.mktemp("redis")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    refused = "-watch -multi -exec -discard"
    options = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(home), "--save", "", "--appendonly", "no"]
    options += ["--user", "nomulti", "on", ">x", "~*", "&*", "+@all", *refused.split()]
    # docs/control-plane.md: what a plane needs and no more; its keys begin with twelve characters here
    options += ["--user", "least", "on", ">x", "~{????????????}:*", "resetchannels", "-@all", *LEAST_RIGHTS.split()]
    options += ["--user", "noscripts", "on", ">x", "~*", "&*", "+@all", *refused.split(), "-@scripting"]
    server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def plane_url(request, tmp_path):
    """The kinds of storage that a plane can be on; a module about storage asks for all users of Redis, too."""
    if request.param == "sqlite":
        return str(tmp_path / "plane.db")
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    port = request.getfixturevalue("redis_server")
    prefix = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]
    return f"redis://{_USERS[request.param]}127.0.0.1:{port}/0?prefix={prefix}"
