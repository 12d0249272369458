"""What an owner runs when it runs an environment: the hub's record, with its image built where that comes from pushed files."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from rollyard.core.errors import PlaneInvalid, PlaneNotFound, UnknownName
from rollyard.core.plane import KEYLESS_OWNER, POOL_OWNER, EnvSpec
from rollyard.plane.engines.choose import choose
from rollyard.plane.engines.protocol import Engine
from rollyard.plane.service.access import check_image
from rollyard.plane.service.builds import Builds
from rollyard.plane.service.create_request import CreateInstance
from rollyard.plane.service.hub import Hub
from rollyard.plane.storage.protocol import PlaneStore


class EnvSpecs:
    def __init__(self, store: PlaneStore, hub: Hub, engines: Mapping[str, Engine], builds: Builds) -> None:
        self._store, self._hub, self._engines, self._builds = store, hub, engines, builds

    async def find(self, wanted: CreateInstance, owner: str) -> EnvSpec:
        """What `owner` runs when it runs this environment. The values of its variables are its owner's secrets: a
        program in an instance can read them there, so another owner gives values of its own."""
        name, separator, version = (wanted.env or "").partition("@")
        if not separator or not name or not version:
            raise PlaneInvalid(f"env {wanted.env!r} is not name@version")
        record = await self._hub.get(name, version)
        if owner == KEYLESS_OWNER and record.owner != owner:
            raise PlaneNotFound(f"there is no environment {record.id}")
        await self.check_image(record.spec.image, record.owner)
        spec = record.spec
        if spec.build is not None and wanted.image is None:
            spec = await self._builds.make_ready(record, spec, self._engine(wanted.engine or spec.engine))
        if owner == record.owner or owner.startswith(POOL_OWNER):
            return spec
        missing = sorted(record.spec.env.keys() - wanted.environment.keys())
        if missing:
            raise PlaneInvalid(
                f"{record.id} is of another owner, who keeps the values of its variables: {', '.join(missing[:20])}",
                hint="give your own values in `environment`",
            )
        return replace(spec, env={name: value for name, value in spec.env.items() if name not in record.spec.env})

    async def check_image(self, image: str, owner: str) -> None:
        await check_image(self._store, image, owner)

    def _engine(self, name: str | None) -> Engine:
        try:
            return choose(self._engines, name)
        except UnknownName as error:
            raise PlaneInvalid(error.message) from error
