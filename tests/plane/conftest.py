"""A control plane on SQLite and on PostgreSQL, with an engine that makes nothing and a clock that tests move."""

from types import SimpleNamespace

import pytest

from rollyard.plane.access import Access
from rollyard.plane.api import plane_app
from rollyard.plane.engines import NoopEngine
from rollyard.plane.gateway import Gateway
from rollyard.plane.hub import Hub
from rollyard.plane.instances import Instances, Settings
from rollyard.plane.signing import Signer
from rollyard.plane.sweep import Sweeper
from rollyard.store import Store


class Clock:
    def __init__(self):
        self.now = 1_800_000_000.0

    def __call__(self):
        return self.now


async def assembled(store, engines, clock, **settings):
    """All parts of a plane over one store."""
    name = await store.agreed("identity", "test-plane")
    hub = Hub(store, clock=clock)
    instances = Instances(store, hub, engines, plane=name, settings=Settings(**settings), clock=clock)
    sweeper = Sweeper(store, engines, plane=name, clock=clock)
    access = Access(store, clock=clock)
    gateway = Gateway(instances, access, Signer(await store.agreed("signing", "s" * 32)), clock=clock)
    app = plane_app(store, hub, instances, sweeper, access, gateway)
    return SimpleNamespace(
        store=store,
        hub=hub,
        instances=instances,
        sweeper=sweeper,
        access=access,
        gateway=gateway,
        app=app,
        clock=clock,
    )


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
async def plane(store_url, clock, noop):
    async with Store.open(store_url) as store:
        yield await assembled(store.plane, {"noop": noop}, clock)
