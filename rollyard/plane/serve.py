"""`serve plane`: a store, engines, the native API, the sweep and the page put together, from options to a clean shutdown.

Instances outlive the server: a stop ends the sweep and the API once what is under way is finished, and the next start goes on
with the same rows. The admin key
is in a file that only its owner reads; `--print-env` says it for scripts that start the server themselves. The page asks for no
key and shows the whole store, so it is there only where the server listens on loopback.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec
import uvicorn
import uvloop

from rollyard.core.errors import ConfigError
from rollyard.core.ids import secret
from rollyard.core.plane import AdmissionTerms
from rollyard.net.binding import LOOPBACK, listen
from rollyard.page.app import page_app
from rollyard.page.hosts import OnlyHosts
from rollyard.page.planes import PlaneTables
from rollyard.plane.api import plane_app
from rollyard.plane.compat import FaceOptions, Footing, open_face_parts, open_faces, sdk_key_of
from rollyard.plane.create_request import CreateDefaults
from rollyard.plane.drain import Duty
from rollyard.plane.engines import Engine, engine
from rollyard.plane.logs import configure
from rollyard.plane.parts import assemble
from rollyard.store.plane import SqlPlane
from rollyard.store.plane.open import open_plane

_STOP_S = 30


class PlaneOptions(msgspec.Struct, frozen=True, kw_only=True):
    store: str
    engines: tuple[str, ...] = ("local",)
    host: str = "127.0.0.1"
    port: int = 8600
    admin_key_file: Path | None = None
    quota: int | None = None
    rate: float | None = None
    burst: int = 20
    boot_s: float = 300.0
    sweep_s: float = 30.0
    public_url: str | None = None
    drain_s: float = 0.0
    log_level: str = "info"
    log_requests: bool = False
    faces: FaceOptions = FaceOptions()


class PlaneReady(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    engines: tuple[str, ...]
    admin_key_file: str
    key: str
    named: Mapping[str, str]  # what clients of other systems need

    @property
    def line(self) -> str:
        return (
            f"rollyard plane ready at {self.url} (engines: {', '.join(self.engines)}; admin key: {self.admin_key_file})"
        )

    @property
    def json(self) -> str:
        shown = {"url": self.url, "engines": self.engines, "admin_key_file": self.admin_key_file}
        return msgspec.json.encode(shown).decode()

    @property
    def env(self) -> str:
        named = {**self.named, "ROLLYARD_URL": self.url, "ROLLYARD_KEY": self.key}
        return "\n".join(f"{name}={value}" for name, value in named.items())


def serve_plane(options: PlaneOptions, *, say: Callable[[PlaneReady], None]) -> None:
    """Blocks until SIGINT or SIGTERM."""
    configure(options.log_level)
    uvloop.run(_serve(options, say))


async def _serve(options: PlaneOptions, say: Callable[[PlaneReady], None]) -> None:
    sock = listen(options.host, options.port)
    async with AsyncExitStack() as stack:
        stack.callback(sock.close)
        port = sock.getsockname()[1]
        given = await stack.enter_async_context(open_face_parts(options.faces))
        kept, store = await stack.enter_async_context(open_plane(options.store))
        engines: dict[str, Engine] = {}
        for text in options.engines:
            made = await stack.enter_async_context(engine(text))
            engines[made.name] = made
        key, where = _admin_key(options.admin_key_file, port)
        terms = AdmissionTerms(quota=options.quota, rate=options.rate, burst=options.burst)
        parts = await assemble(kept, engines, settings=CreateDefaults(terms=terms, boot_s=options.boot_s), runs=store)
        await parts.access.admin(key)
        sdk_key = sdk_key_of(key)
        await parts.access.named(sdk_key, "trainer", "admin")
        page = None
        if store is not None and options.host in LOOPBACK:
            shown = page_app(store, plane=PlaneTables(SqlPlane(store.database), engines, parts.sweeper, options.quota))
            page = OnlyHosts(shown, LOOPBACK)
        app = plane_app(parts, page=page, public_url=options.public_url, log_requests=options.log_requests)
        for work in (parts.sweeper.forever(options.sweep_s), parts.pools.forever(options.sweep_s)):
            stack.push_async_callback(_stopped, asyncio.create_task(work))
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{host}:{port}"
        footing = Footing(
            parts=parts,
            secret=await kept.agree("faces", secret("face")),
            url=options.public_url or url,
            own_url=url,
            sdk_key=sdk_key,
            store=store,
        )
        faces = await stack.enter_async_context(open_faces(app, footing, given))
        say(PlaneReady(url=url, engines=tuple(engines), admin_key_file=str(where), key=key, named=faces.named))
        config = uvicorn.Config(
            faces, log_config=None, lifespan="off", server_header=False, timeout_graceful_shutdown=_STOP_S
        )
        await _Server(config, parts.duty, options.drain_s).serve(sockets=[sock, *faces.sockets])


class _Server(uvicorn.Server):
    """Asked to stop, it says for `drain_s` seconds that it is not ready, then finishes what is under way. Asked twice, at
    once."""

    def __init__(self, config: uvicorn.Config, duty: Duty, drain_s: float) -> None:
        super().__init__(config)
        self._duty, self._drain_s = duty, drain_s
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again = self._duty.over.is_set()
        self._loop.call_soon_threadsafe(self._duty.over.set)
        if self._drain_s > 0 and not again:
            later = partial(super().handle_exit, sig, frame)
            self._loop.call_soon_threadsafe(self._loop.call_later, self._drain_s, later)
        else:
            super().handle_exit(sig, frame)


async def _stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=_STOP_S)


def _admin_key(path: Path | None, port: int) -> tuple[str, Path]:
    """The key in the file, which is made with a new one where it does not exist."""
    if path is None:
        root = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "rollyard"
        path = root / f"plane-{port}.admin-key"
    if path.exists():
        if path.stat().st_mode & 0o027:  # a group may read it: that is how mounted secrets come
            raise ConfigError(f"others can read {path}, or its group can write it", hint=f"chmod 600 {path}")
        return path.read_text().strip(), path
    key = secret("ryk")
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key + "\n")
    return key, path
