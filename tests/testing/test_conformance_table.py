"""The table in docs/sandboxes/index.md is made from recorded runs of today's suite.

To record anew: `ROLLYARD_WRITE_DOCS=1 pytest tests/testing -k "conformance"`, the table's own tests last.
"""

import os
from pathlib import Path

import pytest

from rollyard.testing.sandbox import cases
from rollyard.testing.sandbox.verdict import examine_backend
from tests.testing import conformance_table as table

PAGE = Path(__file__).parents[2] / "docs" / "sandboxes" / "index.md"
PLACE = PAGE.parent / "conformance"
WRITE = bool(os.environ.get("ROLLYARD_WRITE_DOCS"))


@pytest.mark.anyio
@pytest.mark.slow
async def test_the_recorded_results_of_the_local_backend_are_what_the_suite_finds():
    async with examine_backend("local") as examination:
        outcomes = [outcome async for outcome in examination.outcomes(slow=True)]
        found = table.results("local", examination.totals().isolation, outcomes)
    if WRITE:
        table.add(PLACE, found)
    assert found.results == table.read(PLACE, "local").results


def test_the_page_shows_the_recorded_results_of_every_case():
    found = table.read_all(PLACE)
    if WRITE:
        PAGE.write_text(table.put(PAGE.read_text(), table.render(found)))
    assert {one.backend for one in found} >= {
        *("local", "docker", "podman", "e2b", "hf", "daytona", "prime", "runloop", "ssh", "apptainer")
    }
    for one in found:
        assert "failed" not in one.results.values()
        assert set(one.results) == {case.id for case in cases()}, f"{one.backend} was recorded with another suite"
    page = PAGE.read_text()
    assert table.put(page, table.render(found)) == page
