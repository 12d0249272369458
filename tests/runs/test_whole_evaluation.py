"""A whole evaluation as a person starts it: 3 agents x 2 policies x 10 tasks x 4 attempts, killed half-way and resumed."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

import rollyard as ry

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
WHOLE = 3 * 2 * 10 * 4
CONFIG = """
tasks = "{tasks}"
agents = {agents}
attempts = 4
parallel = 8
[policies]
fixer = "scripted:fixer.yaml"
idle = "scripted:idle.yaml"
[prices.fixer]
prompt = 1.0
completion = 4.0
[prices.idle]
prompt = 0.5
completion = 2.0
"""
FIXER = """
steps:
  - shell: test ! -f /app/server.ini || sed -i -e 's/^port = 8080/port = 8443/' -e 's/^tls = off/tls = on/' /app/server.ini
  - text: done
"""
IDLE = """
steps:
  - text: I would rather not.
"""


async def start(folder, *more):
    command = [sys.executable, "-m", "rollyard", "eval", "eval.toml", "--store", "runs.db", "--display", "none", *more]
    return await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def half_way(store, process):
    """The run's id, once half of its attempts are done."""
    while process.returncode is None:
        for info in await store.list_runs():
            if info.rollouts >= WHOLE // 2:
                return info.id, info.rollouts
        await asyncio.sleep(0.2)
    raise AssertionError((await process.stderr.read()).decode()[-3000:])


@pytest.mark.parametrize("third", ["nop", pytest.param("pi", marks=pytest.mark.agent)])
async def test_three_agents_two_policies_ten_tasks_four_attempts_killed_and_resumed(tmp_path, third):
    agents = ("shell-agent", "oracle", third)
    (tmp_path / "eval.toml").write_text(CONFIG.format(tasks=ROOT / "examples" / "tasks", agents=json.dumps(agents)))
    (tmp_path / "fixer.yaml").write_text(FIXER)
    (tmp_path / "idle.yaml").write_text(IDLE)
    first = await start(tmp_path)
    async with ry.Store.open(tmp_path / "runs.db") as store:
        async with asyncio.timeout(1500):
            run_id, done = await half_way(store, first)
        first.send_signal(signal.SIGKILL)
        await first.wait()
        kept = {row.id for row in await store.lines(run_id)}
        assert done <= len(kept) < WHOLE
        second = await start(tmp_path, "--resume", run_id, "--json", "--out", "report")
        async with asyncio.timeout(1500):
            said, errors = await second.communicate()
        # 1: some rollouts failed, and the report names them
        assert second.returncode in (0, 1), errors.decode()[-2000:]
        rows = await store.lines(run_id)
        assert len(rows) == WHOLE
        assert kept <= {row.id for row in rows}
        cells = Counter((row.task_id, row.agent, row.policy, row.attempt) for row in rows)
        assert set(cells.values()) == {1}
        assert await store.leases(run_id) == []
        assert (await store.get_run(run_id)).finished
    report = json.loads(said)
    by_name = {line["name"]: line for line in report["lines"]}
    assert set(by_name) == {f"{agent} / {policy}" for agent in agents for policy in ("fixer", "idle")}
    assert {line["attempts"] for line in by_name.values()} == {40}
    assert by_name["oracle / fixer"]["reward"]["value"] == 1.0
    assert by_name[f"{third} / idle"]["reward"]["value"] == 0.0
    for agent in {"shell-agent", third} - {"nop"}:
        assert by_name[f"{agent} / fixer"]["reward"]["value"] > by_name[f"{agent} / idle"]["reward"]["value"]
        assert by_name[f"{agent} / fixer"]["cost"] > 0
    assert set(report["failures"]) == {"agent"}
    # One task needs an MCP client, which shell-agent has not
    assert set(report["failures"]["agent"]) == {"Unsupported"}
    assert by_name["shell-agent / idle"]["scored"] == 36
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
    async with ry.sandbox.backend("local") as backend:
        assert await backend.list({"rollyard.run": run_id}) == []
    print((tmp_path / "report" / "report.txt").read_text())
    print(f"killed with {len(kept)} of {WHOLE} kept; resumed to {len(rows)}")
