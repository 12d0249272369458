"""`serve browser`: a sandbox backend, browsers in it and their lease server put together, until SIGINT or SIGTERM."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from rollyard.core.errors import ConfigError
from rollyard.envs.browser.client import KEY_VARIABLE
from rollyard.envs.browser.leases import BrowserLimits
from rollyard.net.key_files import read_or_make_key
from rollyard.net.ready import ServerReady
from rollyard.net.web_pages import AllowedHosts, NoWebPages
from rollyard.runs.serve_env import serve_until_signal
from rollyard.sandbox import backend


class BrowserOptions(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 0
    key_file: Path | None = None
    sandbox: str = "local"
    image: str = "host"
    limits: BrowserLimits = BrowserLimits()
    allow_hosts: tuple[str, ...] = ()


def serve_browser(options: BrowserOptions, *, say: Callable[[ServerReady], None]) -> None:
    """Blocks until it is stopped."""
    uvloop.run(_serve(options, say))


async def _serve(options: BrowserOptions, say: Callable[[ServerReady], None]) -> None:
    from rollyard.envs.browser.leases import Browsers
    from rollyard.envs.browser.server import BrowserServer

    key = _key(options)
    async with backend(options.sandbox) as sandboxes:
        server = BrowserServer(Browsers(sandboxes, image=options.image, limits=options.limits), key=key)
        guarded = NoWebPages(server, AllowedHosts(options.host, *options.allow_hosts))
        async with serve_until_signal(guarded, options.host, options.port) as (url, serve):
            key_file = str(options.key_file) if options.key_file else None
            details = f"key: {key_file or f'${KEY_VARIABLE}'}"
            say(ServerReady(server="browsers", url=url, details=details, facts={"key_file": key_file}))
            await serve()


def _key(options: BrowserOptions) -> str:
    """A browser is worth a machine: there is always a key, from the file or from the environment."""
    if options.key_file is not None:
        return read_or_make_key(options.key_file)
    if not (key := os.environ.get(KEY_VARIABLE, "").strip()):
        raise ConfigError("browsers are not leased without a key", hint=f"pass --key-file, or set {KEY_VARIABLE}")
    return key
