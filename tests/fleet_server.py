"""The Fleet-shaped server with the worlds of `examples/worlds`, on a loopback port and over the local backend."""

from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

from rollyard.plane.compat.fleet import Tasks, fleet_app, load_worlds, one_key
from rollyard.plane.parts import ephemeral_plane
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.testing.serve import serve_app

WORLDS = Path(__file__).parents[1] / "examples" / "worlds"
KEY = "flt-test-key"


class Seen:
    """Every request that came, as `METHOD path`; `refuse` answers the next of them with a status of its own instead."""

    def __init__(self, app):
        self.app, self.requests, self.headers, self.refuse = app, [], [], {}

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            line = f"{scope['method']} {scope['path']}"
            self.requests.append(line)
            self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
            for start, statuses in self.refuse.items():
                if line.startswith(start) and statuses:
                    from starlette.responses import JSONResponse

                    status, detail = statuses.pop(0)
                    await JSONResponse({"detail": detail}, status)(scope, receive, send)
                    return
        await self.app(scope, receive, send)

    def count(self, start):
        return sum(line.startswith(start) for line in self.requests)


@asynccontextmanager
async def serving(*, worlds=None, key=KEY, **options):
    """`url`, `seen`, `places`, `backend`, `guard`, `plane`. Nothing of it is left at the end."""
    async with LocalBackend() as backend, ephemeral_plane(backend) as plane:
        engine = plane.instances.engines[backend.name]
        tasks = Tasks.from_files(*sorted(WORLDS.glob("*/tasks.json")))
        given = {"admit": one_key(key)} if key else {}
        app = fleet_app(worlds or load_worlds(WORLDS), plane, engine, tasks=tasks, **given, **options)
        seen = Seen(app)
        async with serve_app(seen) as url:

            async def left():
                """Instances whose sandboxes are still there."""
                rows = {row.id: row async for row in plane.instances.all(live=None)}
                made = await engine.list(await plane.store.agree("identity", "nobody"))
                return [one.instance_id for one in made if "rollyard.fleet" in rows[one.instance_id].labels]

            try:
                yield SimpleNamespace(
                    url=url,
                    key=key,
                    seen=seen,
                    places=app.state.places,
                    guard=app.state.guard,
                    backend=backend,
                    plane=plane,
                    engine=engine,
                    left=left,
                )
            finally:
                await app.state.places.aclose()
