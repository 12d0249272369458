"""`serve model`: a model, a sampler and their server put together, until SIGINT or SIGTERM."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec
import uvloop

from rollyard.core.errors import ConfigError, MissingExtra
from rollyard.net.binding import LOOPBACK, http_url, listen
from rollyard.net.key_files import read_or_make_key
from rollyard.net.ready import ServerReady
from rollyard.net.web_pages import AllowedHosts, NoWebPages


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    model: str = "tiny"
    renderer: str = "bytes"
    tools: str = "template"
    host: str = "127.0.0.1"
    port: int = 0
    version: int = 0
    max_batch: int = 64
    gather_ms: float = 5.0
    threads: int | None = None
    key_file: Path | None = None
    allow_hosts: tuple[str, ...] = ()


def serve_model(options: ModelOptions, *, say: Callable[[ServerReady], None]) -> None:
    """Blocks until it is stopped."""
    if find_spec("torch") is None:
        raise MissingExtra("torch", "model", why="rollyard serve model")
    uvloop.run(run_model(options, say))


async def run_model(options: ModelOptions, say: Callable[[ServerReady], None]) -> None:
    import torch

    from rollyard.net.app_server import serve_app
    from rollyard.policy.renderers.load import renderer
    from rollyard.train.sampler import Sampler
    from rollyard.train.server import ModelServer
    from rollyard.train.tiny import load_model

    key = key_of(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    sock = listen(options.host, options.port)  # before the model is loaded: a taken port is an error at once
    rendering = renderer(options.renderer, tools=options.tools)
    sampler = Sampler(
        load_model(options.model),
        version=options.version,
        max_batch=options.max_batch,
        gather_s=options.gather_ms / 1000,
    )
    async with sampler:
        name = Path(options.model).name
        server = ModelServer(sampler, rendering, name=name, key=key)
        url, version = http_url(*sock.getsockname()[:2]), options.version
        facts = {"model": name, "weight_version": version}
        say(ServerReady(server="model server", url=url, details=f"{name}, version {version}", facts=facts))
        app = server.app if key else NoWebPages(server.app, AllowedHosts(options.host, *options.allow_hosts))
        await serve_app(app, sock)


def key_of(options: ModelOptions) -> str | None:
    if options.key_file is not None:
        return read_or_make_key(options.key_file)
    if options.host not in LOOPBACK:
        raise ConfigError(f"{options.host} is not loopback: others could load weights", hint="pass --key-file")
    return None
