"""The backends of a machine of the user's own against the sandbox conformance suite: ssh over a real OpenSSH server, and
apptainer where it is installed. The outcomes are those the docs show; `ROLLYARD_WRITE_DOCS=1` records them anew."""

import os
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollyard.sandbox import backend
from rollyard.testing.pytest_adapter import expect_passed
from rollyard.testing.sandbox import SandboxFixture, cases, missing
from rollyard.testing.suite import run_case
from tests.sandbox import sshd
from tests.testing import conformance_table as table

pytestmark = pytest.mark.anyio
PLACE = Path(__file__).parents[2] / "docs" / "sandboxes" / "conformance"
# A few of each; `make test-slow` runs them all.
QUICK = {"ssh": {"C2", "E10", "E14", "N2", "S2"}, "apptainer": {"C2", "E10", "N2", "S4"}}


@asynccontextmanager
async def open_backend(name, tmp_path):
    with sshd.machine_options(name, tmp_path / "machine") as options:
        async with backend(name, **options) as made:
            yield SandboxFixture(backend=made, name=name, options=options, parallel=4)


def chosen():
    for name, quick in QUICK.items():
        for case in cases():
            slow = case.slow or case.id not in quick
            yield pytest.param(name, case, id=f"{name}-{case.id}", marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("name", "case"), list(chosen()))
async def test_machine(name, case, tmp_path):
    async with open_backend(name, tmp_path) as made:
        outcome = await run_case(case, made, missing=missing(made), slow=True)
    found = table.results(name, made.can.isolation, [outcome])
    if os.environ.get("ROLLYARD_WRITE_DOCS"):
        table.add(PLACE, found)
    elif outcome.result != "failed":
        assert outcome.result == table.read(PLACE, name).results[case.id]
    expect_passed(outcome)
