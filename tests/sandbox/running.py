"""Programs that a server on the loopback runs in a sandbox for its client."""

import asyncio


def begun(sandbox, cmd, **options):
    """A program as a task. Its client may leave and its sandbox may go at any time, and nobody is left to hear of it."""
    running = asyncio.ensure_future(sandbox.exec(cmd, max_output=64 * 2**20, **options))
    running.add_done_callback(lambda task: task.cancelled() or task.exception())
    return running


async def ran(sandbox, cmd, **options):
    running = begun(sandbox, cmd, **options)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.cancel()
        raise
