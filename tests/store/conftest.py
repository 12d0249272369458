"""Every test of this package that takes `store` runs on SQLite, on SQLite with another process's writer, and on a real PostgreSQL
server."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

from rollyard.store import Store
from rollyard.store.writer_process import serve_writes


@asynccontextmanager
async def sent_to_a_writer(path):
    """Where links to a writer of this file are sent."""
    inbox, outbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with inbox, outbox:
        for end in (inbox, outbox):
            end.setblocking(False)
        stop, ready = asyncio.Event(), asyncio.Event()
        serving = asyncio.create_task(serve_writes(path, inbox, stop, ready.set))
        await ready.wait()
        yield outbox
        stop.set()
        await serving


@pytest.fixture(params=["sqlite", "sqlite, sent", "postgres"])
async def open_store(request, tmp_path):
    """Opens it, with the options of `Store.open`."""
    if request.param == "postgres":
        yield lambda **options: Store.open(request.getfixturevalue("postgres_url"), **options)
    elif request.param == "sqlite":
        yield lambda **options: Store.open(tmp_path / "runs.db", **options)
    else:
        async with sent_to_a_writer(tmp_path / "runs.db") as writer:
            yield lambda **options: Store.open(tmp_path / "runs.db", writer=writer, **options)


@pytest.fixture
async def store(open_store):
    async with open_store() as store:
        yield store
