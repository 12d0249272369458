"""`rollyard serve gate|env|browser|model|rollouts|plane`: servers. Each prints one ready line, and stops on SIGTERM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollyard.cli.shared_options import AllowHosts, Port, StoreOption, fill
from rollyard.cli.verb_app import new_group
from rollyard.core.agent import DEFAULT_AGENT
from rollyard.core.home import STORE

app = new_group()


@app.callback()
def serve() -> None:
    """Run a server until it is stopped."""


@app.command()
def gate(
    upstream: Annotated[str | None, typer.Option(help="base URL of the model server, ending in /v1")] = None,
    model: Annotated[str | None, typer.Option(help="model to request, whatever agents ask for")] = None,
    store: Annotated[Path | None, typer.Option(help="store that calls are committed to")] = None,
    mode: Annotated[str | None, typer.Option(help="transparent_proxy, interception_gate or black_box")] = None,
    policy: Annotated[str | None, typer.Option(help="policy instead of --upstream, such as scripted:FILE")] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Port = 0,
    unix: Annotated[str | None, typer.Option(help="also listen on this unix socket")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate chain")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM private key")] = None,
    key_env: Annotated[str | None, typer.Option(help="environment variable that holds the upstream's key")] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="file with the admin key; created with a new one if missing")
    ] = None,
    trainer_key_file: Annotated[
        Path | None, typer.Option(help="file with the trainer key; created with a new one if missing")
    ] = None,
    processes: Annotated[
        int, typer.Option(help="processes that serve the port together; each uses a core", min=1, max=64)
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="print the ready line as JSON")] = False,
) -> None:
    """Serve the model endpoint that agents talk to."""
    from rollyard.runs.serve_gate import GateOptions, serve_gate

    serve_gate(fill(GateOptions, locals()), say=lambda ready: typer.echo(ready.json if json else ready.line))


@app.command()
def env(
    target: Annotated[str, typer.Argument(help="environment: path.py:Class, module:Class, or coding")] = "coding",
    tasks: Annotated[str | None, typer.Option("--taskset", help="coding: path of its tasks")] = None,
    agent: Annotated[str, typer.Option(help="coding: agent of every step")] = "opencode",
    policy: Annotated[str | None, typer.Option(help="coding: what answers model calls, such as scripted:FILE")] = None,
    base_url: Annotated[str | None, typer.Option(help="coding: URL of a model server")] = None,
    model: Annotated[str | None, typer.Option(help="coding: model id to request from the server")] = None,
    key_env: Annotated[
        str | None, typer.Option(help="coding: environment variable that holds the server's key")
    ] = None,
    sandbox: Annotated[str, typer.Option(help="coding: sandbox backend")] = "local",
    step: Annotated[
        str, typer.Option(help="coding: one step is a whole rollout, or one call (the trainer answers)")
    ] = "rollout",
    renderer: Annotated[
        str | None, typer.Option(help="coding, with --step call: renderer for prompts in token ids")
    ] = None,
    clients_choose: Annotated[
        bool, typer.Option(help="coding: clients may choose model server, mode, sandbox and image")
    ] = False,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Port = 0,
    allow_hosts: AllowHosts = None,
    capacity: Annotated[int, typer.Option(help="most environments at the same time", min=1)] = 64,
    lease_s: Annotated[float, typer.Option(help="seconds a session lives without a connected client")] = 60.0,
    deadline_s: Annotated[float, typer.Option(help="time limit of one reset or step, in seconds")] = 600.0,
    production: Annotated[bool, typer.Option(help="serve tools only: no reset, step or state")] = False,
    keep: Annotated[Path | None, typer.Option(help="folder for sessions that survive a restart of the server")] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="file with the server key; created with a new one if missing")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the ready line as JSON")] = False,
) -> None:
    """Serve an environment over HTTP, WebSocket and MCP; OpenEnv's client drives it too."""
    from rollyard.envs.sessions import EnvLimits
    from rollyard.runs.coding_request import CodingOptions
    from rollyard.runs.serve_env import EnvOptions, serve_env

    given = locals()
    options = fill(EnvOptions, given, limits=fill(EnvLimits, given), coding=fill(CodingOptions, given))
    serve_env(options, say=lambda ready: typer.echo(ready.json if json else ready.line))


@app.command()
def rollouts(
    policy: Annotated[
        str | None,
        typer.Option(
            help="what answers model calls: upstream:URL, tokens:URL, scripted:FILE; queue for this API's trainer"
        ),
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="URL of a model server, ending in /v1")] = None,
    model: Annotated[str | None, typer.Option(help="model id to request from the server")] = None,
    key_env: Annotated[str | None, typer.Option(help="environment variable that holds the model server's key")] = None,
    store: StoreOption = STORE,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Port = 0,
    allow_hosts: AllowHosts = None,
    keys: Annotated[
        Path | None, typer.Option(help="file with lines of `OWNER KEY`; without it only this machine is served")
    ] = None,
    trainer: Annotated[
        str | None, typer.Option(help="the owner who takes held calls; of one owner alone, that one")
    ] = None,
    tasks: Annotated[Path | None, typer.Option(help="folder of tasksets that jobs may name")] = None,
    agent: Annotated[str, typer.Option(help="agent of jobs that name none")] = DEFAULT_AGENT,
    sandbox: Annotated[str, typer.Option(help="sandbox backend")] = "local",
    parallel: Annotated[int, typer.Option(help="most rollouts of one job at the same time", min=1)] = 8,
    jobs: Annotated[int, typer.Option(help="most jobs at the same time; the others wait", min=1)] = 4,
    quota: Annotated[int, typer.Option(help="most jobs of one owner that are not over", min=1)] = 100,
    callback_hosts: Annotated[
        list[str] | None,
        typer.Option("--callback-host", help="host that jobs may ask to be called back at; may be repeated"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the ready line as JSON")] = False,
) -> None:
    """Serve rollouts to trainers in any language: jobs in, training rows out, over HTTP."""
    from rollyard.runs.serve_gate import GateOptions
    from rollyard.train.service.serve import RolloutsOptions, serve_rollouts

    answers = GateOptions(policy=policy, upstream=base_url, model=model, key_env=key_env)
    serve_rollouts(
        fill(RolloutsOptions, locals(), answers=answers),
        say=lambda ready: typer.echo(ready.json if json else ready.line),
    )


@app.command()
def browser(
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Port = 0,
    allow_hosts: AllowHosts = None,
    sandbox: Annotated[str, typer.Option(help="sandbox backend that browsers run in")] = "local",
    image: Annotated[str, typer.Option(help="image that has Chromium")] = "host",
    capacity: Annotated[int, typer.Option(help="most browsers at the same time", min=1)] = 8,
    key_file: Annotated[
        Path | None, typer.Option(help="file with the server key; created with a new one if missing")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the ready line as JSON")] = False,
) -> None:
    """Serve leases of browsers: Chromium in sandboxes, each with a `computer` tool over MCP."""
    from rollyard.envs.browser.leases import BrowserLimits
    from rollyard.runs.serve_browser import BrowserOptions, serve_browser

    limits = BrowserLimits(capacity=capacity)
    serve_browser(
        fill(BrowserOptions, locals(), limits=limits), say=lambda ready: typer.echo(ready.json if json else ready.line)
    )


@app.command()
def model(
    model: Annotated[str, typer.Argument(help="folder with config.json and weights.pt, or tiny")] = "tiny",
    renderer: Annotated[str, typer.Option(help="bytes, tokenizer folder or GGUF file")] = "bytes",
    tools: Annotated[
        str, typer.Option(help="template, or omit to leave tool descriptions out of prompts")
    ] = "template",
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Port = 0,
    allow_hosts: AllowHosts = None,
    version: Annotated[int, typer.Option(help="version of the initial weights")] = 0,
    max_batch: Annotated[int, typer.Option(help="most requests in one batch")] = 64,
    gather_ms: Annotated[float, typer.Option(help="milliseconds a batch waits for more requests")] = 5.0,
    threads: Annotated[int | None, typer.Option(help="number of torch threads")] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="file with the key that requests must carry; created with a new one if missing")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the ready line as JSON")] = False,
) -> None:
    """Serve a small torch model: token ids in and out, logprobs, new weights while it runs."""
    from rollyard.train.serve_model import ModelOptions, serve_model

    serve_model(fill(ModelOptions, locals()), say=lambda ready: typer.echo(ready.json if json else ready.line))


@app.command()
def plane(
    store: Annotated[
        str,
        typer.Option(envvar="ROLLYARD_STORE", help="store: a path, sqlite:///path, postgresql://... or redis://..."),
    ] = STORE,
    engine: Annotated[
        str, typer.Option(help="engines, separated by commas, the default first: local,docker,arca=URL")
    ] = "local",
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Port = 8600,
    quota: Annotated[
        int | None, typer.Option(help="most instances per owner, unless the owner has a quota of its own")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="most creations per second and owner, unless the owner has a rate of its own")
    ] = None,
    burst: Annotated[int, typer.Option(help="most creations at once under a rate", min=1)] = 20,
    call_rate: Annotated[
        float | None,
        typer.Option(
            help="most requests per second and owner that use instances (programs, files, ports), on this server"
        ),
    ] = None,
    call_burst: Annotated[int, typer.Option(help="most such requests at once under a call rate", min=1)] = 50,
    boot_s: Annotated[
        float, typer.Option(help="time limit of an engine to create or delete an instance, in seconds")
    ] = 300.0,
    sweep_s: Annotated[float, typer.Option(help="seconds between sweeps")] = 30.0,
    public_url: Annotated[
        str | None, typer.Option(help="URL at which callers reach this server, for signed URLs")
    ] = None,
    drain_s: Annotated[float, typer.Option(help="seconds to report not ready before stopping")] = 0.0,
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error; logs are JSON lines on stderr")
    ] = "info",
    log_requests: Annotated[bool, typer.Option("--log-requests", help="log a line for each request")] = False,
    build_network: Annotated[
        str, typer.Option(help="what the Dockerfiles of pushed folders may reach: none, allow:HOST,... or public")
    ] = "none",
    worlds: Annotated[Path | None, typer.Option(help="Fleet: folder of folders with a world.toml")] = None,
    fleet_tasks: Annotated[list[Path] | None, typer.Option(help="Fleet: file of tasks; may be repeated")] = None,
    job_policy: Annotated[
        str | None, typer.Option(help="Fleet: what answers the model calls of jobs, such as scripted:FILE")
    ] = None,
    aenv: Annotated[str, typer.Option(help="address for AEnvironment's ports 8080 and 8081; auto or off")] = "auto",
    aenv_keys: Annotated[bool, typer.Option("--aenv-keys", help="require a key from AEnvironment's clients")] = False,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="file with the admin key; created with a new one if missing")
    ] = None,
    signing_file: Annotated[
        Path | None, typer.Option(help="file with the secret that signs URLs and tokens; the same for all replicas")
    ] = None,
    print_env: Annotated[
        bool, typer.Option("--print-env", help="print NAME=value lines for clients, and the ready line on stderr")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print the ready line as JSON")] = False,
) -> None:
    """Serve the control plane: environments, instances, engines and the page."""
    from rollyard.net.ready import ServerReady
    from rollyard.plane.compat.apis import CompatOptions
    from rollyard.plane.compat.fleet.open import FleetOptions
    from rollyard.plane.server.serve import PlaneOptions, serve_plane

    def say(ready: ServerReady) -> None:
        typer.echo(ready.json if json else ready.line, err=print_env)  # stdout is for a shell to read then
        if print_env:
            typer.echo(ready.env)

    engines = tuple(name.strip() for name in engine.split(",") if name.strip())
    fleet = FleetOptions(worlds=worlds, tasks=tuple(fleet_tasks or ()), job_policy=job_policy)
    compat = CompatOptions(aenv=aenv, aenv_keys=aenv_keys, fleet=fleet)
    serve_plane(fill(PlaneOptions, locals(), engines=engines, compat=compat), say=say)
