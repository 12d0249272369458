"""Forks a process that writes for others, per line of stdin (the store's path): it serves the inbox that is descriptor argv[1].

Prints its pid, and that it is dead once it is. Run by test_writer_process.py, which has threads and so does not fork itself.
"""

import asyncio
import os
import socket
import sys
from pathlib import Path

import uvloop

from rollyard.store.writer_process import serve_writes

inbox = socket.socket(fileno=int(sys.argv[1]))
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        uvloop.run(serve_writes(Path(line.rstrip("\n")), inbox, asyncio.Event(), lambda: None))
    print(child, flush=True)
    os.waitpid(child, 0)
