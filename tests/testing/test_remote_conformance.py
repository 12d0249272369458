"""The backends hf, daytona, prime and runloop, each through its real SDK and a server on the loopback written from that SDK's
models, against the sandbox conformance suite. The outcomes are those the docs show; `ROLLYARD_WRITE_DOCS=1` records them anew."""

import os
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollyard.sandbox import backend
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.testing.pytest_adapter import expect_passed
from rollyard.testing.sandbox import SandboxFixture, cases, missing
from rollyard.testing.suite import run_case
from tests.sandbox import sdks
from tests.sandbox.remote_servers import serving
from tests.testing import conformance_table as table

pytestmark = pytest.mark.anyio
PLACE = Path(__file__).parents[2] / "docs" / "sandboxes" / "conformance"
# A few of each; `make test-slow` runs them all.
QUICK = {
    "hf": {"C2", "C7", "E4", "E10", "E13", "F5", "N3", "X5"},
    "daytona": {"C2", "E13", "N5"},
    "prime": {"C2", "E13", "N5"},
    "runloop": {"C2", "E4", "E13", "N5"},
}


@asynccontextmanager
async def open_backend(name, tmp_path):
    async with LocalBackend(root=tmp_path / "home") as local, serving(name, local) as server:
        async with backend(name, **server.options) as made:
            yield SandboxFixture(backend=made, name=name, options=server.options, parallel=4)


def chosen():
    for name, quick in QUICK.items():
        for case in cases():
            slow = case.slow or case.id not in quick or not (name == "hf" or sdks.ready(name))
            yield pytest.param(name, case, id=f"{name}-{case.id}", marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("name", "case"), list(chosen()))
async def test_remote(name, case, tmp_path):
    async with open_backend(name, tmp_path) as made:
        outcome = await run_case(case, made, missing=missing(made), slow=True)
    found = table.results(name, made.can.isolation, [outcome])
    if os.environ.get("ROLLYARD_WRITE_DOCS"):
        table.add(PLACE, found)
    elif outcome.result != "failed":
        assert outcome.result == table.read(PLACE, name).results[case.id]
    expect_passed(outcome)
