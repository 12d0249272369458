"""Environments: the Gym API (`env.py`), a server for it and a client of it. Server and client never import each other, and
neither is imported before it is used: a rollout worker that only drives an environment pays for the client alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollyard.lazy import attach

if TYPE_CHECKING:
    from rollyard.core.remote_task import TaskConfig as TaskConfig
    from rollyard.envs.client import connect as connect
    from rollyard.envs.env import Env as Env
    from rollyard.envs.env import StepResult as StepResult
    from rollyard.envs.fleet.context_tools import ContextTools as ContextTools
    from rollyard.envs.fleet.task_env import TaskLimits as TaskLimits
    from rollyard.envs.server import EnvServer as EnvServer
else:
    __getattr__, __dir__ = attach(__name__)  # hidden from type checkers, to which a misspelt name is an error
