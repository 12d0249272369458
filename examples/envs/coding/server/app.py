"""The coding environment as an ASGI application, set up by environment variables.

ROLLYARD_ENV_KEY    the key that clients bear (`Authorization: Bearer ...`); without one, ROLLYARD_ENV_OPEN=1 must say that
                    anybody who reaches the port may run agents here
ROLLYARD_AGENT      the agent of every rollout (shell-agent)
ROLLYARD_BASE_URL   the model server that answers it, with ROLLYARD_MODEL and ROLLYARD_MODEL_KEY; without one, a step is one
                    model call, and whoever steps answers it
ROLLYARD_TASKS      where the tasks are (tasks.jsonl beside this package)
ROLLYARD_CAPACITY   environments at once (8)
"""

from __future__ import annotations

import os
from pathlib import Path

from rollyard.core.errors import ConfigError
from rollyard.envs.server import EnvServer
from rollyard.envs.sessions import EnvLimits
from rollyard.runs.coding_env import coding_env, splits_of, tasks_of
from rollyard.runs.coding_request import CodingOptions


def make() -> EnvServer:
    asked = os.environ.get
    key = asked("ROLLYARD_ENV_KEY") or None
    if key is None and asked("ROLLYARD_ENV_OPEN") != "1":
        raise ConfigError("nobody has a key to this environment", hint="set ROLLYARD_ENV_KEY, or ROLLYARD_ENV_OPEN=1")
    tasks = tasks_of(asked("ROLLYARD_TASKS") or str(Path(__file__).parents[1] / "tasks.jsonl"))
    base_url = asked("ROLLYARD_BASE_URL") or None
    options = CodingOptions(
        agent=asked("ROLLYARD_AGENT") or "shell-agent",
        base_url=base_url,
        model=asked("ROLLYARD_MODEL") or None,
        key=asked("ROLLYARD_MODEL_KEY") or None,
    )
    return EnvServer(
        coding_env(options, tasks, step="call" if base_url is None else "rollout"),
        name="coding",
        key=key,
        splits=splits_of(tasks),
        limits=EnvLimits(capacity=int(asked("ROLLYARD_CAPACITY") or 8), deadline_s=1800.0),
    )


app = make()


def main() -> None:
    import uvicorn

    from rollyard.net.websocket_server import SocketProtocol

    uvicorn.run(
        app, host="0.0.0.0", port=int(os.environ.get("PORT", "8000")), ws=SocketProtocol, ws_max_size=100 * 2**20
    )


if __name__ == "__main__":
    main()
