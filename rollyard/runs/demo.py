"""The shortest look at the whole: a task from a template, an agent in a local sandbox, each step told as it happens.

Without a model server the answers come from a script, so nothing outside this machine is needed."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from rollyard import agents
from rollyard.core.events import Event
from rollyard.core.limits import Limits
from rollyard.core.printable import printable
from rollyard.core.rollout import Rollout
from rollyard.core.scratch import scratch
from rollyard.runs.display.progress import SilentDisplay
from rollyard.runs.rollout.install_progress import INSTALLS
from rollyard.runs.run.command import store_option
from rollyard.runs.run.run_tasks import run
from rollyard.tasks.scaffold import new_script, new_task
from rollyard.tasks.taskset import Taskset

Say = Callable[[str], None]
_LIMITS = Limits(agent=240, install=900)


class _Narrator(SilentDisplay):
    """Says in a line each what an agent does."""

    def __init__(self, say: Say) -> None:
        self.run_id, self._say, self._began = "", say, time.monotonic()

    async def event(self, event: Event) -> None:
        if line := _line(event):
            self._say(f"{time.monotonic() - self._began:6.1f} s  {line}")


async def run_demo(
    agent: str, base_url: str | None, model: str | None, key_env: str | None, store: str, say: Say
) -> Rollout:
    """One rollout, kept in `store`; lines for people go to `say`."""
    agents.get(agent)  # an unknown one is reported before the task is
    with scratch("demo") as folder:
        (task,) = Taskset.load(new_task(folder / "hello"))
        say(f"The task: {task.instruction.strip()}")
        say(
            f"{agent} works on it in a sandbox without a network; {_describe_model(base_url)} answers its model calls.\n"
        )
        policy = f"scripted:{new_script(folder / 'script.yaml')}" if base_url is None else None
        (done,) = await run(
            task, agent=agent, policy=policy, base_url=base_url, model=model, key_env=key_env, store=store,
            progress=_Narrator(say), name="demo", limits=_LIMITS, max_calls=12, retries=0,
        )  # fmt: skip
    _conclude(done, store, say)
    return done


def _describe_model(base_url: str | None) -> str:
    return "a script" if base_url is None else f"the model server at {base_url}"


def _line(event: Event) -> str:
    fields = event.fields
    if event.name == "sandbox.opened":
        return f"sandbox open: {fields['backend']}, isolation {fields['isolation']}"
    if event.name == "agent.tool_call":
        return printable(f"the agent runs {fields.get('tool')}: {_describe_arguments(fields):.100}")
    if event.name == INSTALLS and not fields["megabytes"]:
        return printable(f"the agent is installed, once: {fields['packages']}")
    if event.name == INSTALLS:
        return f"{fields['megabytes']:g} MB of it are there"
    if event.name == "stage.started" and fields["stage"] == "verify":
        return "the agent is ended; a test judges what it left, in another sandbox"
    return ""


def _describe_arguments(fields: Mapping[str, Any]) -> str:
    """What a tool was asked for: its command, or all of its arguments."""
    asked = (fields.get("fields") or {}).get("arguments") or fields.get("fields") or fields.get("text", "")
    if isinstance(asked, str):
        with contextlib.suppress(ValueError):
            asked = json.loads(asked)
    if isinstance(asked, Mapping):
        return " ".join(str(asked.get("command") or asked.get("cmd") or dict(asked)).split())
    return str(asked)


def _conclude(done: Rollout, store: str, say: Say) -> None:
    reward = "no reward" if done.reward is None else f"reward {done.reward:g}"
    say(f"\n{done.status}, {reward}, {done.calls} model calls, {done.wall_s:.1f} s")
    if done.trajectory is not None and done.trajectory.branches:
        trained = sum(branch.trained for branch in done.trajectory.branches)
        say(f"{trained} sampled tokens to train on, exactly as they were sampled")
    if done.diff:
        say(printable(f"\n{done.diff.rstrip()}"))
    if done.failure is not None:
        say(printable(f"failed at {done.failure.boundary} in {done.failure.stage}: {done.failure.message}"))
        if done.failure.cause == "AgentInstallFailed":
            say("an agent that needs no installation: rollyard demo --agent shell-agent")
    else:
        say(f"\nnow look:  rollyard view{store_option(store).replace(' --store', '')}")
        say("your own:  rollyard init task hello")
    say(f"in words:  rollyard {'why' if done.failure else 'show'} {done.id}{store_option(store)}")
