"""The instances behind the server: each a sandbox that runs a world's tool server.

Everything about one is in its sandbox's labels, so a server that was started again finds what an earlier one made. A create is
bound to its request id before it begins: a client that lost the answer is told the instance instead of getting a second one. One
that promised heartbeats and stops sending them is ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import msgspec

from rollyard.core.errors import Error, SandboxGone
from rollyard.core.ids import new_id
from rollyard.core.log import Log
from rollyard.core.protocols import Backend, Sandbox
from rollyard.envs.fleet.databases import SandboxDatabases
from rollyard.plane.compat.fleet.boot import boot
from rollyard.plane.compat.fleet.errors import FleetRefusal
from rollyard.plane.compat.fleet.world import World, WorldCatalog

_log = Log("rollyard.fleet")
MARK = "rollyard.fleet"
RECORD = "rollyard.fleet.record"
SERVER = "rollyard.fleet.server"
REGIONS = ("us-west-1", "us-east-1", "eu-west-2", "local")
_KEPT = 2000  # instances and requests that are remembered after their end
_STEP_S = 60.0
_BOOT_S = 300.0  # the most that making one may take
Status = Literal["pending", "running", "error", "stopped"]


class Make(msgspec.Struct, frozen=True, kw_only=True):
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


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    version: str
    created_at: float
    ttl_s: float
    make: Make


class WorldInstance:
    def __init__(self, record: InstanceRecord, world: World) -> None:
        self.record, self.world = record, world
        self.status: Status = "pending"
        self.reason: str | None = None
        self.updated_at = record.created_at
        self.ended_at: float | None = None
        self.last_heartbeat: float | None = None
        self.watch: asyncio.Task[None] | None = None
        self._sandbox: Sandbox | None = None
        self._databases: SandboxDatabases | None = None

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def sandbox(self) -> Sandbox:
        if self._sandbox is None or self.status != "running":
            raise FleetRefusal(409 if self.status == "pending" else 410, f"instance {self.id} is {self.status}")
        return self._sandbox

    @property
    def databases(self) -> SandboxDatabases:
        if self._databases is None:
            self._databases = SandboxDatabases(self.sandbox, self.world.paths())
        return self._databases

    def runs_in(self, sandbox: Sandbox) -> None:
        self._sandbox, self._databases = sandbox, None
        self.now("running")

    def now(self, status: Status, reason: str | None = None) -> None:
        self.status, self.reason, self.updated_at = status, reason, time.time()
        if status in ("error", "stopped"):
            self.ended_at = self.updated_at

    @property
    def deadline(self) -> float | None:
        """When the next heartbeat is due."""
        every = self.record.make.heartbeat_interval
        return None if every is None else (self.last_heartbeat or self.record.created_at) + every


class Places:
    """`name` tells this server's instances from those of another over the same backend."""

    def __init__(
        self, backend: Backend, catalog: WorldCatalog, name: str, *, limit: int = 100, default_ttl_s: float = 3600.0
    ) -> None:
        self.backend, self.catalog, self.name, self.limit = backend, catalog, name, limit
        self._default_ttl_s = default_ttl_s
        self._places: dict[str, WorldInstance] = {}
        self._requests: dict[str, str] = {}
        self._booting: set[asyncio.Task[None]] = set()

    async def make(self, owner: str, asked: Make, request_id: str | None) -> WorldInstance:
        if request_id is not None and (known := self._requests.get(f"{owner}\n{request_id}")):
            detail = {"error": "duplicate_request_id", "instance_id": known, "message": "this create was seen before"}
            raise FleetRefusal(409, detail)
        world = self._choose(asked)
        self._within_limit(owner)
        place = self._note(owner, asked, world)
        if request_id is not None:
            self._requests[f"{owner}\n{request_id}"] = place.id
        booting = asyncio.create_task(self._boot(place))
        self._booting.add(booting)
        booting.add_done_callback(self._booting.discard)
        await asyncio.wait([booting], timeout=asked.max_wait_seconds or _BOOT_S)
        if place.status == "error":
            raise FleetRefusal(503, {"error_type": "boot_failed", "message": place.reason, "retryable": True})
        if place.status == "pending":
            raise FleetRefusal(
                504, {"error_type": "timeout", "message": f"{place.id} is still starting", "retryable": True}
            )
        return place

    async def find(self, instance_id: str, owner: str | None = None) -> WorldInstance:
        place = self._places.get(instance_id) or await self._attach(instance_id)
        if place is None or owner not in (None, place.record.owner):
            raise FleetRefusal(404, f"there is no instance {instance_id}")
        if place.status == "running" and not await place.sandbox.alive():
            self._over(place, "stopped", "its time was over")
        return place

    async def list(self, owner: str) -> list[WorldInstance]:
        await self._remember()
        found = [await self.find(name, owner) for name, one in list(self._places.items()) if one.record.owner == owner]
        return sorted(found, key=lambda place: place.id)

    async def heartbeat(self, place: WorldInstance) -> None:
        place.sandbox  # noqa: B018 - one that has ended has no heart
        place.last_heartbeat = time.time()

    async def close(self, place: WorldInstance, reason: str = "closed by its owner") -> None:
        sandbox = place.sandbox if place.status == "running" else None
        self._over(place, "stopped", reason)
        if sandbox is not None:
            async with asyncio.timeout(_STEP_S):
                await sandbox.kill()

    async def aclose(self) -> None:
        """End what this server made; for those who serve it only for a while."""
        for booting in list(self._booting):
            booting.cancel()
        await asyncio.gather(*self._booting, return_exceptions=True)
        for place in [one for one in self._places.values() if one.status == "running"]:
            await self.close(place, "the server was closed")

    def _choose(self, asked: Make) -> World:
        if asked.env_key not in self.catalog.versions:
            raise FleetRefusal(400, f"Environment '{asked.env_key}' not found")
        world = self.catalog.get(asked.env_key, asked.env_version)
        if world is None:
            raise FleetRefusal(400, f"Version '{asked.env_version}' not found for '{asked.env_key}'")
        if asked.region is not None and asked.region not in REGIONS:
            raise FleetRefusal(400, f"Region {asked.region} not supported. Please use {list(REGIONS)}")
        if asked.data_key is not None and world.data:
            wanted = f"{asked.data_key}:{asked.data_version}" if asked.data_version else asked.data_key
            if not any(known == wanted or known.partition(":")[0] == wanted for known in world.data):
                raise FleetRefusal(400, f"Data version '{wanted}' not found for '{asked.env_key}'")
        if asked.ttl_seconds is not None and not 0 < asked.ttl_seconds <= 7 * 86400:
            raise FleetRefusal(400, "ttl_seconds is above 0 and at most seven days")
        return world

    def _within_limit(self, owner: str) -> None:
        live = sum(
            place.status in ("pending", "running") for place in self._places.values() if place.record.owner == owner
        )
        if live >= self.limit:
            counts = {"running_instances": live, "instance_limit": self.limit}
            words = f"You have {live} running instances out of a maximum of {self.limit}."
            raise FleetRefusal(403, {"error_type": "instance_limit_exceeded", "message": words, **counts})

    def _note(self, owner: str, asked: Make, world: World) -> WorldInstance:
        ended = [name for name, place in self._places.items() if place.ended_at is not None]
        for name in ended[: max(0, len(ended) - _KEPT)]:
            del self._places[name]
        while len(self._requests) > _KEPT:
            del self._requests[next(iter(self._requests))]
        ttl = float(asked.ttl_seconds or self._default_ttl_s)
        record = InstanceRecord(
            id=new_id("inst"), owner=owner, version=world.version, created_at=time.time(), ttl_s=ttl, make=asked
        )
        place = self._places[record.id] = WorldInstance(record, world)
        return place

    async def _boot(self, place: WorldInstance) -> None:
        labels = {MARK: place.id, SERVER: self.name, RECORD: msgspec.json.encode(place.record).decode()}
        try:
            async with asyncio.timeout(_BOOT_S):
                place.runs_in(
                    await boot(self.backend, place.world, _variables(place.record), labels, place.record.ttl_s)
                )
        except (Error, OSError, TimeoutError) as error:
            _log.warning("an instance did not start", instance=place.id, env_key=place.world.key, cause=str(error))
            place.now("error", f"{place.world.key} did not start: {error or 'too late'}")
            return
        if place.record.make.heartbeat_interval is not None:
            place.watch = asyncio.create_task(self._watch(place))

    async def _watch(self, place: WorldInstance) -> None:
        due = place.deadline
        while due is not None and due > time.time():
            await asyncio.sleep(due - time.time())
            due = place.deadline
        place.watch = None
        with suppress(Error, FleetRefusal, TimeoutError):  # it has ended otherwise, or its own time will end it
            await self.close(place, "no heartbeat")

    async def _remember(self) -> None:
        if self.backend.capabilities.list:
            for info in await self.backend.list({SERVER: self.name}):
                if info.labels[MARK] not in self._places:
                    await self._attach(info.labels[MARK])

    async def _attach(self, instance_id: str) -> WorldInstance | None:
        """One that an earlier server made."""
        if not (self.backend.capabilities.list and self.backend.capabilities.attach):
            return None
        for info in await self.backend.list({MARK: instance_id, SERVER: self.name}):
            record = msgspec.json.decode(info.labels[RECORD], type=InstanceRecord)
            known = self.catalog.versions.get(record.make.env_key, {})
            world = next((one for one in known.values() if one.version == record.version), None)
            if world is None:
                return None
            place = self._places[instance_id] = WorldInstance(record, world)
            try:
                place.runs_in(await self.backend.attach(info.id))
            except SandboxGone:
                place.now("stopped", "it was gone")
            return place
        return None

    def _over(self, place: WorldInstance, status: Status, reason: str) -> None:
        place.now(status, reason)
        if place.watch is not None:
            place.watch.cancel()
            place.watch = None


def _variables(record: InstanceRecord) -> Mapping[str, str]:
    make = record.make
    named = {
        "ROLLYARD_DATA_KEY": make.data_key,
        "ROLLYARD_DATA_VERSION": make.data_version,
        "ROLLYARD_INSTANCE": record.id,
    }
    given = {name: value for name, value in {**named, **(make.env_variables or {})}.items() if value is not None}
    return {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode() for name, value in given.items()
    }
