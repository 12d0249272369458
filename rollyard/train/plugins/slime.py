"""slime, and OpenClaw-RL, which is a fork of it: `--rollout-function-path rollyard.train.plugins.slime.generate_rollout`.

A prompt's metadata (`--metadata-key`) has `task`, the task's JSON. slime's own engines answer the agents' calls
through its router: the server has `--policy queue#renderer=MODEL`, and its URL is in ROLLYARD_ROLLOUTS_URL. Every row
of a rollout trains; rows of one rollout share `rollout_id`. A rollout that cannot be trained on is given back as
`aborted` and removed from the loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError, PolicyError
from rollyard.net.http_client import HttpPool
from rollyard.train.adapters.slime import row_sample
from rollyard.train.plugins.import_trainer import import_trainer
from rollyard.train.plugins.served_rollouts import (
    Generate,
    Generation,
    HeldCall,
    ServedGroup,
    ServedRollouts,
    one_by_one,
)

_Sample: Any = import_trainer("slime.utils.types").Sample
_base: Any = import_trainer("slime.rollout.base_types")
_ANSWER_S = 3600.0
_LONGEST = 2**28


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """What slime calls for each batch: groups of `n_samples_per_prompt` attempts."""
    if evaluation:
        raise ConfigError(
            "this function has no evaluation", hint="--eval-function-path names one, or run `rollyard run`"
        )
    groups = data_source.get_samples(args.rollout_batch_size)
    return _base.RolloutFnTrainOutput(samples=asyncio.run(_run(args, groups)))


async def _run(args: Any, groups: Sequence[Sequence[Any]]) -> list[list[Any]]:
    rollouts, pool = ServedRollouts(), HttpPool(connect_s=10.0, idle_s=5.0, max_body=_LONGEST)
    generate = engine_of(args, pool)
    try:
        made = await asyncio.gather(
            *(rollouts.group(_task(group[0]), attempts=len(group), generate=generate) for group in groups)
        )
    finally:
        await pool.aclose()
    return [_group(given, found) for given, found in zip(groups, made, strict=True)]


def _group(given: Sequence[Any], found: ServedGroup) -> list[Any]:
    """slime's samples of one prompt, each with the rows of its attempt."""
    out: list[Any] = []
    for sample, rows in zip(given, found.rollouts, strict=True):
        if not rows:
            sample.status, sample.remove_sample, sample.reward = _Sample.Status.ABORTED, True, 0.0
            sample.tokens, sample.response_length, sample.loss_mask = [0, 0], 1, [0]
            sample.rollout_log_probs = [0.0]
            out.append(sample)
            continue
        for row in rows:
            fields = row_sample(
                row, prompt=sample.prompt, group=sample.group_index, index=sample.index, rollout=sample.index
            )
            out.append(_Sample.from_dict({**fields, "metadata": {**sample.metadata, **fields["metadata"]}}))
    return out


def _task(sample: Any) -> Any:
    task = (sample.metadata or {}).get("task")
    if not task:
        raise ConfigError("a prompt has no task", hint="--metadata-key names a column with task, the task's JSON")
    return task


def engine_of(args: Any, pool: HttpPool) -> Generate:
    """SGLang behind slime's router, with the sampling of slime's own flags."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sampling = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }

    async def sample(call: HeldCall) -> Generation:
        body = {"input_ids": list(call["prompt_ids"]), "sampling_params": sampling, "return_logprob": True}
        headers = {"content-type": "application/json", "x-smg-routing-key": str(call["session_id"])}
        answer = await pool.exchange("POST", url, msgspec.json.encode(body), headers, _ANSWER_S)
        if answer.status != 200:
            raise PolicyError(f"{url} answered {answer.status}: {answer.body[:200].decode(errors='replace')}")
        meta: dict[str, Any] = msgspec.json.decode(answer.body)["meta_info"]
        sampled: list[Any] = meta["output_token_logprobs"]
        version = str(meta.get("weight_version", ""))
        return Generation(
            [one[1] for one in sampled], [one[0] for one in sampled], int(version) if version.isdecimal() else None
        )

    return one_by_one(sample)
