"""A throw-away engine comes up with an image and leaves nothing behind."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rollyard.core.errors import ConfigError
from rollyard.core.sandbox import SandboxSpec
from rollyard.sandbox import backend
from tests.servers.engines import lacking, start, stop


def traces(place):
    """What an engine could leave outside its directory: control groups, mounts, interfaces, packet filter rules."""
    names = ("rollyard-engine", "docker", "libpod")
    groups = {str(path) for path in Path("/sys/fs/cgroup").glob("*/*") if path.name.startswith(names)}
    mounts = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
    links = {f"interface {name}" for name in os.listdir("/sys/class/net")}
    files = {
        str(path) for path in (Path("/etc/docker"), Path("/run/docker.sock"), Path("/run/podman")) if path.exists()
    }
    rules = {f"{program}: {line}" for program in ("iptables-save", "nft list ruleset") for line in _rules(program)}
    return groups | {target for target in mounts if target.startswith(str(place))} | links | files | rules


def _rules(program):
    argv = program.split()
    if shutil.which(argv[0]) is None:
        return []
    said = subprocess.run(argv, capture_output=True, text=True).stdout.splitlines()
    return [line for line in said if not line.startswith(("#", ":"))]  # comments and counters


def processes(place):
    named = str(place).encode()
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.exists() and named in _read(path)]


def test_an_engine_nobody_knows_is_an_error_that_names_those_that_are():
    with pytest.raises(ConfigError, match="docker, podman"):
        lacking("rkt")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_an_engine_with_a_live_sandbox_leaves_nothing_behind(kind):
    if why := lacking(kind):
        pytest.skip(why)
    place = Path(tempfile.gettempdir(), f"ry-{kind}-leaves-nothing")
    before = traces(place)

    async def use(host):
        async with backend(kind, host=host) as opened:
            await opened.open(SandboxSpec(lifetime="ttl"))

    host = start(kind, place)
    try:
        asyncio.run(use(host))
    finally:
        stop(kind, place)
    assert (place.exists(), processes(place), traces(place) - before) == (False, [], set())


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_the_commands_behind_make_docker_start_one_that_check_sandbox_works_on_and_stop_it_without_a_trace(
    kind, tmp_path
):
    if why := lacking(kind):
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="ry-") as short:  # a socket's path may have 107 bytes
        place, env = Path(short, f"rollyard-{kind}"), {**os.environ, "TMPDIR": short}
        before = traces(place)

        def run(*argv, **more):
            return subprocess.run(
                [sys.executable, *argv], env={**env, **more}, capture_output=True, text=True, timeout=300
            )

        engines = ["-m", "tests.servers.engines"]
        try:
            started = run(*engines, "start", kind)
            assert started.returncode == 0, started.stderr
            name, _, host = started.stdout.strip().partition("=")
            assert name == {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}[kind]
            assert run(*engines, "start", kind).returncode == 1
            main = ["-c", "from rollyard.cli.main import main; main()"]
            checked = run(*main, "check", "sandbox", kind, "--only", "C1", "--json", **{name: host})
            assert checked.returncode == 0, checked.stderr + checked.stdout
            totals = json.loads(checked.stdout)
            assert (totals["passed"], totals["failed"]) == (1, 0)
        finally:
            stopped = run(*engines, "stop", kind)
        assert stopped.returncode == 0
        assert (place.exists(), processes(place), traces(place) - before) == (False, [], set())
        assert run(*engines, "stop", kind).returncode == 0


@pytest.mark.parametrize("argv", [[], ["start"], ["begin", "docker"]])
def test_the_engine_command_says_how_it_is_used(argv):
    done = subprocess.run([sys.executable, "-m", "tests.servers.engines", *argv], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "start|stop docker|podman" in done.stderr


def test_make_runs_those_commands():
    said = subprocess.run(
        ["make", "-n", "docker-stop", "ENGINE=podman"], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert "tests.servers.engines stop podman" in said.stdout


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""
