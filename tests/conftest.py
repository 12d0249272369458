"""Async tests run on asyncio, the loop the product runs on. Images, layers and sandboxes of tests lie apart from the user's
own, in a directory that lasts from run to run, so that a layer is built once and not once a run."""

import hashlib
import os
import signal
from fnmatch import fnmatchcase

import pytest

from rollyard.core.cache import cache_home
from rollyard.core.errors import ConfigError


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


@pytest.fixture(scope="session")
def postgres_server():
    """A server of its own in a temporary directory, on a free port of the loopback."""
    from tests.servers.postgres import PostgresServer

    try:
        server = PostgresServer(durable=False)
    except ConfigError as error:
        pytest.skip(str(error))
    yield server.url.rpartition("/")[0]
    server.close()


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
    from tests.servers.engines import lacking, running

    if why := lacking(request.param):
        pytest.skip(why)
    with running(request.param) as host:
        yield request.param, host


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Of a test marked `ordinary`, the cells that no pattern names are of the slow suite."""
    left: dict[tuple[str, ...], set[str]] = {}
    for item in items:
        if (mark := item.get_closest_marker("ordinary")) is not None:
            found = {pattern for pattern in mark.args if fnmatchcase(item.callspec.id, pattern)}
            left.setdefault((item.nodeid.partition("[")[0], *mark.args), set(mark.args)).difference_update(found)
            if not found:
                item.add_marker(pytest.mark.slow)
    unused = {test[0]: names for test, names in left.items() if names}
    if unused and not any("::" in word for word in config.args):
        raise pytest.UsageError(f"marked as ordinary, and there is no such cell: {unused}")
