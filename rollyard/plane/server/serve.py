"""`serve plane`: a store, engines, the native API, the sweep and the page put together, from options to a clean shutdown.

Instances outlive the server: a stop ends the sweep and the API once what is under way is finished, and the next start goes on
with the same rows. The admin key is in a file that only its owner reads; `--print-env` prints it for scripts that start the
server themselves. The page asks for no key and shows the runs of the store, so it is there only where the server listens on
loopback; instances, which other owners have too, it shows to those who give the admin key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from hmac import compare_digest
from pathlib import Path

import msgspec
import uvloop

from rollyard.core.plane import AdmissionTerms
from rollyard.net.app_server import Drain, serve_app
from rollyard.net.binding import LOOPBACK, http_url, listen
from rollyard.net.key_files import read_or_make_key, state_file
from rollyard.net.ready import ServerReady
from rollyard.net.web_pages import AllowedHosts, NoWebPages
from rollyard.page.app import page_app, plane_page_app
from rollyard.page.planes import PlaneTables
from rollyard.plane.api.app import plane_app
from rollyard.plane.compat.apis import CompatContext, CompatOptions, open_compat_apps, open_compat_parts, sdk_key_of
from rollyard.plane.engines.choose import engine
from rollyard.plane.engines.protocol import Engine
from rollyard.plane.http.request_log import RequestLog
from rollyard.plane.parts import assemble
from rollyard.plane.server.logs import configure
from rollyard.plane.server.operator import PlaneOperator
from rollyard.plane.service.builds import hosts_of_builds
from rollyard.plane.service.call_rates import CallRates
from rollyard.plane.service.clock import StorageClock
from rollyard.plane.service.create_request import CreateDefaults
from rollyard.plane.service.signing import read_secret, secret_for
from rollyard.plane.storage.open import open_plane

_STOP_S = 30


class PlaneOptions(msgspec.Struct, frozen=True, kw_only=True):
    store: str
    engines: tuple[str, ...] = ("local",)
    host: str = "127.0.0.1"
    port: int = 8600
    admin_key_file: Path | None = None
    signing_file: Path | None = None
    quota: int | None = None
    rate: float | None = None
    burst: int = 20
    call_rate: float | None = None
    call_burst: int = 50
    boot_s: float = 300.0
    sweep_s: float = 30.0
    public_url: str | None = None
    drain_s: float = 0.0
    log_level: str = "info"
    log_requests: bool = False
    build_network: str = "none"
    compat: CompatOptions = CompatOptions()


def serve_plane(options: PlaneOptions, *, say: Callable[[ServerReady], None]) -> None:
    """Blocks until SIGINT or SIGTERM."""
    configure(options.log_level)
    uvloop.run(_serve(options, say))


async def _serve(options: PlaneOptions, say: Callable[[ServerReady], None]) -> None:
    sock = listen(options.host, options.port)
    async with AsyncExitStack() as stack:
        stack.callback(sock.close)
        port = sock.getsockname()[1]
        given = await stack.enter_async_context(open_compat_parts(options.compat))
        kept, store = await stack.enter_async_context(open_plane(options.store))
        clock = StorageClock()
        await clock.start(kept)
        engines: dict[str, Engine] = {}
        for text in options.engines:
            made = await stack.enter_async_context(engine(text))
            engines[made.name] = made
        key_file = options.admin_key_file or state_file(f"plane-{port}.admin-key")
        key = read_or_make_key(key_file, "ryk")
        terms = AdmissionTerms(quota=options.quota, rate=options.rate, burst=options.burst)
        signing_secret = read_secret(options.signing_file)
        parts = await assemble(
            kept,
            engines,
            settings=CreateDefaults(terms=terms, boot_s=options.boot_s),
            clock=clock,
            runs=store,
            signing_secret=signing_secret,
            rates=CallRates(options.call_rate, options.call_burst),
            build_hosts=hosts_of_builds(options.build_network),
        )
        await parts.access.admin(key)
        sdk_key = sdk_key_of(key)
        await parts.access.find_or_make(sdk_key, "trainer", "admin")
        page = None
        if options.host in LOOPBACK:
            tables, check = PlaneTables(kept, engines, parts.sweeper, options.quota), partial(same_key, key)
            operator = PlaneOperator(kept, parts.access, key)
            if store is None:
                shown = plane_page_app(tables, check, operator)
            else:
                shown = page_app(store, plane=tables, plane_key=check, operator=operator)
            page = NoWebPages(shown, AllowedHosts(options.host), forms=True)
        log = RequestLog(parts.counters, lines=options.log_requests)
        app = plane_app(parts, page=page, public_url=options.public_url, log=log)
        sweeping, filling = parts.sweeper.forever(options.sweep_s), parts.pools.forever(options.sweep_s)
        for work in (sweeping, filling, clock.follow(kept)):
            stack.push_async_callback(_stop, asyncio.create_task(work))
        url = http_url(options.host, port)
        context = CompatContext(
            parts=parts,
            secret=secret_for("compat", signing_secret),
            url=options.public_url or url,
            own_url=url,
            sdk_key=sdk_key,
            log=log,
            store=store,
        )
        compat = await stack.enter_async_context(open_compat_apps(app, context, given))
        say(
            ServerReady(
                server="plane",
                url=url,
                details=f"engines: {', '.join(engines)}; admin key: {key_file}",
                facts={"engines": tuple(engines), "admin_key_file": str(key_file)},
                variables={**compat.named, "ROLLYARD_URL": url, "ROLLYARD_KEY": key},
            )
        )
        await serve_app(
            compat,
            sock,
            *compat.sockets,
            drain=Drain(parts.drain.stopping, options.drain_s),
            log_config=None,
            log_level=None,
            access_log=True,
            server_header=False,
            timeout_graceful_shutdown=_STOP_S,
        )


def same_key(kept: str, given: str) -> bool:
    return compare_digest(kept.encode(), given.encode())


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=_STOP_S)
