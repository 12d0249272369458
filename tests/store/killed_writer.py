"""Forks a writer per line of stdin: it commits calls as fast as it can and prints each one's number once that returned.

Forking from a process that has imported everything keeps fifty kills within seconds. Run by test_sigkill.py.
"""

import asyncio
import os
import sys

from rollyard.core.call import Call, Reply, floats, ids
from rollyard.core.message import Message, Text
from rollyard.store import Store
from rollyard.trajectory.trajectory import Trajectory


async def write(path, life):
    async with Store.open(path) as store:

        async def rollout(n):
            t = Trajectory(f"r{life}-{n}")
            messages = [Message("user", (Text("go"),))]
            prompt = [1]
            for turn in range(100_000):
                answer = Message("assistant", (Text(f"answer {turn}"),))
                call = Call(
                    id=f"{life}-{n}-{turn}",
                    rollout_id=t.rollout_id,
                    dialect="chat",
                    model="m",
                    messages=tuple(messages),
                    raw=b"body %d" % turn * 50,
                )
                reply = Reply(
                    message=answer, prompt_ids=ids(prompt), completion_ids=ids([turn]), logprobs=floats([-1.0])
                )
                added = t.add(call, reply)
                await store.commit(added.record, added.nodes, added.blobs)
                os.write(1, f"{t.rollout_id} {turn}\n".encode())
                if turn % 20 == 19:
                    messages, prompt = messages[:1], [1]
                else:
                    messages += [answer, Message("user", (Text(f"more {turn}"),))]
                    prompt = [*prompt, turn, 2]

        await asyncio.gather(*(rollout(n) for n in range(8)))


for line in sys.stdin:
    path, life = line.split()
    child = os.fork()
    if child == 0:
        asyncio.run(write(path, life))
    os.write(1, f"pid {child}\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"dead\n")
