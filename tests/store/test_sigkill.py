"""What was acknowledged survives SIGKILL of the writer at any moment."""

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollyard.store import Store

KILLS = 50


class Writers:
    """Lines of the forking writer, read without ever blocking for long."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("killed_writer.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.rest = b""

    def start(self, path, life):
        self.process.stdin.write(f"{path} {life}\n".encode())
        self.process.stdin.flush()

    def lines(self, seconds):
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([self.process.stdout], [], [], left)[0]:
                return
            self.rest += os.read(self.process.stdout.fileno(), 65536)
            *whole, self.rest = self.rest.split(b"\n")
            yield from (line.decode().split() for line in whole)


def live_and_die(writers, path, life, seconds):
    """One life: what it acknowledged before it was killed."""
    acknowledged, child, killed = [], None, False
    writers.start(path, life)
    began = None
    for words in writers.lines(60):
        if words[0] == "pid":
            child = int(words[1])
        elif words[0] == "dead":
            assert killed
            return acknowledged
        else:
            began = began or time.monotonic()
            acknowledged.append((words[0], int(words[1])))
        if child is not None and began is not None and not killed and time.monotonic() - began > seconds:
            os.kill(child, signal.SIGKILL)
            killed = True
    raise AssertionError("the writer did not die")


@pytest.mark.anyio
async def test_no_acknowledged_commit_is_lost(tmp_path):
    path = tmp_path / "runs.db"
    writers = Writers()
    chance = random.Random(7)
    acknowledged = []
    try:
        for life in range(KILLS):
            acknowledged += live_and_die(writers, path, life, chance.random() * 0.1)
    finally:
        writers.process.stdin.close()
        writers.process.wait(30)
    assert len(acknowledged) > KILLS
    async with Store.open(path) as store:
        kept = {}
        for rollout_id, seq in acknowledged:
            kept.setdefault(rollout_id, set()).add(seq)
        for rollout_id, seqs in kept.items():
            records, nodes = await store.load_calls(rollout_id)
            assert seqs <= {record.seq for record in records}
            assert {record.leaf for record in records} <= {node.id for node in nodes}
            assert await store.load_blob(records[-1].raw_request, rollout_id)
