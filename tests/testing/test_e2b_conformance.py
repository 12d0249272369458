"""The e2b backend, through the real SDK and this project's own server, against the sandbox conformance suite. The outcomes are
those the docs show; `ROLLYARD_WRITE_DOCS=1` records them anew."""

import os
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollyard.sandbox import backend
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.testing.pytest_adapter import conformance, expect_passed
from rollyard.testing.sandbox import SandboxFixture, cases, missing
from rollyard.testing.suite import run_case
from tests.plane.e2b_server import serving
from tests.testing import conformance_table as table

pytest.importorskip("e2b", reason="the e2b SDK is not installed")
pytestmark = pytest.mark.anyio
PLACE = Path(__file__).parents[2] / "docs" / "sandboxes" / "conformance"
KEY = "e2b_" + "0" * 40
# One of each kind; `make test-slow` runs them all.
QUICK = {"B1", "B14", "C2", "C7", "E4", "E10", "E13", "E17", "F5", "F10", "N3", "N5", "X5"}


@asynccontextmanager
async def open_backend(tmp_path):
    async with LocalBackend(root=tmp_path / "home") as local, serving(local, key=KEY) as url:
        options = {"key": KEY, "url": url, "isolation": "namespace"}
        async with backend("e2b", **options) as made:
            yield SandboxFixture(backend=made, name="e2b", options=options, parallel=4)


def split(all_cases):
    quick = [case for case in all_cases if case.id in QUICK]
    return quick, [case for case in all_cases if case.id not in QUICK]


quick, others = split(cases())


async def held(case, tmp_path):
    async with open_backend(tmp_path) as made:
        outcome = await run_case(case, made, missing=missing(made), slow=True)
    if os.environ.get("ROLLYARD_WRITE_DOCS"):
        table.add(PLACE, table.results("e2b", made.can.isolation, [outcome]))
    elif outcome.result != "failed":
        assert outcome.result == table.read(PLACE, "e2b").results[case.id]
    expect_passed(outcome)


@conformance(quick)
async def test_e2b(case, tmp_path):
    await held(case, tmp_path)


@pytest.mark.slow
@conformance(others)
async def test_e2b_whole(case, tmp_path):
    await held(case, tmp_path)
