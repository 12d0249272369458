"""One client process of the churn of vendors' SDKs, run by a Python that has the SDK: makes, uses and ends what its API calls an
instance, at whichever replica answers. `python sdk_churn.py KIND SECONDS WIDTH MOST REPLICAS`; REPLICAS is a JSON list with each
replica's printed variables. Prints what it did as JSON."""

import asyncio
import json
import logging
import random
import sys
import threading
import time
from collections import Counter

logging.disable(logging.CRITICAL)
TTL_S = 60


def use_e2b(replica, key, keep):
    from e2b import Sandbox

    where = {
        "api_key": replica["E2B_API_KEY"],
        "api_url": replica["E2B_API_URL"],
        "sandbox_url": replica["E2B_API_URL"],
    }
    box = Sandbox.create(timeout=TTL_S, metadata={"key": key}, **where)
    yield box.sandbox_id
    assert box.commands.run("echo $((40 + 2))").stdout == "42\n"
    if not keep:
        box.kill()


def use_fleet(replica, key, keep):
    from fleet import Fleet

    made = Fleet(api_key=replica["FLEET_API_KEY"], base_url=replica["FLEET_BASE_URL"], max_retries=0).make(
        "tickets", ttl_seconds=TTL_S, run_id=key
    )
    yield made.instance_id
    made.instance.load()
    assert made.db("current").query("SELECT count(*) FROM tickets").rows == [[5]]
    if not keep:
        made.close()


def use_aenv(replica, key, keep):
    from aenv import Environment

    env = Environment(
        "weather@1.0",
        ttl=f"{TTL_S}s",
        aenv_url=replica["AENV_SYSTEM_URL"],
        labels={"key": key},
        max_retries=0,
        timeout=20,
    )
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(env.initialize())
        yield None
        said = loop.run_until_complete(env.call_tool("weather@1.0/get_weather", {"city": "Oslo"}))
        assert json.loads(said.content[0]["text"])["city"] == "Oslo"
        if not keep:
            loop.run_until_complete(env.release())
    finally:
        loop.close()


def use_rock(replica, key, keep):
    from rock.actions import Command
    from rock.sdk.sandbox.client import Sandbox
    from rock.sdk.sandbox.config import SandboxConfig

    where = replica["ROCK_BASE_URL"]
    limits = {"memory": "256m", "cpus": 1, "disk": "1g"}
    config = SandboxConfig(base_url=where, image="host", auto_clear_seconds=TTL_S, startup_timeout=30, **limits)
    box, loop = Sandbox(config), asyncio.new_event_loop()
    try:
        loop.run_until_complete(box.start())
        yield box.sandbox_id
        assert loop.run_until_complete(box.execute(Command(command=["echo", "42"]))).stdout == "42\n"
        if not keep:
            loop.run_until_complete(box.stop())
    finally:
        loop.close()


USES = {"e2b": use_e2b, "fleet": use_fleet, "aenv": use_aenv, "rock": use_rock}


def churn(kind, name, replicas, ends, most, did):
    number = 0
    while time.monotonic() < ends and did["asked"] < most:
        number += 1
        did["asked"] += 1
        try:
            for _ in USES[kind](random.choice(replicas), f"{kind}-{name}-{number}", random.random() < 0.3):
                did["made"] += 1
            did["used"] += 1
        except Exception as error:  # noqa: BLE001 - a killed replica and a full quota are what the churn is about
            did[type(error).__name__] += 1
            time.sleep(0.05)


def main(kind, seconds, width, most, replicas):
    did, ends = Counter(asked=0, made=0, used=0), time.monotonic() + float(seconds)
    work = [
        threading.Thread(target=churn, args=(kind, n, json.loads(replicas), ends, int(most), did), daemon=True)
        for n in range(int(width))
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join(float(seconds) + 120)
    print(json.dumps(did), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
