"""The Fleet-shaped server on a plane: its instances are the plane's, its keys are the plane's, its owners are the plane's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from starlette.applications import Starlette

from rollyard.core.errors import PlaneUnauthorized
from rollyard.plane.access import Access
from rollyard.plane.engines import BackendEngine
from rollyard.plane.fleet import Refusal, Tasks, World, fleet_app, load_worlds
from rollyard.plane.fleet.places import RECORD, Record
from rollyard.plane.instance_backend import InstanceBackend
from rollyard.plane.instances import Instances

_NOBODY = "fleet"  # who owns the sandboxes that verifiers run in
_LIMIT = 100


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`worlds` is a folder of folders with a `world.toml`; `tasks` are files that `/v1/tasks` begins with."""

    worlds: Path | None = None
    tasks: tuple[Path, ...] = ()


def fleet_face(
    instances: Instances, access: Access, *, secret: str, options: FleetOptions, limit: int | None = None
) -> Starlette | None:
    """None where no engine of the plane runs programs."""
    engine = next((one for one in instances.engines.values() if isinstance(one, BackendEngine)), None)
    if engine is None:
        return None
    worlds: list[World] = [] if options.worlds is None else load_worlds(options.worlds)
    backend = InstanceBackend(instances, engine, owner=_owner)

    async def admit(header: str | None) -> str:
        try:
            caller = await access.caller(header)
        except PlaneUnauthorized as error:
            raise Refusal(401, error.message) from error
        if caller.role == "agent":
            raise Refusal(403, "a key of role agent may not do this")
        return caller.owner

    tasks = Tasks.from_files(*options.tasks)
    return fleet_app(worlds, backend, admit=admit, tasks=tasks, limit=limit or _LIMIT, secret=secret)


def _owner(labels: Mapping[str, str]) -> str:
    return msgspec.json.decode(labels[RECORD], type=Record).owner if RECORD in labels else _NOBODY
