"""`run_rollout`: one rollout from plain arguments, with everything it needs opened and closed around it.

The MCP tool, the environment and the command line call this; it wires a backend, a gate and a policy, and calls the one
lifecycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Unpack, cast

from msgspec.structs import replace

from rollyard import agents
from rollyard.core.agent import DEFAULT_AGENT, Agent
from rollyard.core.errors import ConfigError
from rollyard.core.ids import new_id
from rollyard.core.protocols import Backend, EventSink, Policy
from rollyard.core.remote_task import TaskConfig
from rollyard.core.rollout import Rollout
from rollyard.core.sequences import as_commands, as_tuple
from rollyard.core.task import File, McpServer, Task, VerifierSpec
from rollyard.envs.fleet.provider import EnvProvider
from rollyard.envs.fleet.task_instance import Leases
from rollyard.gate import Budget, Gate
from rollyard.runs.rollout.lifecycle import rollout
from rollyard.runs.rollout.modes import choose, find_direct
from rollyard.runs.rollout.open_backend import open_named
from rollyard.runs.rollout.open_policy import learn_model, open_policy
from rollyard.runs.rollout.options import OPTIONS, RolloutFields, RolloutOptions, merge_options
from rollyard.runs.rollout.plan import Hooks, RolloutPlan, SessionOptions, StagePauses
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.rollout.stages import drop_event
from rollyard.store import Store
from rollyard.tasks.rows import as_task
from rollyard.tasks.verifiers.python import Checks
from rollyard.tasks.verifiers.weighted import as_judge
from rollyard.tools import Tool, Toolset


class RolloutArguments(RolloutFields, total=False):
    """The keywords of `run_rollout` beside its options: what the task is given, who it is, and the caller's own objects."""

    files: Mapping[str, str | bytes] | Sequence[File] | None
    setup: str | Sequence[str]
    verify: str | Sequence[str]
    task_id: str | None
    episode_id: str | None
    rollout_id: str | None
    key: str | None
    verifier: Checks | None
    tools: Sequence[Tool] | Toolset
    hooks: Hooks | None
    pauses: StagePauses | None
    provider: EnvProvider | None
    leases: Leases | None
    gate: Gate | None
    provision: Provision | None
    sink: EventSink


async def run_rollout(
    instruction: str | Mapping[str, Any] | Task | TaskConfig,
    *,
    agent: str | Agent = DEFAULT_AGENT,
    policy: Policy | str | None = None,
    sandbox: str | Backend = "local",
    store: Store | None = None,
    options: RolloutOptions | None = None,
    **arguments: Unpack[RolloutArguments],
) -> Rollout:
    """Run an agent once on an instruction (a string, a mapping with a task's fields, a `Task`, or a remote task's `TaskConfig`).

    Who answers its model calls: `policy`, or `base_url` with `model` and `key` (or `key_env`). Options are those of
    `RolloutOptions`, as one value or as keywords over it. `files` maps paths to contents; `setup` and `verify` are shell
    commands, or one, the reward being the share of `verify` commands that succeed; `verifier` is a function of the sandbox
    and the rollout instead, which gives a `Verdict` or a number. `tools` run on this side and are offered to the agent over
    MCP; a `Toolset` may be given more until the agent starts. `provider` makes the environments of remote tasks, `leases`
    lend browsers to them; variables name both otherwise. `pauses` takes the rollout stage by stage. Options a mode,
    agent or backend cannot honour are refused by name before anything opens."""
    asked = _check_names(arguments)
    options = merge_options(asked, options)
    task = _task(instruction, arguments)
    one = agents.get(agent) if isinstance(agent, str) else agent
    key, gate = arguments.get("key"), arguments.get("gate")
    if key is not None and options.key_env is not None:
        raise ConfigError("key and key_env both give the key", hint="give one of them")
    direct = find_direct(options, key)
    tools = arguments.get("tools", ())
    offered = tools if isinstance(tools, Toolset) else Toolset(as_tuple(tools, "tools"))
    if offered.tools:
        agents.refuse(one, {"mcp": (McpServer(name="rollyard"),)})
    async with AsyncExitStack() as stack:
        if isinstance(policy, str):
            policy = await open_policy(policy, store=store, model=options.model, key=key, key_env=options.key_env)
            stack.push_async_callback(policy.aclose)
        elif policy is None and gate is not None and options.base_url is None:
            policy = gate.policy
        await learn_model(policy, one)
        answering = choose(options, policy=policy, key=key, agent=one)
        if answering.owned:
            stack.push_async_callback(answering.policy.aclose)
        plan = RolloutPlan(
            rollout_id=arguments.get("rollout_id") or new_id("ro"),
            agent=one,
            options=options,
            mode=answering.mode,
            switches=answering.switches,
            episode_id=arguments.get("episode_id"),
            verifier=as_judge(arguments.get("verifier")),
            hooks=arguments.get("hooks") or Hooks(),
            pauses=arguments.get("pauses"),
            provider=arguments.get("provider"),
            leases=arguments.get("leases"),
            direct=direct,
        )
        stack.push_async_callback(offered.aclose)
        if offered.tools:
            await offered.ready()
        backend = (
            sandbox if not isinstance(sandbox, str) else await stack.enter_async_context(open_named(sandbox, options))
        )
        if gate is None:
            gate = await stack.enter_async_context(Gate(answering.policy, log=store))
        session = SessionOptions(
            policy=answering.policy,
            budget=Budget(calls=options.max_calls),
            settings=answering.settings,
            tools=offered if offered.tools or isinstance(tools, Toolset) else None,
        )
        done = await rollout(
            task,
            plan,
            session=session,
            backend=backend,
            gate=gate,
            provision=arguments.get("provision") or Provision.of(backend),
            sink=arguments.get("sink", drop_event),
        )
        if store is not None:
            await store.commit_rollout(done)
        return done


def _check_names(arguments: RolloutArguments) -> RolloutFields:
    """The options among the arguments. A name that is neither is refused as Python does it."""
    for name in arguments:
        if name not in RolloutArguments.__annotations__ and name not in OPTIONS:
            raise TypeError(f"run_rollout() got an unexpected keyword argument {name!r}")
    return cast(RolloutFields, {name: value for name, value in arguments.items() if name in OPTIONS})


def _task(instruction: str | Mapping[str, Any] | Task | TaskConfig, arguments: RolloutArguments) -> Task:
    task = as_task(instruction)
    files, task_id = arguments.get("files"), arguments.get("task_id")
    setup, verify = arguments.get("setup", ()), arguments.get("verify", ())
    if files is not None:
        task = replace(task, files=(*task.files, *_files(files)))
    if setup:
        task = replace(task, setup=(*task.setup, *as_commands(setup, "setup")))
    if verify:
        task = replace(
            task, verifier=VerifierSpec(kind="commands", options={"commands": list(as_commands(verify, "verify"))})
        )
    return replace(task, id=task_id) if task_id is not None else task


def _files(files: Mapping[str, str | bytes] | Sequence[File]) -> list[File]:
    if not isinstance(files, Mapping):
        return list(as_tuple(files, "files"))
    return [File(path=path, data=text.encode() if isinstance(text, str) else text) for path, text in files.items()]
