"""Runs in an environment with ART: its `Trajectory` sees a `Choice` with logprobs wherever we mean to train, and only there."""

import json
import sys
from pathlib import Path

import art
from openai.types.chat.chat_completion import Choice

from rollyard.train.adapters.art import trajectories

sys.path.insert(0, str(Path(sys.argv[1]).parent))  # one of ART's packages brings a `tests` of its own
from rollouts import branchy, linear


def choices(history):
    return [
        [[int(part.token.removeprefix("token_id:")), part.logprob] for part in item.logprobs.content]
        for item in history
        if isinstance(item, Choice)
    ]


made = []
for rollout in (linear(), branchy()):
    (fields,) = trajectories([rollout], choice=Choice.model_validate)
    trajectory = art.Trajectory(**fields)
    histories = [trajectory, *trajectory.additional_histories]
    made.append(
        {
            "reward": trajectory.reward,
            "choices": [choices(history.messages_and_choices) for history in histories],
            "roles": [[message["role"] for message in history.messages()] for history in histories],
        }
    )
print(json.dumps(made))
