"""The suite on a backend that is named, with its options as text: what `rollyard check sandbox` runs."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from inspect import signature
from pathlib import Path

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.protocols import Backend
from rollyard.core.registry import load
from rollyard.core.sandbox import SandboxSpec
from rollyard.images.layers import layer_prefix
from rollyard.images.store import ImageStore
from rollyard.sandbox import GROUP
from rollyard.sandbox import backend as open_backend
from rollyard.testing.sandbox import check_sandbox
from rollyard.testing.sandbox.fixture import SandboxFixture
from rollyard.testing.suite import CaseOutcome

LAYER_PACKAGE, LAYER_PROGRAM = "packaging==24.2", "bin/python3"


class SandboxTotals(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    isolation: str
    passed: int
    skipped: int
    failed: int
    outcomes: tuple[CaseOutcome, ...]

    @property
    def line(self) -> str:
        return f"{self.backend} ({self.isolation}): {self.passed} passed, {self.skipped} skipped, {self.failed} failed"


class SandboxCheck:
    def __init__(self, fixture: SandboxFixture) -> None:
        self._fixture = fixture
        self._seen: list[CaseOutcome] = []

    async def outcomes(self, *, only: str | None = None, slow: bool = False) -> AsyncIterator[CaseOutcome]:
        async for outcome in check_sandbox(self._fixture, only=only, slow=slow):
            self._seen.append(outcome)
            yield outcome

    def totals(self) -> SandboxTotals:
        count = {result: sum(o.result == result for o in self._seen) for result in ("passed", "skipped", "failed")}
        can = self._fixture.can
        return SandboxTotals(
            backend=self._fixture.backend.name, isolation=can.isolation, **count, outcomes=tuple(self._seen)
        )


@contextlib.asynccontextmanager
async def examine_backend(name: str, options: Sequence[str] = (), image: str = "host") -> AsyncGenerator[SandboxCheck]:
    """Open the backend and what the cases need beside it: a directory to mount and a layer, where it takes them."""
    given = dict(_option(text) for text in options)
    with tempfile.TemporaryDirectory(prefix="rollyard-check-") as scratch:
        given_here = {**given, "mounts": [scratch]} if "mounts" in signature(load(GROUP, name)).parameters else given
        async with open_backend(name, **given_here) as backend:
            isolation = backend.capabilities.isolation
            fixture = SandboxFixture(
                backend=backend,
                spec=SandboxSpec(
                    image=image, min_isolation=isolation, allow_unsafe=not backend.capabilities.network_none
                ),
                name=name,
                options=given_here,
                layer=_layer(backend),
                mount=_open_to_all(scratch) if backend.capabilities.mounts else None,
            )
            yield SandboxCheck(fixture)


def _layer(backend: Backend) -> Callable[[], Awaitable[tuple[str, str]]] | None:
    """A small layer of the backend's own store, built when a case asks for it."""
    store = getattr(backend, "images", None)
    if not backend.capabilities.layers or not isinstance(store, ImageStore):
        return None

    async def build() -> tuple[str, str]:
        layer = await store.layer(pip=[LAYER_PACKAGE])
        return layer, f"{layer_prefix(layer)}/{LAYER_PROGRAM}"

    return build


def _open_to_all(scratch: str) -> str:
    """A sandbox's root is nobody on the host: a directory it may write to is open to all."""
    Path(scratch).chmod(0o777)
    return scratch


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"{text!r} is not an option", hint="write --option name=value")
    return name, value
