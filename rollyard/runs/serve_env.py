"""`serve env`: an environment's class and its server put together, until SIGINT or SIGTERM."""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from rollyard.core.errors import ConfigError
from rollyard.envs.env import Env
from rollyard.envs.sessions import EnvLimits
from rollyard.net.binding import LOOPBACK, http_url, listen
from rollyard.net.key_files import read_or_make_key
from rollyard.net.ready import ServerReady
from rollyard.net.web_pages import AllowedHosts, NoWebPages
from rollyard.runs.coding_request import CodingOptions
from rollyard.runs.rollout.modes import read_key

if TYPE_CHECKING:
    from rollyard.envs.server import EnvServer


class EnvOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`target` is `path.py:Class`, `module:Class`, or `coding`, which alone uses the fields below `limits`. `keep` is a folder
    in which sessions outlive the server."""

    target: str
    host: str = "127.0.0.1"
    port: int = 0
    key_file: Path | None = None
    allow_hosts: tuple[str, ...] = ()
    production: bool = False
    keep: Path | None = None
    limits: EnvLimits = EnvLimits()
    tasks: str | None = None
    step: str = "rollout"
    coding: CodingOptions = CodingOptions()


def serve_env(options: EnvOptions, *, say: Callable[[ServerReady], None]) -> None:
    """Blocks until it is stopped."""
    uvloop.run(run_env(options, say, server_of(options)))


def server_of(options: EnvOptions) -> EnvServer:
    """The ASGI application that the options describe."""
    from rollyard.envs.server import EnvServer

    splits: Mapping[str, Sequence[Any]] | None = None
    if options.target == "coding":
        from rollyard.runs.coding_env import coding_env, splits_of, tasks_of

        read_key(options.coding.key_env)  # a missing one is reported now
        tasks = tasks_of(options.tasks)
        make, splits = coding_env(options.coding, tasks, step=options.step), splits_of(tasks)
    else:
        make = env_of(options.target)
    return EnvServer(
        make,
        name=options.target.rpartition(":")[2],
        limits=options.limits,
        key=key_of(options),
        production=options.production,
        splits=splits,
        keep=options.keep,
    )


async def run_env(options: EnvOptions, say: Callable[[ServerReady], None], server: EnvServer) -> None:
    key_file = str(options.key_file) if options.key_file is not None else None
    guarded = NoWebPages(server, AllowedHosts(options.host, *options.allow_hosts)) if server.open_to_all else server
    async with serve_until_signal(guarded, options.host, options.port) as (url, serve):
        details = f"{server.name}, key: {key_file}" if key_file else server.name
        facts = {"name": server.name, "key_file": key_file}
        say(ServerReady(server="environment", url=url, details=details, facts=facts))
        await serve()


@asynccontextmanager
async def serve_until_signal(app: Any, host: str, port: int) -> AsyncGenerator[tuple[str, Callable[[], Any]]]:
    """The address, and what serves on it until a signal: connections wait in the socket's queue until then."""
    from rollyard.net.app_server import serve_app
    from rollyard.net.websocket_server import SocketProtocol

    with listen(host, port) as sock:

        async def serve() -> None:
            await serve_app(
                app,
                sock,
                lifespan="on",
                ws=SocketProtocol,
                ws_max_size=100 * 2**20,
                ws_ping_interval=20.0,
                ws_ping_timeout=60.0,
                timeout_graceful_shutdown=5,
            )

        yield http_url(*sock.getsockname()[:2]), serve


def env_of(target: str) -> Callable[[], Env]:
    from rollyard.core.python_files import import_file

    place, colon, name = target.rpartition(":")
    if not colon or not name:
        raise ConfigError(f"{target!r} names no class", hint="path.py:Class or module:Class")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ConfigError(f"there is no file {place}")
        module = import_file(Path(place))
    else:
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise ConfigError(f"cannot import {place}: {error}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type) or not issubclass(found, Env):
        raise ConfigError(f"{name} in {place} is not a subclass of rollyard.Env")
    return found


def key_of(options: EnvOptions) -> str | None:
    """The key in the file; without one only loopback is served."""
    if options.key_file is not None:
        return read_or_make_key(options.key_file)
    if options.host not in LOOPBACK:
        raise ConfigError(
            f"{options.host} is not loopback: any machine that reaches it could step", hint="pass --key-file"
        )
    return None
