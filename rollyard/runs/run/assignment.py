"""What a run's workers must know (`Assignment`), and who they are (`owner_name`). Plain values: they travel to other machines."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from rollyard.core.agent import Agent
from rollyard.core.protocols import Verifier
from rollyard.core.task import Task
from rollyard.runs.rollout.plan import Hooks
from rollyard.runs.run.config import RunConfig


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its workers see it. What is owed is in the store, under `run_id`; nothing of that is here. A task that is not
    here either is a body in the store, under its attempt's `task_digest`."""

    run_id: str
    config: RunConfig
    tasks: Mapping[str, Task]
    agents: Mapping[str, Agent]
    policies: tuple[str, ...] = ("",)  # as attempts name them; "" is the only one of a run
    verifier: Verifier | None = None
    hooks: Hooks = Hooks()
    stays: bool = False  # more attempts may come: workers wait for them until they are stopped

    @property
    def concurrency(self) -> Mapping[str, int]:
        """Bounds by the names that attempts have."""
        if self.policies == ("",):
            return (
                dict.fromkeys(self.policies, min(self.config.concurrency.values())) if self.config.concurrency else {}
            )
        return self.config.concurrency


def select_tasks(tasks: Iterable[Task], config: RunConfig) -> list[Task]:
    """The tasks that `filter` and `limit` leave, in the taskset's order."""
    kept = [t for t in tasks if not config.filter or any(fnmatchcase(t.id, pattern) for pattern in config.filter)]
    return kept[: config.limit] if config.limit is not None else kept


def needed_image(task: Task, config: RunConfig) -> str:
    """What a machine has to fetch or build before it can do this task, by a name that tasks with the same have in common;
    empty where there is nothing, or the same for all tasks."""
    if config.image is not None:
        return ""
    if task.image != "host":
        return task.image
    return "" if task.build is None else f"build:{task.build}"


def owner_name() -> str:
    """Who holds a lease: one worker, of which a process may have several. A later run on the same machine can see that this
    process is gone."""
    started = _start_time(os.getpid()) or "0"
    return f"{socket.gethostname()}/{os.getpid()}/{started}/{secrets.token_hex(4)}"


def owner_is_dead(owner: str) -> bool:
    """True only for an owner on this machine whose process no longer exists."""
    host, _, rest = owner.partition("/")
    pid, started, *_ = [*rest.split("/"), ""]
    return host == socket.gethostname() and pid.isdigit() and _start_time(int(pid)) != started


def _start_time(pid: int) -> str | None:
    """The kernel's start time of a process: pids come back, the pair does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return None
