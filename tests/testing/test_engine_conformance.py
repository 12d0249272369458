"""The docker backend against the sandbox conformance suite, on a Docker and on a Podman engine started for it. The outcomes
are those the docs show; `ROLLYARD_WRITE_DOCS=1` records them anew."""

import os
from pathlib import Path

import pytest

from rollyard.testing.pytest_adapter import conformance, expect_passed
from rollyard.testing.sandbox import cases
from rollyard.testing.sandbox.verdict import examine_backend
from tests.testing import conformance_table as table

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.slow]
PLACE = Path(__file__).parents[2] / "docs" / "sandboxes" / "conformance"


@conformance(cases())
async def test_engine(case, engine):
    kind, host = engine
    async with examine_backend(kind, [f"host={host}"]) as examination:
        (outcome,) = [outcome async for outcome in examination.outcomes(only=case.id, slow=True)]
        found = table.results(kind, examination.totals().isolation, [outcome])
    if os.environ.get("ROLLYARD_WRITE_DOCS"):
        table.add(PLACE, found)
    elif outcome.result != "failed":
        assert outcome.result == table.read(PLACE, kind).results[case.id]
    expect_passed(outcome)
