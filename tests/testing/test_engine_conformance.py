"""The docker backend against the sandbox conformance suite, on a Docker and on a Podman engine started for it."""

import pytest

from rollyard.sandbox import backend
from rollyard.testing.engines import lacking, running
from rollyard.testing.pytest_adapter import conformance, hold
from rollyard.testing.sandbox import Ground, cases, missing
from rollyard.testing.suite import run_case

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module", params=["docker", "podman"])
def engine(request):
    """(kind, address) of an engine that lives as long as this module's tests."""
    if why := lacking(request.param):
        pytest.skip(why)
    with running(request.param) as host:
        yield request.param, host


@conformance(cases())
async def test_engine(case, engine, tmp_path):
    kind, host = engine
    options = {"host": host, "mounts": [str(tmp_path)]}
    async with backend(kind, **options) as opened:
        ground = Ground(backend=opened, name=kind, options=options, mount=str(tmp_path), parallel=4)
        hold(await run_case(case, ground, missing=missing(ground), slow=True))
