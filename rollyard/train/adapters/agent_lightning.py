"""Agent Lightning 0.3: a `Triplet` per call that trains, in order; the reward stands on the last one of a rollout."""

from __future__ import annotations

from typing import Any

from rollyard.core.rollout import Rollout
from rollyard.gate.rollout_json import chat_messages
from rollyard.train.adapters.rows import TrainedCall, answers_of


def triplets(rollout: Rollout) -> list[dict[str, Any]]:
    """[] for a rollout without a reward: its store then has no triplet to train on."""
    if rollout.reward is None:
        return []
    answers = answers_of(rollout)
    return [_triplet(answer, rollout.reward if answer is answers[-1] else None) for answer in answers]


def _triplet(answer: TrainedCall, reward: float | None) -> dict[str, Any]:
    return {
        "prompt": {"token_ids": list(answer.prompt), "raw_content": chat_messages(answer.messages), "image_urls": []},
        "response": {"token_ids": list(answer.ids), "raw_content": chat_messages((answer.message,))},
        "reward": reward,
        "metadata": {
            "call_id": answer.record.id,
            "kind": answer.record.kind,
            "logprobs": list(answer.logprobs),
            "weight_version": answer.record.version_start,
        },
    }
