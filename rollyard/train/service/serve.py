"""`serve rollouts`: store, policy, gate, sandboxes, jobs and their API put together, until SIGINT or SIGTERM."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import uvloop

from rollyard.core.agent import DEFAULT_AGENT
from rollyard.core.errors import ConfigError
from rollyard.gate import Gate
from rollyard.net.app_server import serve_app
from rollyard.net.binding import LOOPBACK, http_url, listen
from rollyard.net.ready import ServerReady
from rollyard.net.web_pages import AllowedHosts, NoWebPages
from rollyard.runs.rollout.open_backend import open_named
from rollyard.runs.run.config import RunConfig
from rollyard.runs.serve_gate import GateOptions, policy_of
from rollyard.store import Store
from rollyard.train.service.api import LOCAL, RolloutsApi
from rollyard.train.service.jobs import RolloutJobs
from rollyard.train.service.request import ServiceDefaults


class RolloutsOptions(msgspec.Struct, frozen=True, kw_only=True):
    store: str
    answers: GateOptions
    host: str = "127.0.0.1"
    port: int = 0
    allow_hosts: tuple[str, ...] = ()
    keys: Path | None = None
    trainer: str | None = None
    agent: str = DEFAULT_AGENT
    sandbox: str = "local"
    parallel: int = 8
    jobs: int = 4
    quota: int = 100
    tasks: Path | None = None
    callback_hosts: tuple[str, ...] = ()


def serve_rollouts(options: RolloutsOptions, *, say: Callable[[ServerReady], None]) -> None:
    """Blocks until it is stopped."""
    uvloop.run(run_rollouts(options, say))


async def run_rollouts(options: RolloutsOptions, say: Callable[[ServerReady], None]) -> None:
    if (options.answers.policy is None) == (options.answers.upstream is None):
        raise ConfigError(
            "who answers the calls?", hint="--base-url URL or --policy TEXT; --policy queue is the trainer"
        )
    keys = read_keys(options.keys) if options.keys is not None else {}
    if not keys and options.host not in LOOPBACK:
        raise ConfigError(
            f"{options.host} is not loopback: any machine that reaches it could run jobs", hint="pass --keys FILE"
        )
    server = ServiceDefaults(
        agent=options.agent,
        sandbox=options.sandbox,
        parallel=options.parallel,
        tasks=options.tasks,
        callback_hosts=options.callback_hosts,
    )
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(Store.open(options.store))
        policy = await policy_of(options.answers, store)
        stack.push_async_callback(policy.aclose)
        gate = await stack.enter_async_context(Gate(policy, log=store))
        backend = await stack.enter_async_context(open_named(options.sandbox, RunConfig(sandbox=options.sandbox)))
        jobs = RolloutJobs(store, gate, backend, server, running=options.jobs, quota=options.quota)
        api = RolloutsApi(jobs, store, gate, keys, trainer_of(keys, options.trainer))
        await stack.enter_async_context(jobs.open())
        app = api.app if keys else NoWebPages(api.app, AllowedHosts(options.host, *options.allow_hosts))
        with listen(options.host, options.port) as sock:
            url = http_url(*sock.getsockname()[:2])
            owners = f"owners: {', '.join(sorted(set(keys.values())))}" if keys else "no key: this machine alone"
            say(ServerReady(server="rollouts", url=url, details=owners, facts={"store": options.store}))
            await serve_app(app, sock, timeout_graceful_shutdown=5)


def trainer_of(keys: Mapping[str, str], named: str | None) -> str:
    """The owner who may take held calls: the one that is named, or the only one there is. Of several, one must be named."""
    owners = sorted(set(keys.values()))
    if named is not None and named not in owners:
        raise ConfigError(f"the trainer {named!r} has no key", hint=f"owners: {', '.join(owners) or 'none'}")
    return named or (LOCAL if not owners else owners[0] if len(owners) == 1 else "")


def read_keys(path: Path) -> dict[str, str]:
    """Owners by their keys, from lines of `OWNER KEY`. A file that others can read is refused."""
    try:
        if path.stat().st_mode & 0o077 and path.stat().st_uid == os.geteuid():
            raise ConfigError(f"others can read {path}", hint=f"chmod 600 {path}")
        lines = [line.split() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the keys in {path} cannot be read: {error}") from error
    for number, words in enumerate(lines, 1):
        if len(words) != 2 or len(words[1]) < 16:
            raise ConfigError(f"{path}: entry {number} is not `OWNER KEY`", hint="a key has at least 16 characters")
    if not lines:
        raise ConfigError(f"{path} holds no key", hint="one line of `OWNER KEY` for each owner")
    if len({key for _, key in lines}) < len(lines):
        raise ConfigError(f"{path}: two owners have the same key", hint="give each owner a key of its own")
    return {key: owner for owner, key in lines}
