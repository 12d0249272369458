"""What `rollyard run` was asked for, turned into a run or a single rollout, and its outcome as text."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.home import STORE, default_store
from rollyard.core.rollout import Rollout
from rollyard.core.task import File
from rollyard.core.tree import Tree
from rollyard.runs.display.progress import Display, one_line, summary
from rollyard.runs.report.report import Report
from rollyard.runs.report.report import text as report_text
from rollyard.runs.rollout.modes import choose
from rollyard.runs.rollout.open_policy import open_policy
from rollyard.runs.rollout.options import RolloutFields, merge_options
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.runs.run.config import AUTO, POLICY, RunConfig, anchor, anchor_user, load
from rollyard.runs.run.drive import drive
from rollyard.runs.run.executor import Executor, executor
from rollyard.runs.run.policy_health import check_servers
from rollyard.store import Store

_SERVERS = ("upstream:", "tokens:", "passthrough:")  # policies behind which a server stands


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    tasks: str | None = None
    agents: tuple[str, ...]
    policies: tuple[str, ...] = ()
    options: RolloutFields = {}
    attempts: int = 1
    parallel: int | Literal["auto"] = 4
    sandbox: str = "local"
    store: str = STORE
    resume: str | None = None
    retries: int = 1
    limit: int | None = None
    filter: tuple[str, ...] = ()
    instruction: str | None = None
    setup: tuple[str, ...] = ()
    verify: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    executor: str = "local"
    ray_address: str | None = None
    per_node: int | None = None
    nodes: int | None = None
    workers: int | None = None
    name: str = ""
    strict: bool = False
    tree: str | None = None
    as_json: bool = False


class CommandOutcome(msgspec.Struct, frozen=True):
    text: str
    failed: bool
    stopped: bool = False  # a policy was asked no more: what is left is owed


async def execute(request: RunRequest, shown: Display) -> CommandOutcome:
    from_file = request.tasks is not None and request.tasks.endswith(".toml")
    if request.tree is not None and (request.instruction is not None or request.resume is not None or from_file):
        raise ConfigError("--tree goes with a folder of tasks", hint="in a run's TOML file it is [tree]")
    if request.instruction is not None:
        if request.executor != "local" or request.workers is not None:
            hint = "leave out --executor and --workers"
            raise ConfigError("--instruction runs one rollout, in this process", hint=hint)
        if request.tasks is not None or request.resume is not None:
            raise ConfigError("--instruction runs one rollout; it takes no tasks and no --resume")
        return await _run_one(request, shown)
    if request.setup or request.verify or request.files:
        raise ConfigError("--setup, --verify and --file go with --instruction", hint="tasks bring their own")
    return await _many(request, shown)


def _executor(request: RunRequest) -> Executor:
    if request.executor != "local" and request.workers is not None:
        raise ConfigError("--workers are processes of this machine", hint="with --executor ray it is --per-node")
    of_ray = {"address": request.ray_address, "per_node": request.per_node, "nodes": request.nodes}
    if request.executor == "local" and any(value is not None for value in of_ray.values()):
        raise ConfigError("--ray-address, --per-node and --nodes go with --executor ray")
    given = {**of_ray, "workers": request.workers}
    return executor(request.executor, **{name: value for name, value in given.items() if value is not None})


async def _run_one(request: RunRequest, shown: Display) -> CommandOutcome:
    named = policies_by_name(request.policies)
    if len(named) > 1 or len(request.agents) != 1:
        raise ConfigError("--instruction takes one agent and one policy")
    await _check_server(request, next(iter(named.values()), None))
    async with Store.open(request.store) as store:
        with shown:
            done = await run_rollout(
                read_text(request.instruction or "", "the instruction"),
                agent=request.agents[0],
                policy=next(iter(named.values()), None),
                sandbox=request.sandbox,
                files=[_file(text) for text in request.files],
                setup=request.setup,
                verify=request.verify,
                options=merge_options(request.options),
                store=store,
                sink=shown.event,
            )
    failed = done.failure is not None
    if request.as_json:
        return CommandOutcome(_json(done), failed)
    command = f"rollyard {'why' if failed else 'show'} {done.id}{store_option(request.store)}"
    return CommandOutcome(f"{_rollout_text(done)}kept in {request.store}; look closer with:\n  {command}\n", failed)


async def _check_server(request: RunRequest, policy: str | None) -> None:
    """A server that will not answer is reported before anything opens."""
    options = merge_options(request.options)
    if options.base_url is None and not (policy or "").startswith(_SERVERS):
        return
    opened = None if policy is None else await open_policy(policy, model=options.model, key_env=options.key_env)
    answering = choose(options, policy=opened)
    try:
        await check_servers({POLICY: answering.policy}, options.model)
    finally:
        await answering.policy.aclose()


async def _many(request: RunRequest, shown: Display) -> CommandOutcome:
    if request.resume is not None:
        config = None
    elif request.tasks is not None and request.tasks.endswith(".toml") and Path(request.tasks).name != "dataset.toml":
        config = load(request.tasks, request.options)
    elif request.tasks is not None:
        config = _config(request, request.tasks)
    else:
        raise ConfigError("nothing to run", hint="name a folder of tasks, a run's TOML file, --instruction or --resume")
    where = _executor(request)
    report = await drive(config, store=request.store, display=shown, resume=request.resume, executor=where)
    return outcome_of(report, request.store, as_json=request.as_json)


def outcome_of(report: Report, store: str, *, as_json: bool) -> CommandOutcome:
    failed, stopped = any(status != "completed" for status in report.statuses), bool(report.stopped)
    if as_json:
        return CommandOutcome(
            msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n", failed, stopped
        )
    return CommandOutcome(describe_end(report, store), failed, stopped)


def describe_end(report: Report, store: str) -> str:
    """What a finished run leaves on the terminal: its report, and the command that looks closer."""
    where = store_option(store)
    commands = [f"rollyard show {report.run_id}{where}"]
    if report.attempts > report.rewards.get("1.0", 0):
        commands.append(f"rollyard why {report.run_id}{where}")
    commands.append(f"rollyard view{where.replace(' --store', '')}")
    listed = "".join(f"  {command}\n" for command in commands)
    text = f"{report_text(report, terminal_width())}kept in {store}; look closer with:\n{listed}"
    if report.stopped:
        text += f"resume with:\n  rollyard run --resume {report.run_id}{store_option(store)}\n"
    return text


def read_parallel(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--parallel {text!r} is no number", hint=f"a number, or {AUTO}") from None


def resume_command(request: RunRequest) -> str:
    """The command that resumes the run, with a place for its id."""
    words = ["rollyard run --resume {run}"]
    if request.executor != "local":
        words.append(f"--executor {request.executor}")
        words += [f"--ray-address {shlex.quote(request.ray_address)}"] if request.ray_address is not None else []
        words += [f"--per-node {request.per_node}"] if request.per_node is not None else []
        words += [f"--nodes {request.nodes}"] if request.nodes is not None else []
    words += [f"--workers {request.workers}"] if request.workers is not None else []
    return " ".join(words) + store_option(request.store)


def store_option(store: str) -> str:
    """What a command needs to find that store."""
    return "" if store == default_store() else f" --store {shlex.quote(store)}"


def terminal_width() -> int:
    """Of standard output; where that is no terminal, lines are as long as they are. A terminal may not know its width."""
    return os.get_terminal_size(1).columns or 80 if os.isatty(1) else 240


def _config(request: RunRequest, tasks: str) -> RunConfig:
    options = merge_options(anchor_user(request.options))
    if request.policies and options.base_url is not None:
        raise ConfigError("--policy and --base-url both say who answers", hint="give one of them")
    return RunConfig(
        **msgspec.structs.asdict(options),
        tasks=str(Path(tasks).resolve()) if Path(tasks).exists() else tasks,
        agents=request.agents,
        policies=policies_by_name(request.policies),
        attempts=request.attempts,
        parallel=request.parallel,
        retries=request.retries,
        sandbox=request.sandbox,
        filter=request.filter,
        limit=request.limit,
        name=request.name,
        strict=request.strict,
        tree=None if request.tree is None else Tree.parse(request.tree),
    )


def policies_by_name(policies: tuple[str, ...]) -> Mapping[str, str]:
    """`NAME=kind:where` for several, or one without a name."""
    named: dict[str, str] = {}
    for number, text in enumerate(policies):
        name, separator, rest = text.partition("=")
        if not separator or ":" in name or "#" in name:  # the = of an option
            name, rest = (POLICY if number == 0 else f"{POLICY}{number + 1}"), text
        if name in named:
            raise ConfigError(f"two policies are named {name!r}")
        named[name] = anchor(rest, Path.cwd())
    return named


def read_text(text: str, what: str) -> str:
    """The text, or what the file behind an @ holds."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {what} from {text[1:]!r}: {error.strerror}") from error


def _file(text: str) -> File:
    source, separator, target = text.rpartition(":")
    if not separator or not target:
        raise ConfigError(f"--file {text!r} is not SRC:DST")
    return File(path=target, source=source)


def _rollout_text(done: Rollout) -> str:
    lines = [one_line(done)]
    for record in (*done.install, *done.setup, *(done.verdict.commands if done.verdict else ())):
        lines.append(f"  $ {record.command}  -> {record.exit_code}")
    if done.diff:
        lines.append(done.diff.rstrip())
    if done.failure is not None:
        lines += [
            f"failed at {done.failure.boundary} in {done.failure.stage}: {done.failure.message}",
            done.log_tail[-2000:],
        ]
    return "\n".join(lines) + "\n"


def _json(done: Rollout) -> str:
    fields = summary(done) | {
        "sandbox_id": done.sandbox_id,
        "mode": done.mode,
        "exit_code": done.exit_code,
        "install": msgspec.to_builtins(done.install),
        "setup": msgspec.to_builtins(done.setup),
        "verdict": msgspec.to_builtins(done.verdict),
        "diff": done.diff,
        "log_tail": done.log_tail,
        "gate_log_tail": done.gate_log_tail,
    }
    return msgspec.json.format(msgspec.json.encode(fields), indent=2).decode() + "\n"
