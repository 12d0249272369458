"""What the process costs that writes for several gates: `python -m bench.writer`.

The real one, fed by `LINKS` processes as by so many gates: each sends frames of calls that were packed before, the next when
the last was answered. The CPU for a call of its thread that writes, which bounds all gates together, and of the whole process:
checkpoints run beside that thread.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import socket
import struct
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import uvloop
from msgspec.structs import replace

from bench.figures import note
from bench.load import cpu_s
from bench.store import chat_calls
from rollyard.core.ids import new_id
from rollyard.store.calls import CommitCall
from rollyard.store.writer_link import LABEL, frame
from rollyard.store.writer_process import serve_writes

LINKS, SESSIONS = 16, 32  # gates; of each
FRAMES, CALLS = 200, 8  # of each gate; in one
THREAD_US, WHOLE_US = 24.0, 30.0  # budgets; 24 us are a core at 16 gates of 2,600 calls/s

_forked = multiprocessing.get_context("fork")


def write(path: Path, inbox: socket.socket, ready: Event) -> None:
    inbox.setblocking(False)
    uvloop.run(serve_writes(path, inbox, asyncio.Event(), ready.set))


def send(link: socket.socket, packed: Event, start: Event) -> None:
    frames = pack()
    packed.set()
    start.wait()
    for one in frames:
        link.sendall(one)
        (left,) = struct.unpack("<Q", link.recv(8, socket.MSG_WAITALL))
        link.recv(left, socket.MSG_WAITALL)


def pack() -> list[bytes]:
    """Calls of sessions that take turns by chance."""
    calls = chat_calls(FRAMES * CALLS)
    ids, counts = [new_id("rollout") for _ in range(SESSIONS)], [0] * SESSIONS

    def next_call() -> CommitCall:
        at, added = random.randrange(SESSIONS), next(calls)
        record = replace(added.record, rollout_id=ids[at], seq=counts[at], id=new_id("call"))
        counts[at] += 1
        return CommitCall(record, added.nodes, added.blobs)

    return [frame([next_call() for _ in range(CALLS)]) for _ in range(FRAMES)]


def writing_s(pid: int) -> float:
    """Of the process's first thread."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    inbox, outbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ready, start = _forked.Event(), _forked.Event()
    with tempfile.TemporaryDirectory() as scratch:
        writer = _forked.Process(target=write, args=(Path(scratch) / "calls.db", inbox, ready))
        writer.start()
        ready.wait()
        senders = []
        for _ in range(LINKS):
            ours, theirs = socket.socketpair()
            packed = _forked.Event()
            senders.append((_forked.Process(target=send, args=(ours, packed, start)), packed))
            senders[-1][0].start()
            with ours, theirs:
                socket.send_fds(outbox, [LABEL], [theirs.fileno()])
        for _, packed in senders:
            packed.wait()
        assert writer.pid is not None
        before, began = (writing_s(writer.pid), cpu_s(writer.pid)), time.perf_counter()
        start.set()
        for sender, _ in senders:
            sender.join()
        wall = time.perf_counter() - began
        count = LINKS * FRAMES * CALLS
        thread, whole = (
            (now - then) / count * 1e6
            for now, then in zip((writing_s(writer.pid), cpu_s(writer.pid)), before, strict=True)
        )
        writer.terminate()
        writer.join()
    print(f"{count / wall:.0f} calls/s on this machine, with the processes that send them")
    good = note("us of CPU of the writing thread per call", thread, THREAD_US)
    return 0 if note("us of CPU of the writing process per call", whole, WHOLE_US) and good else 1


if __name__ == "__main__":
    raise SystemExit(main())
