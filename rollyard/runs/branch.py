"""`branch`: a kept rollout once more up to one of its calls, and from there on with a policy's own answers, n times.

A branch is a run like any other: its config says where it branches (`branch = "ROLLOUT@CALL"`), so that it is resumed, reported,
exported and done on a cluster as every run is. Each child is a fresh agent in a fresh sandbox, which is given the parent's
recorded answers up to the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollyard.core.branch_point import AFTER, END, BranchPoint, How
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.core.home import default_store
from rollyard.core.protocols import Backend, Policy
from rollyard.core.rollout import Rollout
from rollyard.core.task import Task
from rollyard.policy.prefix import calls_before, find_at, read_answer
from rollyard.runs.display.progress import Display
from rollyard.runs.rollout.branch_way import check_resumable
from rollyard.runs.rollout.load_parent import load_live
from rollyard.runs.rollout.options import OPTIONS, RolloutFields
from rollyard.runs.run.command import CommandOutcome, outcome_of, policies_by_name, read_text
from rollyard.runs.run.config import POLICY, RunConfig, anchor, convert
from rollyard.runs.run.drive import carry_out
from rollyard.runs.run.policies import check_policies
from rollyard.store import Store
from rollyard.store.listing import config_of
from rollyard.tasks.taskset import Taskset
from rollyard.tasks.verifiers.python import Checks

_ANSWERS = ("mode", "base_url", "key_env", "direct")  # options that say who answers: the child's own policy does


async def branch(
    rollout: Rollout | str,
    *,
    at: str | int,
    n: int = 1,
    how: How = "auto",
    answer: str | Mapping[str, Any] | None = None,
    policy: str | Policy | None = None,
    store: str | Path | Store | None = None,
    sandbox: str | Backend | None = None,
    verifier: Checks | None = None,
    task: Task | None = None,
    **fields: Any,
) -> list[Rollout]:
    """Go on from one call of a rollout, `n` times, with other answers. It is in the store; or it is under way in a run that has
    this store, and given by its id (`held.call.rollout_id`) and its `task`.

        children = await ry.branch(rollout, at=call_id, n=8, store=store)

    `at` is the call that the policy answers anew: its id, the start of it, or its number; `"end"` goes on after the last
    recorded answer, which is the call that a rollout under way is held at. The calls before it are answered as they were, and
    never train; each is compared with the parent's, and a child that asks something else fails with the difference. Options are
    those of the parent's run, with `fields` (of `RunConfig`) over them; without `policy` or `base_url` the run's own policy
    answers.

    `how` is by the agent's own session (`resume`), in a snapshot of the parent's sandbox (`snapshot_every`); or by running its
    commands again (`replay`); `auto` resumes where it can.

    `answer` is what the model is to have said at that call: text, or a mapping with `text` and `tool_calls` (each with `name` and
    `arguments`). The policy answers from the next call on."""
    if answer is not None:
        fields["branch_answer"] = answer if isinstance(answer, str) else msgspec.json.encode(answer).decode()
    async with AsyncExitStack() as stack:
        kept = store if isinstance(store, Store) else None
        if kept is None:
            kept = await stack.enter_async_context(Store.open(str(store or default_store()), create=False))
        named = None if policy is None or isinstance(policy, str) else {POLICY: policy}
        if isinstance(policy, str):
            fields["policies"] = {POLICY: anchor(policy, Path.cwd())}
        target = rollout if isinstance(rollout, str) else rollout.id
        fields |= {"attempts": n, "branch_how": how}
        tasks = None if task is None else Taskset([task])
        task = None if tasks is None else next(iter(tasks))  # with its digest
        config = await branch_config(kept, target, str(at), fields, answered=named is not None, task=task)
        done = await carry_out(config, store=kept, answering=named, sandbox=sandbox, verifier=verifier, tasks=tasks)
        return [await kept.get_rollout(child.id) async for child in kept.rollouts(done.run_id)]


class BranchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What `rollyard branch` and `rollyard continue` were asked for."""

    rollout: str
    at: str
    n: int = 1
    how: How = "auto"
    answer: str | None = None
    policy: str | None = None
    options: RolloutFields = {}
    parallel: int | Literal["auto"] | None = None
    sandbox: str | None = None
    store: str
    name: str = ""
    as_json: bool = False


async def execute(request: BranchRequest, shown: Display) -> CommandOutcome:
    fields: dict[str, Any] = {**request.options, "attempts": request.n, "branch_how": request.how, "name": request.name}
    fields |= {} if request.answer is None else {"branch_answer": read_text(request.answer, "the answer")}
    fields |= {} if request.policy is None else {"policies": policies_by_name((request.policy,))}
    fields |= {} if request.parallel is None else {"parallel": request.parallel}
    fields |= {} if request.sandbox is None else {"sandbox": request.sandbox}
    async with Store.open(request.store, create=False) as store:
        config = await branch_config(store, request.rollout, request.at, fields)
        check_policies(config)
        with shown:
            report = await carry_out(config, store=store, display=shown)
    return outcome_of(report, request.store, as_json=request.as_json)


async def branch_config(
    store: Store,
    target: str,
    at: str,
    fields: Mapping[str, Any],
    *,
    answered: bool = False,
    task: Task | None = None,
) -> RunConfig:
    """The run that branches there. `answered` says that the caller brings the policy; `task` is that of a rollout under way."""
    for name in fields:
        if name in ("tasks", "agents", "branch") or name not in RunConfig.__struct_fields__:
            raise UnknownName("field of a branch", name, RunConfig.__struct_fields__)
    if fields.get("branch_answer") is not None:
        read_answer(fields["branch_answer"])
    parent, live = await _find_parent(store, target, task)
    call = END if at == END else find_at(parent.captured, at).id
    before = calls_before(parent.captured, call)
    if call == END and not before:
        raise ConfigError(f"rollout {parent.id} has no recorded answer to go on from", hint="run its task anew")
    if call == END and live:
        call = f"{AFTER}{before[-1].id}"
    if fields.get("branch_how") == "resume":
        check_resumable(BranchPoint(parent.id, call), parent)
    base = convert(await config_of(store, parent), f"run {parent.run_id}")
    given = {name: getattr(base, name) for name in OPTIONS if name not in _ANSWERS}
    given |= {"agents": _find_agent(base, parent), "sandbox": parent.sandbox or base.sandbox, "seed": parent.seed}
    given |= {"branch": str(BranchPoint(parent.id, call)), "parallel": base.parallel, "lease_s": base.lease_s}
    if not answered and not fields.get("policies") and fields.get("base_url") is None:
        given |= _own_policy(base, parent)
    given["labels"] = {name: text for name, text in given["labels"].items() if name != "policy"}
    return msgspec.structs.replace(RunConfig(**given), **fields)


async def _find_parent(store: Store, target: str, task: Task | None) -> tuple[Rollout, bool]:
    """And whether it still runs."""
    attempt = await store.live_attempt(target)
    if attempt is not None and task is None:
        raise ConfigError(f"rollout {target} is still under way", hint="give its task (task=...), or wait for its end")
    if attempt is not None and task is not None:
        return await load_live(store, target, attempt, task), True
    if task is not None:
        raise ConfigError(f"rollout {target} is not under way: the store has its task", hint="leave task out")
    kind, found = await store.resolve(target)
    if kind != "rollout":
        raise ConfigError(f"{target!r} is a run; name one rollout of it", hint=f"rollyard list {target} shows them")
    parent = await store.get_rollout(found)
    if not parent.captured.records:
        why = "mode 'black_box' records no content" if parent.mode == "black_box" else "its agent asked for nothing"
        raise ConfigError(f"rollout {found} has no recorded calls to branch at: {why}")
    return parent, False


def _find_agent(base: RunConfig, parent: Rollout) -> tuple[str, ...]:
    """The name it was run by: a file's, where the agent is one."""
    files = [name for name in base.agents if Path(name).stem == parent.agent]
    return (parent.agent,) if parent.agent in base.agents or not files else (files[0],)


def _own_policy(base: RunConfig, parent: Rollout) -> dict[str, Any]:
    """The policy that answered the parent, where its run's config names it."""
    named = base.answers
    name = parent.labels.get("policy") or next(iter(named), "")
    if name not in named:
        raise ConfigError(
            f"no policy is named to go on with, and the run of rollout {parent.id} kept none",
            hint="name one: --policy scripted:FILE, upstream:URL or tokens:URL, or --base-url URL",
        )
    return {"policies": {POLICY: named[name]}, "key_env": base.key_env}
