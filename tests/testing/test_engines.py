"""A throw-away engine comes up with an image and leaves nothing behind."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from rollyard.core.errors import ConfigError
from rollyard.core.sandbox import SandboxSpec
from rollyard.sandbox import backend
from rollyard.testing.engines import lacking, start, stop


def traces(place):
    """Control groups of engines, and mounts below a directory."""
    names = ("rollyard-engine", "docker", "libpod")
    groups = {str(path) for path in Path("/sys/fs/cgroup").glob("*/*") if path.name.startswith(names)}
    mounts = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
    return groups | {target for target in mounts if target.startswith(str(place))}


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
    named = str(place).encode()
    running = [path for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.exists() and named in _read(path)]
    assert (place.exists(), running, traces(place) - before) == (False, [], set())


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""
