"""One client process of the churn: creates, beats, looks at and deletes instances on whichever replica answers, until its time is
over. `python churn.py SECONDS NAME ENGINE WIDTH MOST URL...`; the key is in ROLLYARD_KEY. Prints what it did as JSON."""

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter

import rollyard as ry
from rollyard.core.errors import Error


async def one(planes, name, engine, ends, did, most):
    key = 0
    while time.monotonic() < ends and did["created"] < most:
        key += 1
        asked = {
            "image": "host",
            "engine": engine,
            "ttl_s": random.choice([3.0, 60.0]),
            "labels": {"key": f"{name}-{key}"},
        }
        made, tries = None, 0
        while made is None and time.monotonic() < ends:
            tries += 1
            try:  # the same key on another replica: one that died in the middle must not make a second
                made = await random.choice(planes).instances.create(idempotency_key=f"{name}-{key}", **asked)
            except Error as error:
                did[type(error).__name__] += 1
                await asyncio.sleep(0.05)
        if made is None:
            return
        did["created"] += 1
        did["retried"] += tries > 1
        try:
            await random.choice(planes).instances.heartbeat(made["id"])
            if random.random() < 0.5:
                await random.choice(planes).instances.delete(made["id"])
                did["deleted"] += 1
        except Error as error:
            did[type(error).__name__] += 1


async def main(seconds, name, engine, width, most, *urls):
    did = Counter()
    planes = [ry.plane.connect(url, os.environ["ROLLYARD_KEY"], timeout_s=20) for url in urls]
    ends = time.monotonic() + float(seconds)
    try:
        await asyncio.gather(*(one(planes, f"{name}-{n}", engine, ends, did, int(most)) for n in range(int(width))))
    finally:
        for plane in planes:
            await plane.aclose()
    print(json.dumps(did))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
