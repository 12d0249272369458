"""Workers that stand still or are killed, and a database that crashes: nothing is lost, nothing is kept under an old claim."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from sqlalchemy import text

import rollyard as ry
from rollyard.core.lease import Attempt
from rollyard.core.task import Task, VerifierSpec
from rollyard.runs import RunConfig
from rollyard.runs.run.executor import executor
from rollyard.runs.run.lease_keeper import LeaseKeeper
from tests.runs import executor_law as law
from tests.servers.postgres import PostgresServer
from tests.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LEASE_S = 2.0
SLEEPY = "steps:\n  - shell: sleep 3; echo hello > out.txt\n  - text: done\n"
SLOW_CHECK = "sleep 4; grep -q hello out.txt"
# of each attempt: whether its rollout is the only one, and of the claim that it ends with
KEPT = """SELECT a.task_id, a.state, (SELECT count(*) FROM rollouts r WHERE r.run_id = a.run_id AND r.task_id = a.task_id),
(SELECT r.fence = a.fence FROM rollouts r WHERE r.id = a.rollout_id) FROM attempts a WHERE a.run_id = :run ORDER BY 1"""


async def read(store, query, **values):
    return await store.database.read(lambda c: [tuple(row) for row in c.execute(text(query), values)])


async def check_kept_once(store, run_id, count):
    assert await read(store, KEPT, run=run_id) == sorted((f"t{n}", "done", 1, True) for n in range(count))
    assert await store.leases(run_id) == []
    assert await read(store, "SELECT rollout_id FROM sessions WHERE closed_at IS NULL") == []


def pid_of(owner):
    return int(owner.split("/")[1])


JUDGED = """SELECT a.owner FROM attempts a JOIN sessions s ON s.attempt_id = a.id AND s.fence = a.fence
WHERE a.run_id = :run AND a.state = 'leased' AND s.closed_at IS NOT NULL"""  # the agent has ended, the verifier is at work


async def stop_while_it_judges(store, run_id, chosen=lambda pid: True):
    """A process stands still, with rollouts that it would commit next, until others have taken over all that it holds."""

    async def find_judging():
        found.extend(pid for (owner,) in await read(store, JUDGED, run=run_id) if chosen(pid := pid_of(owner)))
        return found

    async def taken_over():
        fences = dict(await read(store, "SELECT id, fence FROM attempts WHERE run_id = :run", run=run_id))
        return all(fences[attempt] > fence for attempt, fence in held.items())

    found = []
    await until(find_judging, within=120)
    os.kill(found[0], signal.SIGSTOP)
    try:
        held = {
            lease.attempt.id: lease.fence for lease in await store.leases(run_id) if pid_of(lease.owner) == found[0]
        }
        assert held
        await until(taken_over, within=120)
    finally:
        os.kill(found[0], signal.SIGCONT)


async def test_a_worker_that_stood_still_commits_nothing_under_its_old_claims(tmp_path, store_url):
    (tmp_path / "script.yaml").write_text(law.HELLO)
    config = RunConfig(policies={"policy": f"scripted:{tmp_path}/script.yaml"}, lease_s=LEASE_S)
    given = {"config": config, "executor": executor("local", workers=3)}
    slowly = VerifierSpec(kind="commands", options={"commands": [SLOW_CHECK]})
    tasks = [Task(id=f"t{n}", instruction="x", verifier=slowly) for n in range(12)]
    async with ry.Store.open(store_url) as store:
        async with (
            ry.Run(tasks, agent="shell-agent", parallel=6, store=store, **given) as run,
            anyio.create_task_group() as group,
        ):
            group.start_soon(stop_while_it_judges, store, run.id)
            done = [rollout async for rollout in run]
        assert sorted(r.task.id for r in done) == sorted(f"t{n}" for n in range(12))
        assert {r.reward for r in done} == {1.0}
        assert max(attempt.tries for attempt in await store.attempts(run.id)) > 1
        await check_kept_once(store, run.id, 12)


async def owners(store, run_id, count):
    return len({lease.owner for lease in await store.leases(run_id)}) >= count


async def test_of_two_runners_on_one_store_the_one_that_stood_still_adds_nothing(tmp_path, store_url):
    (tmp_path / "script.yaml").write_text(law.HELLO)
    rows = [{"id": f"t{n}", "instruction": "x", "verify": [SLOW_CHECK]} for n in range(8)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = f'tasks = "tasks.jsonl"\nagents = ["shell-agent"]\nparallel = 2\nlease_s = {LEASE_S}\n'
    (tmp_path / "run.toml").write_text(settings + '[policies]\npolicy = "scripted:script.yaml"\n')

    def start(*what):
        command = [sys.executable, "-m", "rollyard", "run", *what, "--store", store_url, "--display", "none"]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    async with ry.Store.open(store_url) as store:
        runners = [start("run.toml")]
        try:
            await until(store.list_runs, within=120)
            (run,) = await store.list_runs()
            runners.append(start("--resume", run.id))
            await until(lambda: owners(store, run.id, 2), within=120)
            await stop_while_it_judges(store, run.id, lambda pid: pid == runners[0].pid)
            with anyio.fail_after(180):
                said = [(await anyio.to_thread.run_sync(runner.communicate))[1] for runner in runners]
            assert [runner.returncode for runner in runners] == [0, 0], said
        finally:
            for runner in runners:
                runner.kill()
        await check_kept_once(store, run.id, 8)


def worker_pids():
    """Of the workers that this process started."""
    found = set()
    for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        with suppress(OSError):
            if b"rollyard.runs.run.process_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(int(pid))
    return found


async def test_a_run_goes_on_though_one_of_its_workers_is_killed_whenever_it_starts(tmp_path):
    (tmp_path / "script.yaml").write_text("steps:\n  - shell: sleep 12; echo hello > out.txt\n  - text: done\n")
    config = RunConfig(policies={"policy": f"scripted:{tmp_path}/script.yaml"})
    given = {"config": config, "executor": executor("local", workers=2)}
    killed = set()
    async with ry.Store.open(tmp_path / "runs.db") as store:
        async with (
            ry.Run(law.tasks(4), agent="shell-agent", parallel=4, store=store, **given) as run,
            anyio.create_task_group() as group,
        ):

            async def kill_one():
                await until(worker_pids, within=60)
                spared = min(worker_pids())
                while len(killed) < 7:
                    for pid in worker_pids() - killed - {spared}:
                        os.kill(pid, signal.SIGKILL)
                        killed.add(pid)
                    await anyio.sleep(0.05)

            group.start_soon(kill_one)
            done = [rollout async for rollout in run]
        assert len(killed) == 7 and {r.reward for r in done} == {1.0}
        await check_kept_once(store, run.id, 4)


@pytest.fixture
def server():
    made = PostgresServer()
    yield made
    made.close()


async def crash(server):
    """SIGKILL of its first process, and a start once the others have noticed: until then the server refuses to."""

    async def started():
        try:
            await anyio.to_thread.run_sync(server.start)
        except subprocess.CalledProcessError:
            return False
        return True

    os.kill(server.pids()[0], signal.SIGKILL)
    await until(started, within=120)


async def test_heartbeats_go_on_after_a_crash_of_the_database(server):
    async with ry.Store.open(server.url) as store:
        await store.create_run({}, id="run1")
        await store.add_attempts("run1", [Attempt(id="a0", run_id="run1", task_id="t0", number=0)])
        lease = await store.claim("run1", owner="busy", ttl_s=LEASE_S)
        keeper = LeaseKeeper(
            store, "run1", LEASE_S, held=lambda: [lease], turned_at=anyio.current_time, lose=lambda gone: None
        )

        async def renewed_after(moment):
            return (await store.leases("run1"))[0].expires_at > moment

        async with anyio.create_task_group() as group:
            group.start_soon(keeper.run)
            for _ in range(2):
                before = (await store.leases("run1"))[0].expires_at
                await until(lambda before=before: renewed_after(before), within=60)
                await crash(server)
            before = (await store.leases("run1"))[0].expires_at
            await until(lambda: renewed_after(before), within=60)
            group.cancel_scope.cancel()


async def test_a_run_goes_through_a_crash_of_its_database_and_does_nothing_again(tmp_path, server):
    (tmp_path / "script.yaml").write_text(SLEEPY)
    config = RunConfig(policies={"policy": f"scripted:{tmp_path}/script.yaml"}, lease_s=LEASE_S)
    given = {"config": config, "executor": executor("local", workers=1)}
    async with ry.Store.open(server.url) as store:
        async with (
            ry.Run(law.tasks(6), agent="shell-agent", parallel=3, store=store, **given) as run,
            anyio.create_task_group() as group,
        ):

            async def crash_twice():
                for _ in range(2):
                    await until(lambda: store.leases(run.id), within=120)
                    await crash(server)

            group.start_soon(crash_twice)
            done = [rollout async for rollout in run]
        assert {r.reward for r in done} == {1.0}
        assert {attempt.tries for attempt in await store.attempts(run.id)} == {1}
        await check_kept_once(store, run.id, 6)
