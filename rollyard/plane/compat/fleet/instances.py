"""The instances behind the server: instances of the plane, each of which runs a world's tool server.

What a client asked for is in the instance's labels, so any replica knows it, and a restart loses nothing. A create is bound to
its request id in the plane's store: a client that lost the answer gets that instance instead of getting a second one, whichever
replica it asks. One that promised heartbeats and stops sending them is idle, and the plane's sweep ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from rollyard.core.errors import Error, PlaneError, PlaneNotFound, PlaneQuota
from rollyard.core.log import Log
from rollyard.core.plane import Instance
from rollyard.core.protocols import Backend, Sandbox
from rollyard.core.sandbox import SandboxSpec
from rollyard.envs.fleet.databases import SandboxDatabases
from rollyard.plane.compat.fleet.boot import boot
from rollyard.plane.compat.fleet.errors import FleetRefusal
from rollyard.plane.compat.fleet.world import World, WorldCatalog
from rollyard.plane.engines.backend import BackendEngine
from rollyard.plane.service.call_rates import CallRates
from rollyard.plane.service.create_request import CreateInstance
from rollyard.plane.service.instances import Instances

_log = Log("rollyard.fleet")
MARK = "rollyard.fleet"  # the label of a world's instance; its value is the world's version
MADE = "rollyard.fleet.make"
REGIONS = ("us-west-1", "us-east-1", "eu-west-2", "local")
UNLIMITED = 1_000_000  # the limit that a client sees where there is none
_BOOT_S = 300.0  # the most that making one may take
Status = Literal["pending", "running", "error", "stopped"]


class FleetCreate(msgspec.Struct, frozen=True, kw_only=True):
    """A create request's body; what this server has no use for is accepted and left alone."""

    env_key: str
    env_version: str | None = None
    data_key: str | None = None
    data_version: str | None = None
    region: str | None = None
    env_variables: dict[str, Any] | None = None
    image_type: str | None = None
    ttl_seconds: int | None = None
    run_id: str | None = None
    heartbeat_interval: int | None = None
    max_wait_seconds: int | None = None


class WorldInstance:
    """An instance as the plane has it, and what a client asked for when it made it."""

    def __init__(self, row: Instance, world: World, sandbox: Sandbox | None, rates: CallRates) -> None:
        self.row, self.world, self._sandbox, self._rates = row, world, sandbox, rates
        self.make = msgspec.json.decode(row.labels[MADE], type=FleetCreate)

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def owner(self) -> str:
        return self.row.owner

    @property
    def status(self) -> Status:
        if self.row.state in ("creating", "running", "paused"):
            return "pending" if self.row.state == "creating" else "running"
        return "error" if self.row.state == "failed" else "stopped"

    def check_running(self) -> Sandbox:
        if self._sandbox is None:
            raise FleetRefusal(409 if self.status == "pending" else 410, f"instance {self.id} is {self.status}")
        return self._sandbox

    @property
    def sandbox(self) -> Sandbox:
        """For use, which counts for its owner's rate."""
        running = self.check_running()
        self._rates.charge(self.row.owner)
        return running

    @cached_property
    def databases(self) -> SandboxDatabases:
        return SandboxDatabases(self.sandbox, self.world.paths())

    @property
    def last_heartbeat(self) -> float | None:
        return None if self.make.heartbeat_interval is None else self.row.last_seen_at

    @property
    def deadline(self) -> float | None:
        """When the next heartbeat is due."""
        every = self.make.heartbeat_interval
        return None if every is None else self.row.last_seen_at + every


class WorldInstances:
    """`checks` is where verifiers get their sandboxes from."""

    def __init__(
        self,
        instances: Instances,
        engine: BackendEngine,
        catalog: WorldCatalog,
        *,
        checks: Backend,
        default_ttl_s: float = 3600.0,
    ) -> None:
        self._instances, self._engine, self.catalog, self.checks = instances, engine, catalog, checks
        self._default_ttl_s = default_ttl_s
        self._booting: set[asyncio.Task[tuple[Instance, bool]]] = set()

    async def make(
        self,
        owner: str,
        request: FleetCreate,
        request_id: str | None,
        labels: Mapping[str, str] | None = None,
        *,
        rollout_id: str | None = None,
    ) -> WorldInstance:
        world = self._choose(request)
        wanted = replace(self._request(world, request, labels or {}), rollout_id=rollout_id)

        async def prepare(row: Instance, sandbox: Sandbox) -> None:
            await boot(sandbox, world, {"ROLLYARD_INSTANCE": row.id})

        booting = asyncio.create_task(
            self._instances.create_once(wanted, owner=owner, caller=f"fleet {owner}", key=request_id, prepare=prepare)
        )
        self._booting.add(booting)
        booting.add_done_callback(self._forget)
        await asyncio.wait([booting], timeout=request.max_wait_seconds or _BOOT_S)
        if not booting.done():
            words = f"{world.key} is still starting"
            raise FleetRefusal(504, {"error_type": "timeout", "message": words, "retryable": True})
        try:
            row, new = booting.result()
        except PlaneQuota as error:
            raise await self._full(owner) from error
        except PlaneError:
            raise
        except (Error, OSError, TimeoutError) as error:
            words = f"{world.key} did not start: {error or 'too late'}"
            raise FleetRefusal(503, {"error_type": "boot_failed", "message": words, "retryable": True}) from error
        if not new:
            detail = {"error": "duplicate_request_id", "instance_id": row.id, "message": "this create was seen before"}
            raise FleetRefusal(409, detail)
        return await self._show(row, world)

    def _forget(self, booting: asyncio.Task[tuple[Instance, bool]]) -> None:
        self._booting.discard(booting)
        if not booting.cancelled() and (error := booting.exception()) is not None:
            _log.warning("an instance did not start", cause=str(error))

    async def find(self, instance_id: str, owner: str | None = None) -> WorldInstance:
        try:
            row = await self._instances.record(instance_id)
        except PlaneNotFound:
            row = None
        world = None if row is None else self._world(row)
        if row is None or world is None or owner not in (None, row.owner):
            raise FleetRefusal(404, f"there is no instance {instance_id}")
        return await self._show(await self._instances.look(row), world)

    async def list(self, owner: str, *, live: bool | None = True) -> list[WorldInstance]:
        """Without `live`, those that have ended too."""
        rows = [row async for row in self._instances.all(owner=owner, live=live) if MARK in row.labels]
        return [
            WorldInstance(row, world, None, self._instances.rates)
            for row in rows
            if (world := self._world(row)) is not None
        ]

    async def count(self, owner: str) -> tuple[int, int]:
        """How many this owner has, and may have."""
        usage = await self._instances.usage(owner)
        quota = self._instances.settings.terms.quota if usage.quota is None else usage.quota
        return usage.used, UNLIMITED if quota is None else quota

    async def heartbeat(self, place: WorldInstance) -> WorldInstance:
        running = place.check_running()  # one that has ended has no heart
        row = await self._instances.heartbeat(place.id)
        return WorldInstance(row, place.world, running, self._instances.rates)

    async def close_labelled(self, owner: str, labels: Mapping[str, str], reason: str) -> None:
        """Those that are left of work whose worker is gone."""
        for row in [row async for row in self._instances.all(owner=owner, labels=labels)]:
            with suppress(PlaneNotFound):
                await self._instances.delete(row.id, reason=reason)

    async def close(self, place: WorldInstance, reason: str | None = None) -> WorldInstance:
        if place.row.live:
            await self._instances.delete(place.id, reason=reason)
        return WorldInstance(await self._instances.record(place.id), place.world, None, self._instances.rates)

    async def aclose(self) -> None:
        """End what is on its way."""
        for booting in self._booting:
            booting.cancel()
        await asyncio.gather(*self._booting, return_exceptions=True)

    async def _show(self, row: Instance, world: World) -> WorldInstance:
        sandbox = await self._instances.sandbox_of(row) if row.state == "running" else None
        return WorldInstance(row, world, sandbox, self._instances.rates)

    def _world(self, row: Instance) -> World | None:
        """None for an instance that is no world's, or of one that this server does not have."""
        if MADE not in row.labels:
            return None
        made = msgspec.json.decode(row.labels[MADE], type=FleetCreate)
        known = self.catalog.versions.get(made.env_key, {})
        return next((one for one in known.values() if one.version == row.labels[MARK]), None)

    async def _full(self, owner: str) -> FleetRefusal:
        live, most = await self.count(owner)
        words = f"You have {live} running instances out of a maximum of {most}."
        counts = {"running_instances": live, "instance_limit": most}
        return FleetRefusal(403, {"error_type": "instance_limit_exceeded", "message": words, **counts})

    def _choose(self, request: FleetCreate) -> World:
        if request.env_key not in self.catalog.versions:
            raise FleetRefusal(400, f"Environment '{request.env_key}' not found")
        world = self.catalog.get(request.env_key, request.env_version)
        if world is None:
            raise FleetRefusal(400, f"Version '{request.env_version}' not found for '{request.env_key}'")
        if request.region is not None and request.region not in REGIONS:
            raise FleetRefusal(400, f"Region {request.region} not supported. Please use {list(REGIONS)}")
        if request.data_key is not None and world.data:
            wanted = f"{request.data_key}:{request.data_version}" if request.data_version else request.data_key
            if not any(known == wanted or known.partition(":")[0] == wanted for known in world.data):
                raise FleetRefusal(400, f"Data version '{wanted}' not found for '{request.env_key}'")
        if request.ttl_seconds is not None and not 0 < request.ttl_seconds <= 7 * 86400:
            raise FleetRefusal(400, "ttl_seconds is above 0 and at most seven days")
        return world

    def _request(self, world: World, wanted: FleetCreate, labels: Mapping[str, str]) -> CreateInstance:
        spec: SandboxSpec = world.spec
        named = {"ROLLYARD_DATA_KEY": wanted.data_key, "ROLLYARD_DATA_VERSION": wanted.data_version}
        given = {name: value for name, value in {**named, **(wanted.env_variables or {})}.items() if value is not None}
        texts = {
            name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
            for name, value in given.items()
        }
        return CreateInstance(
            image=spec.image,
            engine=self._engine.name,
            run_id=wanted.run_id,
            ttl_s=float(wanted.ttl_seconds or self._default_ttl_s),
            idle_ttl_s=wanted.heartbeat_interval,
            labels={**spec.labels, **labels, MARK: world.version, MADE: msgspec.json.encode(wanted).decode()},
            environment={**spec.env, **texts},
            mount_points=spec.mounts,
            resources=spec.resources,
            network=spec.network,
        )
