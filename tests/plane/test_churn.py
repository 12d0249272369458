"""Two replicas on PostgreSQL under churn, killed again and again: nothing leaks, nothing is double, the quota is exact (P3, P10).

ROLLYARD_CHURN_S (60) is how long it churns, ROLLYARD_CHURN_INSTANCES (400) how many instances are made at most; ten minutes and
2,000 is what a release is held against.
"""

import asyncio
import json
import os
import random
import signal
import socket
import sys
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import Error
from rollyard.plane.engines.choose import engine
from rollyard.plane.storage.open import open_plane
from rollyard.plane.storage.sql import SqlPlane
from tests.plane.images import PLAIN_START, plain_image
from tests.plane.venvs import interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SECONDS = float(os.environ.get("ROLLYARD_CHURN_S", "60"))
MOST = int(os.environ.get("ROLLYARD_CHURN_INSTANCES", "400"))
QUOTA = 12  # of each owner, in the churn of vendors' SDKs
SDKS = {"e2b": ("e2b", "2.63.0"), "aenv": ("aenvironment", "0.1.7"), "rock": ("rl-rock", "1.11.0")}
HERE = Path(__file__).parent
WORLDS = HERE.parents[1] / "examples" / "worlds"
MAIN = "from rollyard.cli.main import main; main()"


class Replica:
    """A server on a port of its own, that can be killed and comes back there."""

    def __init__(self, url, folder, number, *options):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url, self._store, self._folder, self.number = f"http://127.0.0.1:{self.port}", url, folder, number
        self.process, self.options, self.env = None, options, {}

    async def start(self):
        command = [
            "serve",
            "plane",
            "--engine",
            "local,noop",
            "--port",
            str(self.port),
            "--sweep-s",
            "1",
            "--boot-s",
            "20",
        ]
        command += ["--admin-key-file", str(self._folder / "key"), "--log-level", "error", "--print-env"]
        command += self.options or ("--aenv", "off")
        with (self._folder / f"log{self.number}").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", MAIN, *command, stdout=asyncio.subprocess.PIPE, stderr=log,
                env={**os.environ, "ROLLYARD_STORE": self._store},
            )  # fmt: skip
        self.env = {}
        async with asyncio.timeout(120):
            while "ROLLYARD_KEY" not in self.env:  # the last one
                name, _, value = (await self.process.stdout.readline()).decode().strip().partition("=")
                assert name, (self._folder / f"log{self.number}").read_text()[-2000:]
                self.env[name] = value

    async def kill(self):
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


async def killing(replicas, ends):
    """One at a time, so that somebody always answers."""
    loop, kills = asyncio.get_running_loop(), 0
    while loop.time() < ends:
        await asyncio.sleep(random.uniform(2.0, 5.0))
        victim = random.choice(replicas)
        await victim.kill()
        kills += 1
        await victim.start()
    return kills


async def test_two_replicas_killed_during_a_churn_leave_nothing_behind(postgres_url, tmp_path):
    replicas = [Replica(postgres_url, tmp_path, number) for number in range(2)]
    await replicas[0].start()
    await replicas[1].start()
    key = (tmp_path / "key").read_text().strip()
    try:
        script, urls = str(Path(__file__).with_name("churn.py")), [replica.url for replica in replicas]
        clients = [
            await asyncio.create_subprocess_exec(
                sys.executable, script, str(SECONDS), name, engine_name, str(width), str(most), *urls,
                stdout=asyncio.subprocess.PIPE, env={**os.environ, "ROLLYARD_KEY": key}, cwd=Path(__file__).parents[2],
            )
            for name, engine_name, width, most in (("n", "noop", 8, MOST * 3 // 4), ("l", "local", 3, MOST // 4))
        ]  # fmt: skip
        counting = asyncio.create_task(quota_is_exact(postgres_url))
        kills = await killing(replicas, asyncio.get_running_loop().time() + SECONDS)
        async with asyncio.timeout(180):
            did = [json.loads((await client.communicate())[0].splitlines()[-1]) for client in clients]
        async with ry.plane.connect(urls[0], key) as plane:
            await nothing_double(plane)
            await all_gone(plane)
            assert (await plane.usage())["used"] == 0
        if counting.done():
            counting.result()
        counting.cancel()
    finally:
        for replica in replicas:
            await replica.kill()
    async with engine("local") as local:
        async with ry.Store.open(postgres_url) as store:
            name = await SqlPlane(store.database).agree("identity", "nobody")
            usage = await SqlPlane(store.database).usage("admin")
        assert await local.list(name) == []
    assert usage.used == 0
    assert sum(one.get("created", 0) for one in did) > 20 and kills >= 2, (did, kills)
    print(json.dumps({"kills": kills, "clients": did}))


@pytest.mark.parametrize("plane_url", ["postgres", "redis"], indirect=True)
async def test_four_vendors_sdks_at_once_on_two_replicas_that_are_killed(plane_url, tmp_path):
    """E2B's, Fleet's, AEnvironment's and ROCK's own packages, one process each, under one quota."""
    pythons = {kind: await asyncio.to_thread(interpreter, *sdk) for kind, sdk in SDKS.items()}
    pythons["fleet"] = sys.executable
    url, storage = plane_url, plane_url.partition(":")[0]
    image = await plain_image(HERE / "plain_project.py")
    pid = os.getpid()  # loopback has an address for each test process
    hosts = [f"127.{pid // 250 % 250 + 2}.{pid % 250 + 2}.{number}" for number in (1, 2)]
    shared = ("--worlds", str(WORLDS), "--quota", str(QUOTA))
    replicas = [Replica(url, tmp_path, number, "--aenv", host, *shared) for number, host in enumerate(hosts)]
    counting = None
    try:
        for replica in replicas:
            await replica.start()
        key = replicas[0].env["ROLLYARD_KEY"]
        async with ry.plane.connect(replicas[0].url, key) as plane:
            await plane.envs.create("weather", "1.0", owner="aenv", image=image, start=PLAIN_START)
        if storage == "postgresql":
            counting = asyncio.create_task(quota_is_exact(url, QUOTA))
        where = json.dumps([replica.env for replica in replicas])
        clients = {
            kind: await asyncio.create_subprocess_exec(
                python, str(HERE / "sdk_churn.py"), kind, str(SECONDS), "2", str(MOST // 4), where,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )
            for kind, python in pythons.items()
        }  # fmt: skip
        kills = await killing(replicas, asyncio.get_running_loop().time() + SECONDS)
        async with asyncio.timeout(180):
            did = {kind: json.loads((await one.communicate())[0].splitlines()[-1]) for kind, one in clients.items()}
        print(json.dumps({"storage": storage, "kills": kills, "clients": did}))
        async with ry.plane.connect(replicas[0].url, key) as plane:
            made = [one async for one in plane.instances.list(live="any")]
            named = [name for one in made if (name := one["labels"].get("key") or one["run_id"])]
            assert len(named) == len(set(named)), "one request made two instances"
            assert len(made) - len(named) <= did["rock"]["asked"]  # ROCK's requests carry no name of the caller's
            await all_gone(plane)
            owners = sorted({one["owner"] for one in made})
            assert [(await plane.usage(owner))["used"] for owner in owners] == [0] * len(owners)
        async with engine("local") as local, open_plane(url) as opened:
            await swept(local, await opened.records.agree("identity", "nobody"))
        if counting is not None:
            assert not counting.done(), counting.result()
    finally:
        if counting is not None:
            counting.cancel()
        for replica in replicas:
            if replica.process is not None:
                await replica.kill()
    assert kills >= 2 and all(one["used"] > 0 for one in did.values()), (did, kills)


async def quota_is_exact(url, most=10**9):
    """At any moment, in one look: as many live rows as are charged, and at most `most`. Raises when not."""
    import asyncpg

    database = await asyncpg.connect(url)
    live = "SELECT count(*) FROM plane_instances WHERE live AND owner = plane_owners.owner"
    try:
        while True:
            rows = await database.fetch(f"SELECT owner, used, ({live}) AS live FROM plane_owners")
            assert all(row["used"] == row["live"] <= most for row in rows), rows
            await asyncio.sleep(0.2)
    finally:
        await database.close()


async def nothing_double(plane):
    """A create that was sent again, to whichever replica, made nothing a second time."""
    keys = [one["labels"]["key"] async for one in plane.instances.list(live="any")]
    assert len(keys) == len(set(keys))


async def swept(local, plane):
    """What a killed server had made and not written down is found by the sweep of the others, in the engine's own list."""
    async with asyncio.timeout(120):
        while left := await local.list(plane):
            print("the engine still has", left)
            await asyncio.sleep(1.0)


async def all_gone(plane):
    """What is left is deleted by its owner or ended by the sweep; creations that died are settled in time."""
    async with asyncio.timeout(900):
        while True:
            left = [one async for one in plane.instances.list()]
            if not left:
                return
            for one in left:
                try:
                    await plane.instances.delete(one["id"])
                except Error:
                    pass
            await asyncio.sleep(1.0)
