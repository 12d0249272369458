"""verl 0.9: an `AgentLoop` for `actor_rollout_ref.rollout.agent.agent_loop_config_path`, a YAML file of

    - name: rollyard
      _target_: rollyard.train.plugins.verl.AgentLoop
      url: http://runner:8800

and `default_agent_loop: rollyard`. A row of the dataset has its task in the column `task`, or in `extra_info`. verl's
own engine answers the agents' calls: the server has `--policy queue#renderer=MODEL`. With `rows: all` (and
`trainer.use_v1`, which alone takes a list) every row of a rollout trains, else its main one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from rollyard.core.errors import ConfigError
from rollyard.train.adapters.rows import main_row
from rollyard.train.adapters.verl import output
from rollyard.train.plugins.import_trainer import import_trainer
from rollyard.train.plugins.served_rollouts import Generation, HeldCall, ServedRollouts, one_by_one
from rollyard.trajectory.samples import Sample

_verl: Any = import_trainer("verl.experimental.agent_loop.agent_loop")


class AgentLoop(_verl.AgentLoopBase):  # pyright: ignore[reportUntypedBaseClass]
    def __init__(
        self,
        *args: Any,
        url: str | None = None,
        key: str | None = None,
        job: Mapping[str, Any] | None = None,
        rows: Literal["main", "all"] = "main",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if rows not in ("main", "all"):
            raise ConfigError(f"rows is main or all, got {rows!r}")
        self._rollouts = ServedRollouts(url, key, job=job)
        self._all = rows == "all"

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        task = row.get("task") or (row.get("extra_info") or {}).get("task")
        if not task:
            raise ConfigError("the row has no task", hint="a column task, or extra_info.task, with the task's JSON")

        generate = one_by_one(partial(self._sample, sampling_params))
        rows = (await self._rollouts.group(task, generate=generate)).only_rows()
        if not self._all:
            return self._output(main_row(rows))
        return [self._output(one) for one in rows]

    async def _sample(self, sampling_params: Mapping[str, Any], call: HeldCall) -> Generation:
        """Sampled as the trainer samples, whatever the agent asked for; calls of one rollout go to one engine."""
        params = {**sampling_params, "logprobs": True}
        prompt: list[int] = call["prompt_ids"]
        made = await self.server_manager.generate(call["session_id"], prompt_ids=prompt, sampling_params=params)
        return Generation(made.token_ids, made.log_probs, made.extra_fields.get("global_steps"))

    def _output(self, row: Sample) -> Any:
        """verl pads prompts to one length and answers to another: what is too long for them is cut, or refused."""
        fields = output(row)
        longest, room = self.rollout_config.prompt_length, self.rollout_config.response_length
        if len(fields["prompt_ids"]) > longest:
            raise ConfigError(
                f"a prompt of {len(fields['prompt_ids'])} tokens is longer than data.max_prompt_length={longest}",
                hint="the agent's system prompt and tools are in it: give it room",
            )
        for name in ("response_ids", "response_mask", "response_logprobs"):
            fields[name] = fields[name][:room]
        fields["extra_fields"] |= {"reward_extra_info": {}, "turn_scores": [], "tool_rewards": []}
        return _verl.AgentLoopOutput(**fields)
