"""The sandbox conformance suite: what every backend owes, as cases that can be run with any backend.

async with ry.sandbox.backend("local") as backend:
    async for outcome in check_sandbox(SandboxFixture(backend=backend, name="local")):
        print(outcome.id, outcome.result, outcome.why)
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from rollyard.testing.sandbox import commands, files, jobs, lifecycle, network, refusals, state
from rollyard.testing.sandbox.fixture import SandboxFixture as SandboxFixture
from rollyard.testing.suite import Case, CaseOutcome, run_case


def cases() -> list[Case[SandboxFixture]]:
    """All of them, in the order of the files."""
    modules = (lifecycle, commands, jobs, files, network, state, refusals)
    return [value for module in modules for value in vars(module).values() if isinstance(value, Case)]


def missing(fixture: SandboxFixture) -> set[str]:
    """Capabilities that this backend says it does not have."""
    fields = msgspec.structs.fields(type(fixture.can))
    return {field.name for field in fields if getattr(fixture.can, field.name) is False}


async def check_sandbox(
    fixture: SandboxFixture, *, only: str | None = None, slow: bool = False
) -> AsyncIterator[CaseOutcome]:
    """Outcomes as they come. `only` is a letter or an id: `F` for the files, `E9` for one case."""
    for case in cases():
        if only is None or case.id == only or case.id.rstrip("0123456789") == only:
            yield await run_case(case, fixture, missing=missing(fixture), slow=slow)
