"""The runner of conformance suites: what it calls passed, skipped and failed, and that the sandbox list is a list."""

import anyio
import pytest

from rollyard.core.sandbox import Capabilities
from rollyard.testing.sandbox import cases
from rollyard.testing.suite import Skip, case, check, run_case

pytestmark = pytest.mark.anyio


async def test_a_case_that_returns_has_passed():
    @case("T1", "works")
    async def works(fixture):
        check(fixture == 1, "the fixture is handed over")

    outcome = await run_case(works, 1)
    assert (outcome.result, outcome.why) == ("passed", "")


async def test_a_missing_capability_skips_and_is_named():
    @case("T1", "works", needs=("a", "b"))
    async def never(fixture):
        raise AssertionError("ran although a capability is missing")

    outcome = await run_case(never, 1, missing={"b"})
    assert (outcome.result, outcome.why) == ("skipped", "no capability b")


async def test_whatever_a_case_raises_is_a_failure_with_its_trace():
    @case("T1", "works")
    async def breaks(fixture):
        raise KeyError("seen")

    outcome = await run_case(breaks, 1)
    assert outcome.result == "failed"
    assert "KeyError" in outcome.why and "breaks" in outcome.trace


async def test_a_case_that_hangs_fails_at_its_limit():
    @case("T1", "works", timeout=0.1)
    async def hangs(fixture):
        await anyio.sleep(60)

    outcome = await run_case(hangs, 1)
    assert (outcome.result, outcome.why) == ("failed", "not done after 0 s")


async def test_a_case_may_skip_itself_and_slow_ones_wait_to_be_asked():
    @case("T1", "works")
    async def cannot_tell(fixture):
        raise Skip("no python3 in this image")

    @case("T2", "works", slow=True)
    async def slow(fixture):
        pass

    assert (await run_case(cannot_tell, 1)).why == "no python3 in this image"
    assert (await run_case(slow, 1)).result == "skipped"
    assert (await run_case(slow, 1, slow=True)).result == "passed"


async def test_cancelling_the_runner_is_not_a_failed_case():
    @case("T1", "works")
    async def waits(fixture):
        await anyio.sleep(60)

    with anyio.move_on_after(0.05) as scope:
        await run_case(waits, 1)
    assert scope.cancelled_caught


def test_the_sandbox_list_is_long_unique_and_needs_only_what_exists():
    found = cases()
    ids = [found_case.id for found_case in found]
    assert len(found) >= 60 and len(set(ids)) == len(ids)
    known = set(Capabilities.__struct_fields__)
    assert all(set(found_case.needs) <= known for found_case in found)
    assert len({found_case.title for found_case in found}) == len(found)
