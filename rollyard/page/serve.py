"""Serving the page on its own: one Starlette application on loopback, with the token of this start when changes are allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import msgspec
from starlette.types import ASGIApp

from rollyard.core.ids import secret
from rollyard.core.log import Log
from rollyard.core.plane_tables import PlaneTableRecords
from rollyard.net.app_server import serve_app
from rollyard.net.binding import LOOPBACK, http_url, listen
from rollyard.net.web_pages import AllowedHosts, NoWebPages
from rollyard.page.actions import LocalActions
from rollyard.page.app import page_app
from rollyard.page.planes import PlaneTables
from rollyard.store import Store
from rollyard.store.database import Database

_log = Log("rollyard.page")


class PageOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`plane_records` reads a control plane's tables out of the store's database, where one was ever there."""

    store: str
    plane_records: Callable[[Database], PlaneTableRecords]
    host: str
    port: int
    write: bool
    tasks: str | None
    as_json: bool


def serve_page(options: PageOptions, *, say: Callable[[str], None]) -> None:
    asyncio.run(_serve(options, say))


async def _serve(options: PageOptions, say: Callable[[str], None]) -> None:
    store, host, write = options.store, options.host, options.write
    if host not in LOOPBACK:
        _log.warning("the page listens beyond loopback; it shows everything the store holds", host=host)
    async with AsyncExitStack() as stack:
        kept = await stack.enter_async_context(Store.open(store, create=write))
        token = secret("page") if write else None
        actions = await stack.enter_async_context(LocalActions(kept, options.tasks, where=store)) if write else None
        sock = listen(host, options.port)
        stack.callback(sock.close)
        url = http_url(host, sock.getsockname()[1]) + "/"
        records = options.plane_records(kept.database)
        plane = PlaneTables(records) if await records.in_use() else None
        app: ASGIApp = page_app(kept, plane=plane, actions=actions, token=token)
        app = NoWebPages(app, AllowedHosts(host), forms=True)
        if options.as_json:
            say(msgspec.json.encode({"url": url, "token": token}).decode())
        else:
            say(f"the page is at {url}" + (f"  token for changes: {token}" if token else "  (read-only)"))
        await serve_app(app, sock)
