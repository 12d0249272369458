"""`rollyard serve gate|env|browser|model|plane`: long-running servers. Each prints one ready line, and stops on SIGTERM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollyard.cli.options import Port

app = typer.Typer(help="run a server", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def serve() -> None:
    """Run a server until it is stopped."""


@app.command()
def gate(
    upstream: Annotated[str | None, typer.Option(help="the model server's base URL, ending in /v1")] = None,
    model: Annotated[str | None, typer.Option(help="replaces the model that agents ask for")] = None,
    store: Annotated[Path | None, typer.Option(help="the database that calls are committed to")] = None,
    mode: Annotated[str | None, typer.Option(help="transparent_proxy, interception_gate or black_box")] = None,
    policy: Annotated[str | None, typer.Option(help="any other policy, such as scripted:FILE")] = None,
    host: Annotated[str, typer.Option(help="the address to listen on")] = "127.0.0.1",
    port: Port = 0,
    unix: Annotated[str | None, typer.Option(help="also listen on this unix socket")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate chain")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM private key")] = None,
    key_env: Annotated[str | None, typer.Option(help="the variable that holds the upstream's key")] = None,
    admin_key_file: Annotated[Path | None, typer.Option(help="made with a new key where it does not exist")] = None,
    trainer_key_file: Annotated[Path | None, typer.Option(help="made with a new key where it does not exist")] = None,
    json: Annotated[bool, typer.Option("--json", help="the ready line as JSON")] = False,
) -> None:
    """Serve the model endpoint that agents talk to."""
    from rollyard.runs.serve_gate import GateOptions, serve_gate

    serve_gate(
        GateOptions(
            upstream=upstream,
            model=model,
            store=store,
            mode=mode,
            policy=policy,
            host=host,
            port=port,
            unix=unix,
            tls_cert=tls_cert,
            tls_key=tls_key,
            key_env=key_env,
            admin_key_file=admin_key_file,
            trainer_key_file=trainer_key_file,
        ),
        say=lambda ready: typer.echo(ready.json if json else ready.line),
    )


@app.command()
def env(
    target: Annotated[str, typer.Argument(help="path.py:Class, module:Class, or coding")] = "coding",
    taskset: Annotated[str | None, typer.Option(help="coding: where its tasks are")] = None,
    agent: Annotated[str, typer.Option(help="coding: the agent of every step")] = "opencode",
    policy: Annotated[str | None, typer.Option(help="coding: who answers, such as scripted:FILE")] = None,
    base_url: Annotated[str | None, typer.Option(help="coding: the model server that answers")] = None,
    model: Annotated[str | None, typer.Option(help="coding: the model there")] = None,
    key_env: Annotated[str | None, typer.Option(help="coding: the variable that holds its key")] = None,
    sandbox: Annotated[str, typer.Option(help="coding: the backend")] = "local",
    step: Annotated[
        str, typer.Option(help="coding: what one step is: rollout, or call (the trainer answers)")
    ] = "rollout",
    renderer: Annotated[str | None, typer.Option(help="coding, step call: prompts in token ids")] = None,
    clients_choose: Annotated[
        bool, typer.Option(help="coding: clients may name model server, mode, sandbox and image")
    ] = False,
    host: Annotated[str, typer.Option(help="the address to listen on")] = "127.0.0.1",
    port: Port = 0,
    capacity: Annotated[int, typer.Option(help="environments at once", min=1)] = 64,
    lease_s: Annotated[float, typer.Option(help="how long a session lives with nobody connected")] = 60.0,
    deadline_s: Annotated[float, typer.Option(help="the time of one reset or step")] = 600.0,
    production: Annotated[bool, typer.Option(help="tools only: no reset, step or state")] = False,
    keep: Annotated[Path | None, typer.Option(help="a folder in which sessions outlive the server")] = None,
    key_file: Annotated[Path | None, typer.Option(help="made with a new key where it does not exist")] = None,
    json: Annotated[bool, typer.Option("--json", help="the ready line as JSON")] = False,
) -> None:
    """Serve an environment over HTTP, WebSocket and MCP; OpenEnv's client drives it too."""
    from rollyard.envs.sessions import EnvLimits
    from rollyard.runs.coding_request import CodingOptions
    from rollyard.runs.serve_env import EnvOptions, serve_env

    serve_env(
        EnvOptions(
            target=target,
            host=host,
            port=port,
            key_file=key_file,
            production=production,
            keep=keep,
            limits=EnvLimits(capacity=capacity, lease_s=lease_s, deadline_s=deadline_s),
            tasks=taskset,
            step=step,
            coding=CodingOptions(
                key_env=key_env,
                agent=agent,
                policy=policy,
                base_url=base_url,
                model=model,
                sandbox=sandbox,
                renderer=renderer,
                clients_choose=clients_choose,
            ),
        ),
        say=lambda ready: typer.echo(ready.json if json else ready.line),
    )


@app.command()
def browser(
    host: Annotated[str, typer.Option(help="the address to listen on")] = "127.0.0.1",
    port: Port = 0,
    sandbox: Annotated[str, typer.Option(help="the backend that browsers run in")] = "local",
    image: Annotated[str, typer.Option(help="an image with Chromium in it")] = "host",
    capacity: Annotated[int, typer.Option(help="browsers at once", min=1)] = 8,
    key_file: Annotated[Path | None, typer.Option(help="made with a new key where it does not exist")] = None,
    json: Annotated[bool, typer.Option("--json", help="the ready line as JSON")] = False,
) -> None:
    """Lease browsers: Chromium in sandboxes, each with a `computer` tool over MCP."""
    from rollyard.envs.browser.leases import BrowserLimits
    from rollyard.runs.serve_browser import BrowserOptions, serve_browser

    serve_browser(
        BrowserOptions(
            host=host,
            port=port,
            key_file=key_file,
            sandbox=sandbox,
            image=image,
            limits=BrowserLimits(capacity=capacity),
        ),
        say=lambda ready: typer.echo(ready.json if json else ready.line),
    )


@app.command()
def model(
    model: Annotated[str, typer.Argument(help="a folder with config.json and weights.pt, or tiny")] = "tiny",
    renderer: Annotated[str, typer.Option(help="bytes, a tokenizer folder or a GGUF file")] = "bytes",
    tools: Annotated[
        str, typer.Option(help="template, or omit to leave tool descriptions out of prompts")
    ] = "template",
    host: Annotated[str, typer.Option(help="the address to listen on")] = "127.0.0.1",
    port: Port = 0,
    version: Annotated[int, typer.Option(help="the version of the weights it starts with")] = 0,
    max_batch: Annotated[int, typer.Option(help="requests sampled at once")] = 64,
    gather_ms: Annotated[float, typer.Option(help="how long a batch waits for more requests")] = 5.0,
    threads: Annotated[int | None, typer.Option(help="torch threads")] = None,
    key_file: Annotated[Path | None, typer.Option(help="holds the key that requests must bear")] = None,
    json: Annotated[bool, typer.Option("--json", help="the ready line as JSON")] = False,
) -> None:
    """Serve a small torch model: token in, token out, logprobs, new weights while it runs."""
    from rollyard.train.serve_model import ModelOptions, serve_model

    serve_model(
        ModelOptions(
            model=model,
            renderer=renderer,
            tools=tools,
            host=host,
            port=port,
            version=version,
            max_batch=max_batch,
            gather_ms=gather_ms,
            threads=threads,
            key_file=key_file,
        ),
        say=lambda ready: typer.echo(ready.json if json else ready.line),
    )


@app.command()
def plane(
    store: Annotated[
        str, typer.Option(envvar="ROLLYARD_STORE", help="a path, sqlite:///path, postgresql://... or redis://...")
    ] = "rollyard.db",
    engine: Annotated[str, typer.Option(help="engines, the first is the default: local,docker,arca=URL")] = "local",
    host: Annotated[str, typer.Option(help="the address to listen on")] = "127.0.0.1",
    port: Port = 8600,
    quota: Annotated[
        int | None, typer.Option(help="instances per owner, where an owner has no quota of its own")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="creations a second per owner, likewise")] = None,
    burst: Annotated[int, typer.Option(help="creations at once that a rate allows", min=1)] = 20,
    boot_s: Annotated[float, typer.Option(help="the most that an engine may take to make or end one")] = 300.0,
    sweep_s: Annotated[float, typer.Option(help="seconds between sweeps")] = 30.0,
    public_url: Annotated[str | None, typer.Option(help="where callers reach it, for signed URLs")] = None,
    drain_s: Annotated[float, typer.Option(help="seconds of not being ready before a stop")] = 0.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error; JSON lines on stderr")] = "info",
    log_requests: Annotated[bool, typer.Option("--log-requests", help="one line for each request")] = False,
    worlds: Annotated[Path | None, typer.Option(help="Fleet: a folder of folders with a world.toml")] = None,
    fleet_tasks: Annotated[list[Path] | None, typer.Option(help="Fleet: a file of tasks; may be repeated")] = None,
    job_policy: Annotated[
        str | None, typer.Option(help="Fleet: who answers the model calls of jobs, such as scripted:FILE")
    ] = None,
    aenv: Annotated[str, typer.Option(help="the address of AEnvironment's ports 8080 and 8081; auto or off")] = "auto",
    aenv_keys: Annotated[bool, typer.Option("--aenv-keys", help="AEnvironment's clients need a key, too")] = False,
    admin_key_file: Annotated[Path | None, typer.Option(help="made with a new key where it does not exist")] = None,
    print_env: Annotated[bool, typer.Option("--print-env", help="first print NAME=value lines for clients")] = False,
    json: Annotated[bool, typer.Option("--json", help="the ready line as JSON")] = False,
) -> None:
    """Serve the control plane: environments, instances, engines, the page."""
    from rollyard.plane.compat import FaceOptions
    from rollyard.plane.compat_fleet import FleetOptions
    from rollyard.plane.serve import PlaneOptions, PlaneReady, serve_plane

    def say(ready: PlaneReady) -> None:
        if print_env:
            typer.echo(ready.env)
        typer.echo(ready.json if json else ready.line)

    names = tuple(name.strip() for name in engine.split(",") if name.strip())
    serve_plane(
        PlaneOptions(
            store=store,
            engines=names,
            host=host,
            port=port,
            quota=quota,
            rate=rate,
            burst=burst,
            boot_s=boot_s,
            sweep_s=sweep_s,
            public_url=public_url,
            drain_s=drain_s,
            log_level=log_level,
            log_requests=log_requests,
            faces=FaceOptions(
                aenv=aenv,
                aenv_keys=aenv_keys,
                fleet=FleetOptions(worlds=worlds, tasks=tuple(fleet_tasks or ()), job_policy=job_policy),
            ),
            admin_key_file=admin_key_file,
        ),
        say=say,
    )
