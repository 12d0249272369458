"""The whole of what an agent printed is kept and can be read: from Python, the command line, the page and a session."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import anyio
import pytest

import rollyard as ry
from rollyard.core.agent import Agent
from rollyard.core.task import Step, Task
from rollyard.page.app import page_app
from rollyard.runs.rollout.agent_log import AgentLog
from rollyard.testing.serve import serve_app

pytestmark = pytest.mark.anyio

TALKER = Agent(name="talker", argv=("/bin/sh", "-c", "seq 1 20000; echo last words >&2"))
NUMBERS = "".join(f"{n}\n" for n in range(1, 20001))


async def test_a_log_of_a_hundred_kilobytes_is_kept_whole_and_shown_everywhere(backend, tmp_path):
    where = str(tmp_path / "runs.db")
    async with ry.Store.open(where) as store:
        done = await ry.run_rollout("x", agent=TALKER, sandbox=backend, store=store)
        assert sorted(done.log.decode().splitlines()) == sorted([*NUMBERS.splitlines(), "last words"])
        assert len(done.log_tail) == 8192 and done.log.decode().endswith(done.log_tail)
        assert (await store.get_rollout(done.id)).log == done.log
        async with serve_app(page_app(store)) as url:
            page = await _get(f"{url}/rollouts/{done.id}")
            assert f"/rollouts/{done.id}/log" in page
            assert await _get(f"{url}/rollouts/{done.id}/log") == done.log.decode()
    shown = await _rollyard("show", done.id, "--log", "--store", where)
    assert shown == done.log.decode() + "\n"
    assert await _rollyard("show", done.id, "--part", "log", "--store", where) == shown
    assert "19999" in await _rollyard("show", done.id, "--store", where)


async def test_the_log_holds_every_step_of_a_task(backend):
    steps = tuple(Step(name=name, instruction=name) for name in ("one", "two"))
    agent = Agent(name="echo", argv=("/bin/echo", "asked for {instruction}"))
    done = await ry.run_rollout(Task(id="t", instruction="x", steps=steps), agent=agent, sandbox=backend)
    assert done.log == b"asked for one\nasked for two\n"


async def test_the_log_of_an_agent_that_was_cut_off_is_kept(backend):
    agent = Agent(name="slow", argv=("/bin/sh", "-c", "seq 1 20000; sleep 60"))
    done = await ry.run_rollout("x", agent=agent, sandbox=backend, limits=ry.Limits(agent=4))
    assert (done.status, done.log.decode()) == ("timeout", NUMBERS)


async def test_of_too_long_a_log_the_beginning_and_the_end_are_kept():
    log = AgentLog(head=10, tail=20)
    for number in range(100):
        log.add(f"{number:03}\n".encode())
    assert log.read() == b"000\n001\n00\n[370 bytes are left out here]\n095\n096\n097\n098\n099\n"
    assert log.end(8) == b"098\n099\n"
    short = AgentLog(head=10, tail=20)
    short.add(b"x" * 25)
    assert (short.read(), short.end(100)) == (b"x" * 25, b"x" * 25)


async def _rollyard(*words):
    command = [str(Path(sys.executable).with_name("rollyard")), *words]
    return (await anyio.run_process(command, stderr=subprocess.DEVNULL)).stdout.decode()


async def _get(url):
    return await anyio.to_thread.run_sync(lambda: urllib.request.urlopen(url, timeout=30).read().decode())
