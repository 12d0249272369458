"""OpenRLHF 0.11: `--train.agent_func_path .../rollyard/train/plugins/openrlhf.py` (`python -m
rollyard.train.plugins.openrlhf` prints it).

The dataset's label (`--data.label_key`) is the task's JSON. The vLLM engine that runs the executor answers the
agents' calls: the server has `--policy queue#renderer=MODEL`, and its URL is in ROLLYARD_ROLLOUTS_URL. One row of
each rollout trains. OpenRLHF has no way to leave a sample out: a rollout without a verdict raises, and its batch with
it, sooner than count as a zero.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from rollyard.core.errors import PolicyError
from rollyard.train.adapters.openrlhf import row_execution
from rollyard.train.adapters.rows import main_row
from rollyard.train.plugins.import_trainer import import_trainer
from rollyard.train.plugins.served_rollouts import Generation, HeldCall, ServedRollouts, one_by_one

_agent: Any = import_trainer("openrlhf.utils.agent")


class AgentExecutor(_agent.AgentExecutorBase):  # pyright: ignore[reportUntypedBaseClass]
    def __init__(self) -> None:
        self._rollouts = ServedRollouts()

    async def execute(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        async def sample(call: HeldCall) -> Generation:
            ids: list[int] = list(call["prompt_ids"])
            params = deepcopy(sampling_params)
            params.logprobs, params.max_tokens = 1, max(1, max_length - len(ids))
            made = (await llm_engine.generate(ids, params)).outputs[0]
            if made.logprobs is None:
                raise PolicyError("the engine gave no logprobs")
            chosen = zip(made.token_ids, made.logprobs, strict=True)
            return Generation(list(made.token_ids), [by_id[one].logprob for one, by_id in chosen])

        rows = (await self._rollouts.group(label, generate=one_by_one(sample))).only_rows()
        return row_execution(main_row(rows), prompt=prompt, label=label)


if __name__ == "__main__":
    print(__file__)
