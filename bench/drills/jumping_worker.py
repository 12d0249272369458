"""A worker of an existing run whose clock jumps: `python -m bench.drills.jumping_worker STORE RUN SECONDS`.

Its store is opened with a clock of its own, never the machine's. After a few claims that clock goes ahead, and in this
worker's eyes every lease of the others has run out.
"""

from __future__ import annotations

import asyncio
import sys
import time

from rollyard.runs.run.assignment import Assignment, select_tasks
from rollyard.runs.run.config import convert
from rollyard.runs.run.distant_worker import NodeAssignment, work_here
from rollyard.runs.run.shipping import Parcels
from rollyard.store import Store
from rollyard.tasks.taskset import Taskset

JUMP_AFTER_S = 2.0


async def main(url: str, run_id: str, seconds: float) -> None:
    from rollyard import agents

    async with Store.open(url) as store:
        config = convert((await store.get_run(run_id)).config, run_id)
    tasks = {task.id: task for task in select_tasks(Taskset.load(config.tasks), config)}
    work = Assignment(run_id=run_id, config=config, tasks=tasks, agents={a: agents.get(a) for a in config.agents})
    jump_at = time.time() + JUMP_AFTER_S

    def clock() -> float:
        now = time.time()
        return now + seconds if now > jump_at else now

    await work_here(NodeAssignment(work=work, store=url, slots=4, parcels=Parcels()), clock=clock)


asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
