"""`rollyard run` with 16 rollouts at a time, killed in each stage and resumed: nothing lost, nothing twice, nothing left (S4)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import anyio
import pytest

import rollyard as ry

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ATTEMPTS, TASKS = 4, 8
SCRIPT = "steps:\n  - shell: sleep 0.4; echo hello > out.txt\n  - text: done\n"
# what is seen on the display, and how often, when the runner is killed
MOMENTS = {
    "boot": ("provision", 3),
    "install and setup": ("prepare", 4),
    "agent": ("wait", 5),
    "verify": ("verify", 2),
    "commit": ("rollout", 1),
}


async def start(tmp_path, *what):
    program = str(Path(sys.executable).with_name("rollyard"))
    options = ["--store", "runs.db", "--display", "json"]
    return await asyncio.create_subprocess_exec(
        program, "run", *what, *options, cwd=tmp_path, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
        limit=2**24,
    )  # fmt: skip


async def seen(process, run):
    """Lines of the display as (kind, stage)."""
    while line := await process.stderr.readline():
        if not line.startswith(b"{"):
            continue
        told = json.loads(line)
        if "run" in told:
            run.append(told["run"])
        elif "rollout" in told:
            yield "rollout"
        elif told["event"]["name"] == "stage.started":
            yield told["event"]["fields"]["stage"]


@pytest.mark.parametrize("moments", [tuple(MOMENTS)], ids=["every stage"])
async def test_a_run_killed_in_every_stage_is_resumed_with_nothing_lost_twice_or_left(tmp_path, backend, moments):
    rows = [
        {"id": f"t{n}", "instruction": "x", "setup": ["sleep 0.2"], "verify": ["sleep 0.2; grep -q hello out.txt"]}
        for n in range(TASKS)
    ]
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    (tmp_path / "script.yaml").write_text(SCRIPT)
    asked = ["tasks.jsonl", "--agent", "shell-agent", "--policy", "scripted:script.yaml", "--attempts", str(ATTEMPTS)]
    asked += ["--parallel", "16", "--retries", "3"]
    run = []
    for moment in moments:
        stage, count = MOMENTS[moment]
        process = await start(tmp_path, *(["--resume", run[0]] if run else asked))
        with anyio.fail_after(180):
            times = Counter()
            async for happened in seen(process, run):
                times[happened] += 1
                if times[stage] >= count:
                    break
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            while await backend.list({"rollyard.run": run[0]}):  # they die with their owner, by themselves
                await anyio.sleep(0.1)
        assert times[stage] >= count, f"the run ended before {moment}"
    process = await start(tmp_path, "--resume", run[0])
    with anyio.fail_after(240):
        [happened async for happened in seen(process, run)]
        assert await process.wait() == 0
    async with ry.Store.open(tmp_path / "runs.db") as store:
        done = [(r.task.id, r.attempt, r.reward) async for r in store.rollouts(run[0])]
        assert sorted(done) == [(f"t{n}", a, 1.0) for n in range(TASKS) for a in range(ATTEMPTS)]
        assert await store.progress(run[0]) == {"done": TASKS * ATTEMPTS}
        assert await store.leases(run[0]) == []
    assert await backend.list({"rollyard.run": run[0]}) == []
