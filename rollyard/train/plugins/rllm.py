"""rLLM: `CliAgentFlow` is an `AgentFlow`, and `verdict` its evaluator.

    AgentTrainer(..., agent_flow=CliAgentFlow("opencode"), evaluator=verdict)

rLLM's gateway gives each rollout a session of its own and fills the steps from what passed there. A task's metadata
has `task`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollyard.train.plugins.behind_gateway import run_behind
from rollyard.train.plugins.import_trainer import import_trainer

_types: Any = import_trainer("rllm.types")


class CliAgentFlow:
    def __init__(self, agent: str, options: Mapping[str, Any] | None = None) -> None:
        self._agent, self._options = agent, options

    async def arun(self, task: Any, config: Any) -> Any:
        row = getattr(task, "metadata", task)
        rollout = await run_behind(
            config.base_url, row.get("task"), agent=self._agent, model=config.model, options=self._options
        )
        assert rollout.reward is not None
        made = _types.Trajectory(name=self._agent, steps=[], reward=rollout.reward)
        return _types.Episode(
            task=row, trajectories=[made], is_correct=rollout.reward > 0, metadata={"rollout_id": rollout.id}
        )


class VerdictEvaluator:
    """The verifier has spoken already: what it said is the reward."""

    def evaluate(self, task: Any, episode: Any) -> Any:
        reward = float(episode.trajectories[0].reward)
        return import_trainer("rllm.eval.types").EvalOutput(reward=reward, is_correct=reward > 0)


verdict = VerdictEvaluator()
