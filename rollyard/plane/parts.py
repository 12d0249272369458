"""All parts of a control plane over one storage, put together once: what the server and the tests start from."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from rollyard.core.ids import new_id, secret
from rollyard.core.protocols import Backend
from rollyard.net.forward import ForwardLimits
from rollyard.plane.engines.backend import BackendEngine
from rollyard.plane.engines.protocol import Engine
from rollyard.plane.gateway.gateway import Gateway
from rollyard.plane.service.access import Access
from rollyard.plane.service.builds import Builds
from rollyard.plane.service.bundles import Bundles
from rollyard.plane.service.call_rates import CallRates
from rollyard.plane.service.create_request import CreateDefaults
from rollyard.plane.service.drain import DrainState
from rollyard.plane.service.hub import Hub
from rollyard.plane.service.instances import Instances
from rollyard.plane.service.metrics import PlaneCounters
from rollyard.plane.service.pools import Pools
from rollyard.plane.service.projects import Projects
from rollyard.plane.service.signing import Signer
from rollyard.plane.service.sweep import Sweeper
from rollyard.plane.service.trace import Traces
from rollyard.plane.storage.open import open_plane
from rollyard.plane.storage.protocol import PlaneStore
from rollyard.store import Store


class PlaneParts(NamedTuple):
    store: PlaneStore
    hub: Hub
    instances: Instances
    sweeper: Sweeper
    access: Access
    gateway: Gateway
    pools: Pools
    bundles: Bundles
    projects: Projects
    builds: Builds
    traces: Traces
    drain: DrainState
    counters: PlaneCounters
    clock: Callable[[], float]


async def assemble(
    store: PlaneStore,
    engines: Mapping[str, Engine],
    *,
    settings: CreateDefaults | None = None,
    limits: ForwardLimits | None = None,
    clock: Callable[[], float] = time.time,
    runs: Store | None = None,
    signing_secret: str | None = None,
    rates: CallRates | None = None,
    build_hosts: tuple[str, ...] = (),
) -> PlaneParts:
    """Replicas on the same storage agree on the plane's name; they are given the same signing secret. Without one, what is
    signed here is good for as long as these parts are."""
    plane = await store.agree("identity", new_id("plane"))
    signer = Signer(signing_secret or secret("sign"))
    counters, drain, builds = PlaneCounters(), DrainState(), Builds(store, hosts=build_hosts, clock=clock)
    hub, access = Hub(store, clock=clock), Access(store, clock=clock)
    instances = Instances(
        store, hub, engines, plane=plane, settings=settings, clock=clock, drain=drain, builds=builds, rates=rates
    )
    return PlaneParts(
        store=store,
        hub=hub,
        instances=instances,
        sweeper=Sweeper(
            store, engines, plane=plane, settle_timeout=instances.settle_timeout, clock=clock, counters=counters
        ),
        access=access,
        gateway=Gateway(instances, access, signer, limits=limits, clock=clock, counters=counters),
        pools=Pools(store, instances, clock=clock),
        bundles=Bundles(store, signer, clock=clock),
        projects=Projects(store, signer, clock=clock),
        builds=builds,
        traces=Traces(store, runs),
        drain=drain,
        counters=counters,
        clock=clock,
    )


@asynccontextmanager
async def ephemeral_plane(
    backend: Backend,
    *,
    settings: CreateDefaults | None = None,
    sweep_s: float = 0.5,
    signing_secret: str | None = None,
    build_hosts: tuple[str, ...] = (),
) -> AsyncGenerator[PlaneParts]:
    """A plane over an entered backend for as long as this lasts: its store is a file that goes with it, and so does every
    instance. For tests, and for serving an API of another system for a while."""
    with tempfile.TemporaryDirectory(prefix="rollyard-plane-") as folder:
        async with open_plane(str(Path(folder) / "plane.db")) as opened:
            engine = BackendEngine(backend)
            parts = await assemble(
                opened.records,
                {engine.name: engine},
                settings=settings,
                runs=opened.runs,
                signing_secret=signing_secret,
                build_hosts=build_hosts,
            )
            sweeping = asyncio.create_task(parts.sweeper.forever(sweep_s))
            try:
                yield parts
            finally:
                sweeping.cancel()
                await asyncio.wait([sweeping])
                await parts.instances.delete_many([one.id async for one in parts.instances.all()])
