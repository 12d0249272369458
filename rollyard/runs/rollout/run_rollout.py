"""`run_rollout`: one rollout from plain arguments, with everything it needs opened and closed around it.

The MCP tool, the environment and the command line call this; it wires a backend, a gate and a policy, and calls the one
lifecycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from rollyard import agents
from rollyard.core.agent import Agent
from rollyard.core.call import Dialect
from rollyard.core.errors import ConfigError
from rollyard.core.ids import new_id
from rollyard.core.limits import Limits
from rollyard.core.protocols import Backend, EventSink, Policy
from rollyard.core.rollout import Rollout
from rollyard.core.sequences import as_commands, as_tuple
from rollyard.core.task import File, McpServer, Task, VerifierSpec
from rollyard.gate import Budget, Gate
from rollyard.runs.rollout.lifecycle import rollout
from rollyard.runs.rollout.modes import choose
from rollyard.runs.rollout.plan import AGENTS_MODEL, Hooks, RolloutPlan
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.rollout.stages import nowhere
from rollyard.runs.run.policies import open_policy
from rollyard.sandbox import backend as open_backend
from rollyard.store import Store
from rollyard.tasks.rows import as_task
from rollyard.tasks.verifiers.python import Check, as_verifier
from rollyard.tools import Tool, Toolset


async def run_rollout(
    instruction: str | Mapping[str, Any] | Task,
    *,
    agent: str | Agent = "opencode",
    mode: str | None = None,
    model: str | None = None,
    base_url: str | None = None,
    key: str | None = None,
    policy: Policy | str | None = None,
    direct: bool = False,
    sandbox: str | Backend = "local",
    template: str | None = None,
    files: Mapping[str, str | bytes] | Sequence[File] | None = None,
    setup: str | Sequence[str] = (),
    verify: str | Sequence[str] = (),
    verifier: Check | None = None,
    system_prompt: str | None = None,
    disabled_tools: Sequence[str] = (),
    mcp: Sequence[McpServer] = (),
    tools: Sequence[Tool] = (),
    dialect: Dialect | None = None,
    disable_thinking: bool | None = None,
    max_tokens_cap: int | None = None,
    top_logprobs: int | None = None,
    max_calls: int | None = None,
    limits: Limits | None = None,
    task_id: str | None = None,
    episode_id: str | None = None,
    seed: int | None = None,
    labels: Mapping[str, str] | None = None,
    collect: Sequence[str] = (),
    store: Store | None = None,
    gate: Gate | None = None,
    gate_url: str | None = None,
    hooks: Hooks | None = None,
    provision: Provision | None = None,
    allow_network: bool = False,
    allow_unsafe: bool = False,
    sink: EventSink = nowhere,
    rollout_id: str | None = None,
) -> Rollout:
    """Run an agent once on an instruction (a string, a mapping with a task's fields, or a `Task`).

    Who answers its model calls: `policy`, or `base_url` with `model` and `key`. `files` maps paths to contents; `setup` and
    `verify` are shell commands, or one, the reward being the share of `verify` commands that succeed; `verifier` is a function
    of the sandbox and the rollout instead, which gives a `Verdict` or a number. `collect` are globs of files to bring back.
    `tools` run on this side and are offered to the agent over MCP. Options a mode, agent or backend cannot honour are refused
    by name before anything opens."""
    task = _task(instruction, template=template, files=files, setup=setup, verify=verify, task_id=task_id)
    chosen = agents.get(agent) if isinstance(agent, str) else agent
    if direct and (mode != "black_box" or base_url is None or key is None):
        raise ConfigError("direct=True is for mode='black_box' with base_url and key given explicitly")
    opened = await open_policy(policy, store=store, model=model, key=key) if isinstance(policy, str) else None
    given = opened if isinstance(policy, str) else policy
    answering = choose(
        mode,
        policy=given if given is not None or gate is None or base_url is not None else gate.policy,
        base_url=base_url,
        model=model,
        key=key,
        calls_nobody=not chosen.calls_model,
        switches=chosen.switches,
        disable_thinking=disable_thinking,
        max_tokens_cap=max_tokens_cap,
        top_logprobs=top_logprobs,
    )
    if tools := as_tuple(tools, "tools"):
        agents.refuse(chosen, {"mcp": (McpServer(name="rollyard"),)})
    plan = RolloutPlan(
        rollout_id=rollout_id or new_id("ro"),
        agent=chosen,
        mode=answering.mode,
        model=model or AGENTS_MODEL,
        episode_id=episode_id,
        seed=seed,
        labels=dict(labels or {}),
        limits=limits,
        system_prompt=system_prompt,
        disabled_tools=as_tuple(disabled_tools, "disabled_tools"),
        mcp=as_tuple(mcp, "mcp"),
        dialect=dialect,
        **answering.left_to_agent,
        allow_network=allow_network,
        allow_unsafe=allow_unsafe,
        verifier=as_verifier(verifier),
        files_wanted=as_tuple(collect, "collect"),
        hooks=hooks or Hooks(),
        gate_url=gate_url,
        direct=(base_url, key) if direct and base_url is not None and key is not None else None,
    )
    async with AsyncExitStack() as stack:
        if answering.owned or opened is not None:
            stack.push_async_callback(answering.policy.aclose)
        offered = Toolset(tools) if tools else None
        if offered is not None:
            stack.push_async_callback(offered.aclose)
            await offered.ready()
        backend = await stack.enter_async_context(open_backend(sandbox)) if isinstance(sandbox, str) else sandbox
        if gate is None:
            gate = await stack.enter_async_context(Gate(answering.policy, log=store))
        done = await rollout(
            task,
            plan,
            backend=backend,
            gate=gate,
            session_options={
                "policy": answering.policy,
                "budget": Budget(calls=max_calls),
                "settings": answering.settings,
                "tools": offered,
            },
            provision=provision or Provision.of(backend),
            sink=sink,
        )
        if store is not None:
            await store.commit_rollout(done)
        return done


def _task(
    instruction: str | Mapping[str, Any] | Task,
    *,
    template: str | None,
    files: Mapping[str, str | bytes] | Sequence[File] | None,
    setup: str | Sequence[str],
    verify: str | Sequence[str],
    task_id: str | None,
) -> Task:
    from msgspec.structs import replace

    task = as_task(instruction)
    if files is not None:
        task = replace(task, files=(*task.files, *_files(files)))
    if template is not None:
        task = replace(task, image=template)
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
