"""The same attacks at each isolation level: what holds, and what does not. The table is that of docs/threat-model.md."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import IsolationTooWeak
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.sandbox.local.box import LocalSandbox
from rollyard.sandbox.pending import PendingSandbox
from tests.sandbox.test_local_levels import at

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]
KERNELS = ("gvisor", "microvm")  # where programs have a kernel of their own
LEVELS = ("full", "no_cgroups", "no_proc", "landlock", "none", *KERNELS)
SCRIPT = """
import ctypes, json, os, socket, sys
place, pid, port, name = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
found = {}
def attempt(what, *ways):
    found[what] = 'held'
    for way in ways:
        try:
            way()
            found[what] = 'open'
        except OSError:
            pass
def look(path): open(path).read(1) or sys.exit('empty')
def write(path): open(path, 'w').write('x')
def peek(path):
    with open(path, 'rb') as memory: pass
around = '/proc/self/root' + place
attempt('read a file of the host', lambda: look(place + '/secret'), lambda: look(around + '/secret'))
attempt('write a file of the host', lambda: write(place + '/secret'), lambda: write(around + '/secret'))
attempt('read a command line of the host', lambda: look(f'/proc/{pid}/cmdline'))
attempt('read the memory of a process of the host', lambda: peek(f'/proc/{pid}/mem'))
attempt('signal a process of the host', lambda: os.kill(pid, 0))
attempt('connect to a port of the host', lambda: socket.create_connection(('127.0.0.1', port), 5))
try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', int(sys.argv[5])))
except OSError: pass
attempt('connect to a socket of the host by its path', lambda: socket.socket(socket.AF_UNIX).connect(name))
attempt('open a socket to the hypervisor', lambda: socket.socket(40, socket.SOCK_STREAM))
libc = ctypes.CDLL(None, use_errno=True)
def unshare():
    if libc.unshare(0x10000000): raise OSError(ctypes.get_errno())
attempt('make a user namespace', unshare)
print(json.dumps(found))
"""
ALL_HELD = "held held held held held held held"
TABLE = {
    "read a file of the host": "held held held held open held held",
    "write a file of the host": "held held held held open held held",
    "read a command line of the host": "held held held held open held held",
    "read the memory of a process of the host": "held held held held open held held",
    "signal a process of the host": "held held held held open held held",
    "connect to a port of the host": "held held held held open held held",
    "send a datagram to the host": "held held held held open held held",
    "connect to a socket of the host by its path": ALL_HELD,
    "open a socket to the hypervisor": "held held held held open held held",
    "make a user namespace": "held held held held open open held",  # gVisor's own
}


def opening(backend: LocalBackend, spec: ry.SandboxSpec) -> PendingSandbox[LocalSandbox]:
    try:
        return backend.open(spec)
    except IsolationTooWeak as error:
        pytest.skip(str(error))


def open_at(tmp_path: Path, level: str) -> LocalBackend:
    return LocalBackend(root=tmp_path, isolation=level) if level in KERNELS else at(tmp_path, level)


@pytest.mark.parametrize(
    "level", [pytest.param(level, marks=[pytest.mark.slow] if level in KERNELS else []) for level in LEVELS]
)
async def test_an_attack_succeeds_where_the_table_says_and_nowhere_else(tmp_path, level):
    (tmp_path / "secret").write_text("host")
    name = f"/tmp/ry-level-{os.getpid()}.sock"
    with subprocess.Popen(["sleep", "300"]) as victim, socket.create_server(("127.0.0.1", 0)) as server:
        with socket.socket(socket.AF_UNIX) as named:
            named.bind(name)
            datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            datagrams.bind(("127.0.0.1", 0))
            datagrams.setblocking(False)
            named.listen()
            try:
                spec = ry.SandboxSpec(min_isolation="none", allow_unsafe=level == "none", boot_s=300.0)
                async with open_at(tmp_path, level) as backend, opening(backend, spec) as box:
                    if level == "landlock" and backend.trial.landlock < 6:
                        pytest.skip("the table is that of Landlock ABI 6 and later")
                    words = [
                        str(tmp_path),
                        str(victim.pid),
                        str(server.getsockname()[1]),
                        name,
                        str(datagrams.getsockname()[1]),
                    ]
                    done = await box.exec(["python3", "-c", SCRIPT, *words], timeout=300)
            finally:
                Path(name).unlink()
                victim.kill()
    assert done.ok, done.text
    found = json.loads(done.stdout)
    with datagrams:  # it is sent at every level with a network of its own, and arrives where it is shared
        try:
            found["send a datagram to the host"] = "open" if datagrams.recv(8) else "held"
        except BlockingIOError:
            found["send a datagram to the host"] = "held"
    column = LEVELS.index(level)
    assert found == {attack: cells.split()[column] for attack, cells in TABLE.items()}


def test_the_threat_model_has_this_table():
    text = (Path(__file__).parents[2] / "docs/threat-model.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z ]+) \| ((?:held|open)(?: \| (?:held|open)){6}) \|$", text, re.M))
    assert {attack: cells.replace(" | ", " ") for attack, cells in rows.items()} == TABLE
