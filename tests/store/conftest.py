"""Every test of this package that takes `store` runs on SQLite, on SQLite with another process's writer, and on a real PostgreSQL
server."""

import asyncio
import socket
from contextlib import asynccontextmanager, nullcontext
from functools import partial

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


@pytest.fixture(params=["sqlite", "sent", "postgres"])
def where(request, tmp_path):
    """A store's place, and whether what is written is sent to a writer."""
    place = request.getfixturevalue("postgres_url") if request.param == "postgres" else tmp_path / "runs.db"
    return place, request.param == "sent"


@pytest.fixture
async def open_store(where):
    """Opens it, with the options of `Store.open`."""
    place, sent = where
    async with sent_to_a_writer(place) if sent else nullcontext() as writer:
        yield partial(Store.open, place, writer=writer)


@pytest.fixture
async def store(open_store):
    async with open_store() as store:
        yield store
