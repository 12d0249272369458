"""Environments: the Gym face (`env.py`), a server for it and a client of it. Server and client never import each other, and
neither is imported before it is used: a rollout worker that only drives an environment pays for the client alone."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard.envs.client import connect as connect
    from rollyard.envs.env import Env as Env
    from rollyard.envs.env import StepResult as StepResult
    from rollyard.envs.fleet.context_tools import ContextTools as ContextTools
    from rollyard.envs.fleet.task_config import TaskConfig as TaskConfig
    from rollyard.envs.fleet.task_env import TaskLimits as TaskLimits
    from rollyard.envs.server import EnvServer as EnvServer

_NAMES = {
    "connect": "rollyard.envs.client",
    "ContextTools": "rollyard.envs.fleet.context_tools",
    "Env": "rollyard.envs.env",
    "StepResult": "rollyard.envs.env",
    "EnvServer": "rollyard.envs.server",
    "TaskConfig": "rollyard.envs.fleet.task_config",
    "TaskLimits": "rollyard.envs.fleet.task_env",
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'rollyard.envs' has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_NAMES)
