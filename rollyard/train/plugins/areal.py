"""AReaL 1.0: `trainer.train(workflow="rollyard.train.plugins.areal.AgentWorkflow", workflow_kwargs={"gconfig": ...,
"url": ...})`.

A row of the dataset has `task`, the task's JSON. AReaL's own engine answers the agents' calls: the server has
`--policy queue#renderer=MODEL`. Every row of a rollout trains, each token with the version that sampled it; a rollout
that cannot be trained on is None, which AReaL counts as rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollyard.core.errors import ConfigError
from rollyard.train.adapters.areal import tensors
from rollyard.train.plugins.import_trainer import import_trainer
from rollyard.train.plugins.served_rollouts import Generation, HeldCall, ServedRollouts, one_by_one

_workflow: Any = import_trainer("areal.api.workflow_api")
_io: Any = import_trainer("areal.api.io_struct")
_data: Any = import_trainer("areal.utils.data")


class AgentWorkflow(_workflow.RolloutWorkflow):  # pyright: ignore[reportUntypedBaseClass]
    """`gconfig` are AReaL's generation hyperparameters; its `n_samples` is one here: AReaL asks for each member of a group."""

    def __init__(
        self, gconfig: Any, url: str | None = None, key: str | None = None, *, job: Mapping[str, Any] | None = None
    ) -> None:
        self._rollouts = ServedRollouts(url, key, job=job)
        self._gconfig = gconfig.new(n_samples=1)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        if not data.get("task"):
            raise ConfigError("the row has no task", hint="a column task with the task's JSON")

        async def sample(call: HeldCall) -> Generation:
            request = _io.ModelRequest(
                rid=call["session_id"], input_ids=list(call["prompt_ids"]), gconfig=self._gconfig.new()
            )
            made = await engine.agenerate(request)
            return Generation(made.output_tokens, made.output_logprobs, min(made.output_versions, default=None))

        rows = (await self._rollouts.group(data["task"], generate=one_by_one(sample))).rollouts[0]
        if not rows:
            return None
        torch: Any = import_trainer("torch")
        return _data.concat_padded_tensors(
            [{name: torch.tensor(value) for name, value in tensors(row).items()} for row in rows]
        )
