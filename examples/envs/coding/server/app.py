"""The coding environment as an ASGI application, set up by environment variables.

ROLLYARD_ENV_KEY    the key that clients bear (`Authorization: Bearer ...`); without one, ROLLYARD_ENV_OPEN=1 must say that
                    every client that reaches the port may run agents here
ROLLYARD_AGENT      the agent of every rollout (shell-agent)
ROLLYARD_SANDBOX    the backend that its sandboxes are on (local); a hosted one has its key in a variable of its own,
                    such as E2B_API_KEY
ROLLYARD_BASE_URL   the model server that answers it, with ROLLYARD_MODEL and ROLLYARD_MODEL_KEY; without one, a step is one
                    model call, and the client that steps answers it
ROLLYARD_TASKS      where the tasks are (tasks.jsonl beside this package)
ROLLYARD_CAPACITY   environments at once (8)
"""

from __future__ import annotations

import html
import os
from pathlib import Path

from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rollyard.core.errors import ConfigError
from rollyard.envs.server import EnvServer
from rollyard.envs.sessions import EnvLimits
from rollyard.runs.coding_env import coding_env, splits_of, tasks_of
from rollyard.runs.coding_request import CodingOptions


def make() -> EnvServer:
    setting = os.environ.get
    key = setting("ROLLYARD_ENV_KEY") or None
    if key is None and setting("ROLLYARD_ENV_OPEN") != "1":
        raise ConfigError("no key is set for this environment", hint="set ROLLYARD_ENV_KEY, or ROLLYARD_ENV_OPEN=1")
    tasks = tasks_of(setting("ROLLYARD_TASKS") or str(Path(__file__).parents[1] / "tasks.jsonl"))
    base_url = setting("ROLLYARD_BASE_URL") or None
    options = CodingOptions(
        agent=setting("ROLLYARD_AGENT") or "shell-agent",
        sandbox=setting("ROLLYARD_SANDBOX") or "local",
        base_url=base_url,
        model=setting("ROLLYARD_MODEL") or None,
        key=setting("ROLLYARD_MODEL_KEY") or None,
    )
    return EnvServer(
        coding_env(options, tasks, step="call" if base_url is None else "rollout"),
        name="coding",
        key=key,
        splits=splits_of(tasks),
        limits=EnvLimits(capacity=int(setting("ROLLYARD_CAPACITY") or 8), deadline_s=1800.0),
    )


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Coding environment</title></head><body>
<h1>A coding agent as an environment</h1>
<p>Agent {agent}, sandboxes on {sandbox}, {tasks}. A key is {key}.</p>
<pre>from openenv.core import GenericEnvClient
with GenericEnvClient(base_url="URL OF THIS SPACE").sync() as env:
    print(env.reset())</pre>
<p><a href="/health">health</a></p>
</body></html>"""


class Space:
    """The environment, with a page at `/` and `/web` for those who visit the Space."""

    def __init__(self, env: ASGIApp) -> None:
        self._env = env

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and scope["path"] in ("/", "/web", "/web/"):
            await HTMLResponse(describe())(scope, receive, send)
        else:
            await self._env(scope, receive, send)


def describe() -> str:
    """How it is set up, and nothing that takes a key."""
    setting = os.environ.get
    words = {
        "agent": setting("ROLLYARD_AGENT") or "shell-agent",
        "sandbox": setting("ROLLYARD_SANDBOX") or "local",
        "tasks": "tasks of its own" if setting("ROLLYARD_TASKS") else "the tasks that came with it",
        "key": "needed" if setting("ROLLYARD_ENV_KEY") else "not needed",
    }
    return PAGE.format_map({name: html.escape(word) for name, word in words.items()})


app = Space(make())


def main() -> None:
    import uvicorn

    from rollyard.net.websocket_server import SocketProtocol

    uvicorn.run(
        app, host="0.0.0.0", port=int(os.environ.get("PORT", "8000")), ws=SocketProtocol, ws_max_size=100 * 2**20
    )


if __name__ == "__main__":
    main()
