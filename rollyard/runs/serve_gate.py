"""`serve gate`: a policy, a store and a gate put together, from options to the last clean shutdown.

Keys are in files that only their owner reads, never in arguments: a file that does not exist is made with a new key, and
the ready line says where they are.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Container, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
import uvloop

from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.ids import secret
from rollyard.core.protocols import Policy
from rollyard.core.rollout import MODES, Mode
from rollyard.gate import Gate, Tls
from rollyard.gate.processes import MOST
from rollyard.net.binding import http_url, listen, listen_unix
from rollyard.net.key_files import read_or_make_key, state_file, write_key
from rollyard.net.ready import ServerReady
from rollyard.policy import PolicyText
from rollyard.runs.gate_processes import GateSupervisor, Start, WriterStart
from rollyard.runs.rollout.open_policy import open_policy
from rollyard.store import Store
from rollyard.store.writer_process import serve_writes

# calls leave no cycles behind, and what they leave in the graph stays: looking at it every 700 objects costs a sixth of a call
GC_THRESHOLDS = (50_000, 50, 20)


class GateOptions(msgspec.Struct, frozen=True, kw_only=True):
    upstream: str | None = None
    model: str | None = None
    store: Path | None = None
    mode: str | None = None
    policy: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    unix: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    key_env: str | None = None
    admin_key_file: Path | None = None
    trainer_key_file: Path | None = None
    processes: int = 1


def serve_gate(options: GateOptions, *, say: Callable[[ServerReady], None]) -> None:
    """Blocks until SIGINT or SIGTERM."""
    gc.set_threshold(*GC_THRESHOLDS)
    refuse_unclear(options)
    with GateKeys(options) as keys:
        if options.processes > 1:
            _serve_processes(options, keys, say)
        else:
            uvloop.run(run_gate(options, keys.of, lambda url: say(keys.show(url))))


async def run_gate(
    options: GateOptions,
    keys: Mapping[str, str],
    ready: Callable[[str], None],
    start: Start | None = None,
) -> None:
    """`ready` is called with the URL."""
    stop = _stop_event((signal.SIGINT, signal.SIGTERM), None if start is None else start.orphaned)
    async with (
        _log(options.store, None if start is None else start.writer) as log,
        _policy(options, log) as policy,
        Gate(
            policy,
            log=log,
            host=options.host,
            port=options.port,
            unix=options.unix,
            tls=_tls(options),
            admin_key=keys["admin"],
            trainer_key=keys["trainer"],
            process=None if start is None else start.process,
        ) as gate,
    ):
        _settle_memory()
        ready(gate.url or "")
        await stop.wait()


def _settle_memory() -> None:
    """What starting took and left goes back to the system, as far as the C library can (glibc's can); what stays is not
    looked at again for cycles."""
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def write_for_all(path: Path, start: WriterStart) -> None:
    """What one of the processes does for the others. Ctrl-C is for those, which end first."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)
    stop = _stop_event((signal.SIGTERM,), start.orphaned)
    await serve_writes(path, start.inbox, stop, start.ready)


def _stop_event(signals: tuple[int, ...], orphaned: int | None) -> asyncio.Event:
    """Set by one of the signals, and when `orphaned` can be read."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    if orphaned is not None:
        loop.add_reader(orphaned, _stop_orphan, loop, orphaned, stop)
    return stop


def _stop_orphan(loop: asyncio.AbstractEventLoop, orphaned: int, stop: asyncio.Event) -> None:
    loop.remove_reader(orphaned)
    stop.set()


def _serve_processes(options: GateOptions, keys: GateKeys, say: Callable[[ServerReady], None]) -> None:
    store = options.store
    assert store is not None

    def serve(start: Start) -> None:
        uvloop.run(run_gate(options, keys.of, lambda _: start.ready(), start))

    def write(start: WriterStart) -> None:
        uvloop.run(write_for_all(store, start))

    listener = listen(options.host, options.port)
    unix_listener = None if options.unix is None else listen_unix(options.unix)
    supervisor = GateSupervisor(options.processes, serve, write, listener=listener, unix_listener=unix_listener)
    supervisor.start()
    try:
        say(keys.show(http_url(options.host, listener.getsockname()[1])))
        supervisor.keep()
    finally:
        supervisor.stop()


class GateKeys:
    """The admin's and the trainer's keys, and their files. Files that no option names are removed when the server ends."""

    def __init__(self, options: GateOptions) -> None:
        self._options = options
        self._files = {"admin": options.admin_key_file, "trainer": options.trainer_key_file}
        self._made: list[Path] = []
        self.of = {
            role: read_or_make_key(path) if path is not None else secret("ry") for role, path in self._files.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._made:
            path.unlink(missing_ok=True)

    def show(self, url: str) -> ServerReady:
        """The ready line, once the files of the keys are there."""
        shown: dict[str, str] = {}
        for role, path in self._files.items():
            if path is None:
                path = state_file(f"gate-{url.rpartition(':')[2]}.{role}-key")
                path.unlink(missing_ok=True)
                write_key(path, self.of[role])
                self._made.append(path)
            shown[role] = str(path)
        details = f"admin key: {shown['admin']}, trainer key: {shown['trainer']}"
        facts = {"mode": self._options.mode, **{f"{role}_key_file": path for role, path in shown.items()}}
        return ServerReady(server="gate", url=url, details=details, facts=facts)


def mode_of(name: str | None) -> Mode | None:
    if name is None:
        return None
    for mode in MODES:
        if name == mode:
            return mode
    raise ConfigError(f"unknown mode {name!r}", hint=f"one of {', '.join(MODES)}")


def refuse_unclear(options: GateOptions) -> None:
    """Before anything opens: exactly one option says who answers."""
    mode = mode_of(options.mode)
    if options.policy is not None:
        if options.upstream is not None or mode is not None:
            raise ConfigError("--policy stands alone", hint="leave out --upstream and --mode")
        PolicyText.read(options.policy)
    elif options.upstream is None and mode != "interception_gate":
        raise ConfigError(
            "who answers the calls?", hint="--upstream URL, --mode interception_gate or --policy NAME:..."
        )
    _refuse_unused(options, mode)
    if options.processes > 1:
        _refuse_processes(options, mode)


def _refuse_unused(options: GateOptions, mode: Mode | None) -> None:
    """What is meant for a model server, where another policy answers."""
    takes: Container[str]
    if options.policy is not None:
        found = PolicyText.read(options.policy)
        chosen, takes = f"--policy {found.name}", found.takes
    elif mode == "interception_gate":
        chosen, takes = f"--mode {mode}", ()
    elif mode == "black_box":
        chosen, takes = f"--mode {mode}", ("upstream", "key_env")
    else:
        return
    for name in ("upstream", "model", "key_env"):
        if getattr(options, name) is not None and name not in takes:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect with {chosen}", hint="leave it out")


def _refuse_processes(options: GateOptions, mode: Mode | None) -> None:
    """What several processes cannot do together."""
    many = f"--processes {options.processes}"
    if options.processes > MOST:
        raise ConfigError(f"{many} is too many", hint=f"at most {MOST}")
    if options.store is None:
        raise ConfigError(f"{many} needs --store", hint="a process that dies goes on with its sessions from there")
    if options.tls_cert is not None or options.tls_key is not None:
        raise Unsupported(
            f"{many} serves no TLS: an encrypted connection cannot move to another process",
            hint="end TLS in a proxy in front, or use --processes 1",
        )
    if mode == "interception_gate" or (
        options.policy is not None and hasattr(PolicyText.read(options.policy).factory, "take")
    ):
        raise Unsupported(
            f"{many} holds no calls for a trainer: one request of a trainer reaches one process",
            hint="use --processes 1, or a policy that answers by itself",
        )
    if not hasattr(os, "memfd_create"):
        raise Unsupported(f"{many} needs Linux", hint="use --processes 1")


@asynccontextmanager
async def _policy(options: GateOptions, log: Store | None) -> AsyncGenerator[Policy]:
    made = await policy_of(options, log)
    try:
        yield made
    finally:
        await made.aclose()


async def policy_of(options: GateOptions, log: Store | None) -> Policy:
    """A mode is a choice of policy."""
    from rollyard import policy

    mode = mode_of(options.mode)
    if options.policy is not None:
        settings = {"model": options.model, "key_env": options.key_env}
        return await open_policy(options.policy, store=log, served=True, **settings)
    if mode == "interception_gate":
        return policy.Queue()
    assert options.upstream is not None
    if mode == "black_box":
        through: Any = policy.passthrough(options.upstream, key_env=options.key_env)
        return through
    return policy.upstream(options.upstream, options.model, key_env=options.key_env)


@asynccontextmanager
async def _log(path: Path | None, writer: socket.socket | None) -> AsyncGenerator[Store | None]:
    if path is None:
        yield None
        return
    async with Store.open(path, writer=writer) as store:
        yield store


def _tls(options: GateOptions) -> Tls | None:
    if options.tls_cert is None and options.tls_key is None:
        return None
    if options.tls_cert is None or options.tls_key is None:
        raise ConfigError("TLS needs both --tls-cert and --tls-key")
    return Tls(cert=str(options.tls_cert), key=str(options.tls_key))
