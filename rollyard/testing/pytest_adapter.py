"""Conformance cases as pytest tests, in two lines of a test module:

@conformance(cases())
async def test_my_backend(case, fixture):
    expect_passed(await run_case(case, fixture, missing=missing(fixture)))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from rollyard.testing.suite import Case, CaseOutcome


def conformance(cases: Iterable[Case[Any]]) -> pytest.MarkDecorator:
    """Parametrise a test with `case`; slow cases carry the mark `slow`."""
    marked = [pytest.param(case, id=case.id, marks=[pytest.mark.slow] if case.slow else []) for case in cases]
    return pytest.mark.parametrize("case", marked)


def expect_passed(outcome: CaseOutcome) -> None:
    """Pass, skip with the reason, or fail with the case's own trace."""
    if outcome.result == "skipped":
        pytest.skip(outcome.why)
    if outcome.result == "failed":
        pytest.fail(f"{outcome.id} {outcome.title}: {outcome.why}\n{outcome.trace}", pytrace=False)
