"""Agent Lightning 0.3: `CliLitAgent` for `Trainer.fit(agent, train_dataset=rows)`; a row has `task`.

The trainer's `LLM` resource (its `LLMProxy` records each call) is where the agent's calls go; the verdict is the reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollyard.core.errors import ConfigError
from rollyard.train.plugins.behind_gateway import run_behind
from rollyard.train.plugins.import_trainer import import_trainer

_lightning: Any = import_trainer("agentlightning")


class CliLitAgent(_lightning.LitAgent):  # pyright: ignore[reportUntypedBaseClass]
    """`resource` names the `LLM` where a trainer has several."""

    def __init__(self, agent: str, *, resource: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._agent, self._resource, self._options = agent, resource, options

    async def rollout_async(self, task: Any, resources: Mapping[str, Any], rollout: Any) -> float:
        llms = {name: one for name, one in resources.items() if isinstance(one, _lightning.LLM)}
        name = self._resource or (next(iter(llms)) if len(llms) == 1 else None)
        if name not in llms:
            raise ConfigError(f"which LLM? there are {', '.join(llms) or 'none'}", hint="resource= names it")
        llm = llms[name]
        attempt = getattr(rollout, "attempt", None)
        url = llm.get_base_url(rollout.rollout_id, attempt.attempt_id) if attempt is not None else llm.get_base_url()
        done = await run_behind(
            url, task.get("task"), agent=self._agent, model=llm.model, key=llm.api_key, options=self._options
        )
        assert done.reward is not None
        return done.reward
