"""A worker as a process of this machine: `python -m rollyard.runs.run.process_worker`, started by `ProcessExecutor`.

Its assignment comes on standard input, which then stays open: when it closes, the driver wants the worker to end, or is gone.
How it ended goes to standard output as JSON.
"""

from __future__ import annotations

import os
import pickle
import sys

import anyio
import msgspec
from msgspec.structs import replace

from rollyard.runs.run.distant_worker import NodeAssignment, WorkerEnd, work_to_the_end


def main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # whatever prints here is for people
    try:
        # From the process that started this one: its modules are meant.
        sys.path[:] = pickle.load(sys.stdin.buffer)  # noqa: S301
        posting = pickle.load(sys.stdin.buffer)  # noqa: S301
        slots, sharers = pickle.load(sys.stdin.buffer)  # noqa: S301
    except (AttributeError, ImportError) as error:
        ended = WorkerEnd(
            error=f"what the run was given is not to be found in another process: {error}",
            hint="define verifiers and hooks in a module that can be imported, not in the script itself",
            retry="configuration",
        )
    else:
        ended = anyio.run(_work, replace(posting, slots=slots, sharers=sharers))
    os.write(answer, msgspec.json.encode(ended))


async def _work(posting: NodeAssignment) -> WorkerEnd:
    ended = WorkerEnd()
    async with anyio.create_task_group() as group:
        group.start_soon(_leave_with_the_driver, group.cancel_scope)
        ended = await work_to_the_end(posting)
        group.cancel_scope.cancel()
    return ended


async def _leave_with_the_driver(scope: anyio.CancelScope) -> None:
    await anyio.wait_readable(0)
    scope.cancel()


if __name__ == "__main__":
    main()
