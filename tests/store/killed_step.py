"""Prunes or exports as the verbs do, and stops inside every transaction of the one kind, or read of the other: it prints a line
and goes on when it is sent one. Run by test_killed_verbs.py, which kills it there.
"""

import asyncio
import os
import sys
import time

from rollyard.store import Store
from rollyard.store.exports import export
from rollyard.store.prune import prune


def stopping(work):
    def stopped(connection):
        result = work(connection)
        os.write(1, b"inside\n")
        if not os.read(0, 1):
            os._exit(1)
        return result

    return stopped


async def main(verb, where, out=""):
    async with Store.open(where, create=False) as store:
        database = store.database
        write, read = database.write, database.read
        if verb == "prune":
            database.write = lambda work: write(stopping(work))
            done = await prune(store, before=time.time() - 86400)
        else:
            database.read = lambda work: read(stopping(work))
            done = await export(store, "run_old", out)
    print(done, flush=True)


asyncio.run(main(*sys.argv[1:]))
