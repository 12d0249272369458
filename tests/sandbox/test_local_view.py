"""Sandboxes without namespaces have a root and a route of their own too: their programs are traced, and Landlock is the wall."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import PathError, Unsupported
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.sandbox.local.inner.path_view import PathView
from tests.sandbox.test_local_levels import UNSAFE, at

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
FREE = ("landlock", pytest.param("none", marks=pytest.mark.slow))
STEPS = """
steps:
  - shell: sed -i -e 's/^port = 8080/port = 8443/' -e 's/^tls = off/tls = on/' /app/server.ini
  - text: Done.
"""
SOCKETS = """
import socket, sys
def attempt(name, act):
    try: act(); print(name, 'open')
    except OSError as error: print(name, type(error).__name__)
inet, inet6, stream, datagram = socket.AF_INET, socket.AF_INET6, socket.SOCK_STREAM, socket.SOCK_DGRAM
attempt('udp', lambda: socket.socket(inet, datagram).sendto(b'x', ('127.0.0.1', int(sys.argv[2]))))
attempt('udp6', lambda: socket.socket(inet6, datagram))
attempt('raw', lambda: socket.socket(inet, socket.SOCK_RAW, 1))
attempt('mptcp', lambda: socket.socket(inet, stream, 262))
attempt('fast open', lambda: socket.socket(inet, stream).sendto(b'x', 0x20000000, ('127.0.0.1', int(sys.argv[2]))))
attempt('loopback', lambda: socket.create_connection(('127.0.0.1', int(sys.argv[2])), 5))
attempt('beyond', lambda: socket.create_connection(('255.255.255.255', int(sys.argv[1])), 5))
attempt('beyond6', lambda: socket.create_connection(('ff02::1', int(sys.argv[1])), 5))
attempt('unix', lambda: socket.socket(socket.AF_UNIX).connect(sys.argv[3]))
attempt('own', lambda: socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5))
"""


def test_a_path_leads_where_the_sandbox_has_it_and_back():
    view = PathView("/h/root", {"/usr": "/usr", "/proc": "/proc", "/opt/tool": "/store/tool"})
    cases = {
        "/app/x": "/h/root/app/x", "/": "/h/root/", "/usr/bin/env": "/usr/bin/env", "/usrx": "/h/root/usrx", "a/../b": "a/../b",
        "/app/../usr/lib": "/usr/lib", "//usr//lib/": "/usr/lib/", "/opt/tool/bin": "/store/tool/bin",
        "/h/root/app": "/h/root/app",        "/../../etc/passwd": "/h/root/etc/passwd", "/store/tool/bin": "/store/tool/bin",
    }  # fmt: skip
    assert {inside: view.outside(inside.encode()).decode() for inside in cases} == cases
    back = {
        "/h/root/app": "/app",
        "/h/root": "/",
        "/h/rootx": "/h/rootx",
        "/store/tool/bin": "/opt/tool/bin",
        "/usr": "/usr",
    }
    assert {outside: view.inside(outside.encode()).decode() for outside in back} == back


@pytest.mark.parametrize("level", FREE)
async def test_a_program_without_namespaces_has_a_root_of_its_own(tmp_path, level):
    script = """set -e
    mkdir -p /app /data; cd /app; pwd; echo text > /data/file; ln -s /data/file link; readlink link; cat link
    printf '#!/app/run -x\\n' > script; printf '#!/bin/sh\\necho "$@"\\n' > run; chmod +x script run; ./script 1; /app/script 2
    python3 -c 'import os; print(os.getcwd(), os.path.realpath("/app/link"), os.path.realpath("/proc/self/cwd"))'
    git init -q repo; git -C repo -c user.email=a@b -c user.name=c commit -q --allow-empty -m m; git -C repo log --format=%s"""
    async with at(tmp_path, level) as backend, backend.open(UNSAFE) as box:
        done = await box.exec(script, timeout=60)
        lines = ["/app", "/data/file", "text", "-x ./script 1", "-x /app/script 2", "/app /data/file /app", "m"]
        assert done.stdout.decode().splitlines() == lines, done.text
        assert (await box.stat("/app/link")).target == "/data/file" and await box.read("/app/link") == b"text\n"
        async with backend.open(UNSAFE) as other:
            assert not await other.exists("/data/file")
    assert not Path("/data/file").exists()


@pytest.mark.parametrize("level", FREE)
async def test_a_snapshot_without_namespaces_has_what_was_written_and_not_what_was_removed(tmp_path, level):
    async with at(tmp_path, level) as backend:
        async with backend.open(UNSAFE) as box:
            await box.exec(
                "mkdir -p /app/old; echo 1 > /app/old/a; echo 2 > /app/b; ln -s /app/b /app/l; rm /etc/services",
                timeout=20,
            )
            first = await box.snapshot()
        async with backend.open(ry.SandboxSpec(image=first, min_isolation="none", allow_unsafe=True)) as box:
            assert not await box.exists("/etc/services") and await box.read("/app/l") == b"2\n"
            await box.exec("rm -r /app/old; echo 3 > /app/b", timeout=20)
            second = await box.snapshot()
        async with backend.open(ry.SandboxSpec(image=second, min_isolation="none", allow_unsafe=True)) as box:
            assert [entry.path for entry in await box.list_dir("/app")] == ["/app/b", "/app/l"]
            assert (await box.stat("/app/l")).target == "/app/b" and await box.read("/app/b") == b"3\n"
    async with LocalBackend(root=tmp_path) as strong, strong.open(ry.SandboxSpec(image=second)) as box:
        assert (await box.exec("cat /app/l; ls /app /etc/services", timeout=20)).stdout == b"3\n/app:\nb\nl\n"


async def test_an_image_that_only_an_overlay_can_show_is_refused_by_name(tmp_path):
    (tmp_path / "image").mkdir()
    async with at(tmp_path, "landlock") as backend:
        with pytest.raises(Unsupported, match="does not stand on 'host'"):
            await backend.open(ry.SandboxSpec(image=str(tmp_path / "image"), allow_unsafe=True))
        with pytest.raises(Unsupported, match="tmpfs"):
            backend.open(ry.SandboxSpec(disk="tmpfs"))


@pytest.mark.adversarial
async def test_under_landlock_a_program_connects_to_its_listeners_and_to_nothing_else(tmp_path):
    """No packet can be sent to the addresses that are tried; the error says who refused them."""
    async with at(tmp_path, "landlock") as backend:
        if not backend.capabilities.network_none:
            pytest.skip("Landlock here knows no ports")
        with socket.create_server(("127.0.0.1", 0)) as other, socket.socket(socket.AF_UNIX) as named:
            place = f"/tmp/ry-{os.getpid()}.sock"
            named.bind(place)
            named.listen()
            try:
                async with backend.open(ry.SandboxSpec()) as box:
                    listener = await box.listen(0)
                    words = [str(listener.port), str(other.getsockname()[1]), place]
                    done = await box.exec(["python3", "-c", SOCKETS, *words], timeout=60)
            finally:
                Path(place).unlink()
    closed = ("udp", "udp6", "raw", "mptcp", "fast open", "loopback", "beyond", "beyond6", "unix")
    found = dict(line.rsplit(" ", 1) for line in done.stdout.decode().splitlines())
    assert {found["beyond"], found["beyond6"]} == {"PermissionError"}, done.text
    assert found.pop("own") == "open" and list(found) == list(closed) and "open" not in found.values(), done.text


@pytest.mark.adversarial
async def test_the_view_is_no_wall_and_landlock_is(tmp_path):
    """A path of the host's means itself, and so does a link that the runner did not make: both end at the rules."""
    (tmp_path / "secret").write_text("host")
    async with at(tmp_path, "landlock") as backend, backend.open(ry.SandboxSpec()) as box:
        boxes = str(tmp_path / "boxes")
        script = f"cat /proc/self/root{tmp_path}/secret; ls {boxes}; cd /proc/self/root; cat .{tmp_path}/secret; echo >> /usr/x"
        done = await box.exec(script, timeout=20)
        assert b"host" not in done.stdout and done.exit_code != 0
        with pytest.raises(PathError):
            await box.read(f"/proc/self/root{tmp_path}/secret")
        async with backend.open(ry.SandboxSpec()) as other:
            await other.write("/workspace/theirs", "x")
            theirs = next(Path(boxes).glob(f"{other.id}/fs/root/workspace/theirs"))
            assert (await box.exec(["cat", str(theirs)], timeout=20)).exit_code != 0


def run_barred(home, *words):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ROLLYARD_HOME": str(home)}
    command = [sys.executable, str(ROOT / "tests/barred.py"), sys.executable, "-m", "rollyard", *words]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    "agent", ["oracle", pytest.param("shell-agent", marks=pytest.mark.slow), pytest.param("pi", marks=pytest.mark.slow)]
)
def test_a_rollout_ends_with_its_reward_where_namespaces_are_barred(tmp_path, agent):
    (tmp_path / "steps.yaml").write_text(STEPS)
    policy = [] if agent == "oracle" else ["--policy", f"scripted:{tmp_path}/steps.yaml"]
    words = [
        "run",
        "examples/tasks/file-edit",
        "--agent",
        agent,
        *policy,
        "--store",
        str(tmp_path / "runs.db"),
        "--display",
        "plain",
    ]
    done = run_barred(tmp_path / "home", *words)
    assert done.returncode == 0 and "reward 1" in done.stdout + done.stderr, done.stdout + done.stderr
    refused = run_barred(tmp_path / "home", *words, "--min-isolation", "namespace")
    assert refused.returncode != 0 and "gives isolation 'landlock' here" in refused.stdout + refused.stderr
