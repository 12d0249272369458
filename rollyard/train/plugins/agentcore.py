"""AWS AgentCore RL Toolkit 0.2: the entry point of an agent container, `app.rollout_entrypoint(entrypoint("opencode"))`.

The toolkit's trainers (verl, slime, Tinker) send `{"task": ..., "_rollout": {"base_url", "model_id", ...}}`; its
gateway at `base_url` records the calls. What comes back has the reward in `rewards`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rollyard.core.errors import ConfigError
from rollyard.train.plugins.behind_gateway import run_behind

Entrypoint = Callable[[dict[str, Any], Any], Awaitable[dict[str, Any]]]


def entrypoint(agent: str, options: Mapping[str, Any] | None = None) -> Entrypoint:
    async def rollout(payload: dict[str, Any], context: Any) -> dict[str, Any]:
        settings: Mapping[str, Any] = payload.get("_rollout") or {}
        if not settings.get("base_url"):
            raise ConfigError("the payload names no gateway", hint="_rollout.base_url is the toolkit's gateway")
        key, model = settings.get("api_key"), str(settings.get("model_id") or "policy")
        task = payload.get("task")
        done = await run_behind(settings["base_url"], task, agent=agent, model=model, key=key, options=options)
        return {"rewards": [done.reward], "rollout_id": done.id, "stop_reason": done.stop_reason or "end_turn"}

    return rollout
