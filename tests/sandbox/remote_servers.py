"""The servers of hf, daytona and prime on the loopback, each with its real SDK at hand."""

import importlib
from contextlib import AsyncExitStack, asynccontextmanager

from rollyard.testing.serve import serve_app
from tests.sandbox import sdks


def module(name):
    return importlib.import_module(f"tests.sandbox.{name}_server")


@asynccontextmanager
async def serving(name, backend, *, front=None, **options):
    """Sandboxes of `backend` as this provider's: a server with `options` for a backend that is to use it. `front` is a proxy
    between them, in `server.faults`. No sandbox is left at the end."""
    server = module(name).Server(backend, **options)
    async with AsyncExitStack() as stack:
        stack.enter_context(sdks.sdk(name))
        stack.push_async_callback(backend.reap, labels={}, older_than=0.0)
        server.url = await stack.enter_async_context(serve_app(server.app))
        if front is not None:
            server.faults, server.url = await stack.enter_async_context(front(server.url))
        stack.enter_context(module(name).around(server.url))
        yield server
        for one in server.live:
            one.watch.cancel()


@asynccontextmanager
async def answering(name, app, key):
    """The options of a backend whose whole service is `app`."""
    async with serve_app(app) as url:
        with sdks.sdk(name), module(name).around(url):
            yield module(name).options(url, key)
