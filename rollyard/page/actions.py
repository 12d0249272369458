"""What the page may do on this machine: start a rollout, cancel one it started, judge one again.

Rollouts started here run in a task group that ends with the server; one that ends is kept in the store like any other.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec
from anyio.abc import TaskGroup

from rollyard import agents
from rollyard.core import registry
from rollyard.core.errors import ConfigError, Error
from rollyard.core.events import Event
from rollyard.core.ids import new_id
from rollyard.core.protocols import Policy
from rollyard.core.rollout import MODES, Rollout
from rollyard.core.task import Task
from rollyard.runs.branch import branch_config
from rollyard.runs.rescore import rescore
from rollyard.runs.rollout.modes import choose
from rollyard.runs.rollout.open_policy import learn_model, open_policy
from rollyard.runs.rollout.options import OPTIONS, Option, RolloutFields, merge_options, read_options, write_options
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.runs.run.config import POLICY, RunConfig
from rollyard.runs.run.drive import carry_out
from rollyard.runs.run.policies import check_policies
from rollyard.store import Store
from rollyard.tasks.taskset import Taskset


class LocalActions:
    def __init__(self, store: Store, tasks: str | None, *, where: str = "runs.db") -> None:
        self._store, self._where, self._taskset = store, where, tasks or ""
        self._tasks: dict[str, Task] = {task.id: task for task in Taskset.load(tasks)} if tasks is not None else {}
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._group: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._group is not None
        self._group.cancel_scope.cancel()
        return await self._group.__aexit__(kind, error, trace)

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._scopes)

    def choices(self) -> Mapping[str, Any]:
        return {
            "agents": agents.names(),
            "modes": MODES,
            "sandboxes": registry.names("rollyard.sandboxes"),
            "tasks": list(self._tasks),
            "options": [option for option in OPTIONS.values() if _is_offered(option)],
        }

    def command(self, form: Mapping[str, str]) -> str:
        """The same from a terminal."""
        task = self._read_task(form)
        words = ["rollyard", "run"]
        if isinstance(task, Task):
            words += [self._taskset, "--filter", task.id]
        else:
            words += ["--instruction", task]
        for name in ("agent", "policy", "sandbox"):
            if form.get(name):
                words += [f"--{name}", form[name]]
        for name in ("setup", "verify"):
            for line in _lines(form.get(name, "")):
                words += [f"--{name}", line]
        return shlex.join([*words, *write_options(_options(form)), "--store", self._where])

    def _read_task(self, form: Mapping[str, str]) -> Task | str:
        if form.get("task"):
            if form.get("instruction", "").strip() or form.get("setup", "").strip() or form.get("verify", "").strip():
                raise ConfigError("a stored task brings its own instruction, setup and verify commands")
            if form["task"] not in self._tasks:
                raise ConfigError(f"no stored task {form['task']!r}")
            return self._tasks[form["task"]]
        instruction = form.get("instruction", "").strip()
        if not instruction:
            raise ConfigError("choose a stored task or type an instruction")
        return instruction

    async def start(self, form: Mapping[str, str]) -> str:
        """Everything that can be refused is refused here; the rollout itself runs on in the background."""
        assert self._group is not None
        task = self._read_task(form)
        agent = agents.get(form.get("agent", ""))
        options = merge_options(_options(form))
        policy = form.get("policy", "")
        opens = agent.calls_model and (bool(policy) or options.base_url is None)
        opened = await open_policy(policy, store=self._store, model=options.model) if opens else None
        try:
            await learn_model(opened, agent)
            answering = choose(options, policy=opened, agent=agent)
        except BaseException:  # cancelled too: an unused policy is closed
            if opened is not None:
                await opened.aclose()
            raise
        rollout_id = new_id("ro")
        options = msgspec.structs.replace(
            options,
            base_url=None,  # the policy that it stands for is open
            mode=answering.mode,
            labels={"started": "page", **options.labels},
        )
        work = partial(
            run_rollout,
            task,
            agent=agent,
            policy=answering.policy,
            sandbox=form.get("sandbox") or "local",
            store=self._store,
            options=options,
            setup=_lines(form.get("setup", "")),
            verify=_lines(form.get("verify", "")),
            sink=self._keep,
            rollout_id=rollout_id,
        )
        # So that its page is there from the first moment
        begun = {"agent": agent.name, "mode": answering.mode, "command": self.command(form)}
        await self._store.event(Event(at=time.time(), name="rollout.asked", rollout_id=rollout_id, fields=begun))
        self._group.start_soon(self._run, rollout_id, work, answering.policy)
        return rollout_id

    async def _run(self, rollout_id: str, work: Callable[[], Awaitable[Rollout]], policy: Policy) -> None:
        with anyio.CancelScope() as scope:
            self._scopes[rollout_id] = scope
            try:
                await work()
            finally:
                del self._scopes[rollout_id]
                with anyio.move_on_after(5, shield=True):
                    await policy.aclose()

    async def _keep(self, event: Event) -> None:
        await self._store.event(event)

    async def cancel(self, rollout_id: str) -> bool:
        scope = self._scopes.get(rollout_id)
        if scope is None:
            return False
        scope.cancel()
        return True

    async def branch(self, rollout_id: str, form: Mapping[str, str]) -> None:
        """Go on from a call of a kept rollout, with the operator's answer where one is given. It is a run of its own."""
        assert self._group is not None, "enter the actions first"
        fields: dict[str, Any] = {"branch_how": form.get("how") or "auto", "attempts": int(form.get("n") or 1)}
        if form.get("answer", "").strip():
            fields["branch_answer"] = form["answer"].strip()
        if form.get("policy"):
            fields["policies"] = {POLICY: form["policy"]}
        config = await branch_config(self._store, rollout_id, form.get("at", ""), fields)
        check_policies(config)
        self._group.start_soon(self._carry_out, rollout_id, config)

    async def _carry_out(self, rollout_id: str, config: RunConfig) -> None:
        try:
            await carry_out(config, store=self._store)
        except Error as error:
            why = Event(at=time.time(), name="branch.refused", rollout_id=rollout_id, fields={"error": str(error)})
            await self._store.event(why)

    async def rescore(self, rollout_id: str) -> None:
        async for _ in rescore(self._store, rollout_id):
            pass


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _is_offered(option: Option) -> bool:
    """What reaches the machine itself is set on the machine, not from a browser."""
    return option.setter != "operator"


def _options(form: Mapping[str, str]) -> RolloutFields:
    """The options that the form gives; an empty field gives none."""
    given = {name: form[name] for name, one in OPTIONS.items() if _is_offered(one) and form.get(name, "").strip()}
    return read_options({n: _lines(text) if OPTIONS[n].kind == "lines" else text for n, text in given.items()})
