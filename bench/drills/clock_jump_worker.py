"""A worker of an existing run on a machine whose clock jumps: `python -m bench.drills.clock_jump_worker STORE RUN SECONDS`.

Only this process sees that time: what asks for it is given another answer before anything else is imported. By its clock every
lease of the others has run out.
"""

from __future__ import annotations

import asyncio
import sys
import time

JUMP_AFTER_S = 2.0
_real, _ahead = time.time, float(sys.argv.pop())
_jump_at = _real() + JUMP_AFTER_S
time.time = lambda: _real() + (_ahead if _real() > _jump_at else 0.0)

from rollyard import agents  # noqa: E402 - the clock comes first
from rollyard.runs.run.assignment import Assignment, select_tasks  # noqa: E402
from rollyard.runs.run.config import convert  # noqa: E402
from rollyard.runs.run.distant_worker import NodeAssignment, work_here  # noqa: E402
from rollyard.runs.run.shipping import Shipment  # noqa: E402
from rollyard.store import Store  # noqa: E402
from rollyard.tasks.taskset import Taskset  # noqa: E402


async def main(url: str, run_id: str) -> None:
    async with Store.open(url) as store:
        config = convert((await store.get_run(run_id)).config, run_id)
    tasks = {task.id: task for task in select_tasks(Taskset.load(config.tasks), config)}
    work = Assignment(run_id=run_id, config=config, tasks=tasks, agents={a: agents.get(a) for a in config.agents})
    await work_here(NodeAssignment(work=work, store=url, slots=4, shipment=Shipment()))


asyncio.run(main(sys.argv[1], sys.argv[2]))
