"""Runs in an environment with ART: its groups hold the rollouts of a server, with a `Choice` wherever a token trains."""

import asyncio
import sys

import art
from openai.types.chat.chat_completion import Choice

from rollyard.train.plugins.art import served_group
from rollyard.train.plugins.served_rollouts import ServedRollouts

(url,) = sys.argv[1:]
TASK = {"id": "hello", "instruction": "write hello to out.txt", "verify": ["test -f out.txt"]}


async def main():
    rollouts = ServedRollouts(url)
    return await served_group(rollouts, TASK, attempts=2), await served_group(
        rollouts, {"id": "none", "instruction": "say nothing"}, attempts=2
    )


group, unjudged = asyncio.run(main())
assert isinstance(group, art.TrajectoryGroup)
assert [one.reward for one in group.trajectories] == [1.0, 1.0]
for one in group.trajectories:
    choices = [item for item in one.messages_and_choices if isinstance(item, Choice)]
    assert len(choices) == 2 and all(part.token.startswith("token_id:") for part in choices[0].logprobs.content)
assert not unjudged.trajectories and len(unjudged.exceptions) == 2
print("ok")
