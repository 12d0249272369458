"""`create_app` in the place of OpenEnv's: an environment's own `server/app.py` changes one import and is served by us.

    from rollyard.envs.openenv_app import create_app    # was: openenv.core.env_server

It gives an ASGI application, which uvicorn runs as it ran theirs. Their web page (`gradio_builder` and the names of its tabs)
is no part of it: such arguments are refused by name. `mode`, or `OPENENV_MODE`, is `simulation` or `production`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rollyard.core.errors import ConfigError
from rollyard.envs.openenv_env import adopt
from rollyard.envs.server import EnvServer
from rollyard.envs.sessions import EnvLimits

MODES = ("simulation", "production")


def create_app(
    env: Callable[[], Any],
    action_cls: type[Any],
    observation_cls: type[Any],
    env_name: str | None = None,
    max_concurrent_envs: int | None = None,
    concurrency_config: Any = None,
    *,
    state_cls: type[Any] | None = None,
    mode: str | None = None,
    key: str | None = None,
) -> EnvServer:
    """Of a `concurrency_config`, `session_timeout` is how long a session without a client lives; one that is held is never
    taken away here. Without either one session lives at a time, as there. `key` is ours: callers must send it. Without one
    any client that reaches the port can step, as there."""
    if max_concurrent_envs is not None and concurrency_config is not None:
        raise ConfigError("max_concurrent_envs or concurrency_config, not both")
    chosen = str(getattr(mode, "value", mode) or os.environ.get("OPENENV_MODE") or "simulation").lower()
    if chosen not in MODES:
        raise ConfigError(f"unknown mode {chosen!r}", hint=f"one of {', '.join(MODES)}")
    most, timeout = max_concurrent_envs or 1, None
    if concurrency_config is not None:
        most, timeout = concurrency_config.max_concurrent_envs, concurrency_config.session_timeout
    made = adopt(env, action_cls, observation_cls, max_sessions=most)
    if state_cls is not None:
        made.schemas = {**made.schemas, "state": state_cls.model_json_schema()}
    kept = {} if timeout is None else {"lease_s": timeout, "max_lease_s": max(timeout, EnvLimits().max_lease_s)}
    limits = EnvLimits(capacity=most, **kept)
    return EnvServer(made, name=env_name, limits=limits, production=chosen == "production", key=key)
