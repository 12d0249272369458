"""A conformance suite: cases, a runner, outcomes.

A case is a plain async function with an id and the capabilities it needs. What a backend says it cannot do is skipped with
that reason; what it says it can do and does not is a failure. There is no third state to hide in.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, Literal, TypeVar

import anyio
import msgspec

G = TypeVar("G")
Result = Literal["passed", "skipped", "failed"]


class Skip(Exception):
    """Raised by a case that finds, while running, that it cannot tell; carries why."""


class Case(Generic[G]):
    """`needs` are names of capabilities; `slow` cases run only when asked for."""

    def __init__(
        self,
        id: str,
        title: str,
        run: Callable[[G], Awaitable[None]],
        needs: tuple[str, ...],
        slow: bool,
        timeout: float,
    ) -> None:
        self.id = id
        self.title = title
        self.run = run
        self.needs = needs
        self.slow = slow
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"Case({self.id}: {self.title})"


class CaseOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    title: str
    result: Result
    why: str = ""
    duration_s: float = 0.0
    trace: str = ""


def case(
    id: str, title: str, *, needs: tuple[str, ...] = (), slow: bool = False, timeout: float = 60.0
) -> Callable[[Callable[[G], Awaitable[None]]], Case[G]]:
    """Make a case of an async function. The title completes "a conforming backend ...": it states the behaviour."""

    def wrap(run: Callable[[G], Awaitable[None]]) -> Case[G]:
        return Case(id, title, run, needs, slow, timeout)

    return wrap


async def run_case(case: Case[G], fixture: G, *, missing: Iterable[str] = (), slow: bool = False) -> CaseOutcome:
    """One case on `fixture`. `missing` are capabilities the fixture does not have."""
    started = time.monotonic()
    lacking = [name for name in case.needs if name in set(missing)]
    if lacking:
        return CaseOutcome(id=case.id, title=case.title, result="skipped", why=f"no capability {', '.join(lacking)}")
    if case.slow and not slow:
        return CaseOutcome(id=case.id, title=case.title, result="skipped", why="slow; run with --slow")
    result: Result = "passed"
    why = trace = ""
    try:
        with anyio.fail_after(case.timeout):
            await case.run(fixture)
    except Skip as skip:
        result, why = "skipped", str(skip)
    except TimeoutError as error:
        result, why, trace = "failed", str(error) or f"not done after {case.timeout:.0f} s", traceback.format_exc()
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is this case's finding, and it is recorded
        result, why, trace = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}", traceback.format_exc()
    return CaseOutcome(
        id=case.id, title=case.title, result=result, why=why, trace=trace, duration_s=time.monotonic() - started
    )


def check(condition: object, why: str) -> None:
    """`assert` that also works under `python -O` and says what was seen."""
    if not condition:
        raise AssertionError(why)
