"""Prunes, exports, backs up, restores or copies as the verbs do, and stops inside every transaction, or read of an export, or
while it makes a file: it prints a line and goes on when it is sent one. Run by `killed_process.py`, which kills it there.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from rollyard.store import Store, sqlite_file
from rollyard.store import copy as copies
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


async def copy(source, target):
    open_database = copies.open_database

    def opened(*args, **options):
        database = open_database(*args, **options)
        write = database.write
        database.write = lambda work: write(stopping(work))
        return database

    copies.open_database = opened
    print(await copies.copy_store(source, target, at_once=5), flush=True)


async def copy_file(verb, where, out):
    """It stops once, when a part of the new file is there."""
    connect, name, stopped = sqlite_file.connect, Path(out).name, []

    def stop():
        if not stopped and any(part.stat().st_size for part in Path(out).parent.glob(f"*{name}*")):
            stopped.append(True)
            os.write(1, b"inside\n")
            if not os.read(0, 1):
                os._exit(1)

    def connect_stopping(*args, **options):
        def made():
            raw = connect(*args, **options)()
            raw.set_progress_handler(stop, 100)
            return raw

        return made

    sqlite_file.connect = connect_stopping
    if verb == "restore":
        await Store.restore(Path(where), Path(out))
    else:
        async with Store.open(where, create=False) as store:
            await store.backup(Path(out))
    print("done", flush=True)


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


if sys.argv[1] == "copy":
    asyncio.run(copy(*sys.argv[2:]))
else:
    asyncio.run((copy_file if sys.argv[1] in ("backup", "restore") else main)(*sys.argv[1:]))
