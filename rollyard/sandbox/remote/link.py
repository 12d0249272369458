"""What a provider's file gives: a `Provider` that makes and finds sandboxes, and a `Link` to each of them.

Their methods may raise whatever the SDK raises: `Provider.fault` says which of our errors that is, and `speaking` is around every
call. A provider's key is taken out of every text there, so no file of a provider has to think of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from collections.abc import Coroutine, Generator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from rollyard.core.errors import (
    ConfigError,
    Error,
    MissingExtra,
    SandboxError,
    SandboxGone,
    SandboxInterrupted,
    SandboxUnavailable,
)
from rollyard.core.sandbox import SandboxSpec

T = TypeVar("T")
HIDDEN = "[key]"


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox as a provider's list tells of it."""

    id: str
    image: str
    labels: Mapping[str, str]
    created_at: float
    state: str = "running"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a provider: the spec, the image it means, all labels, how long without us it may live (`lease_s`),
    and a key that is the same for every try."""

    spec: SandboxSpec
    image: str
    labels: Mapping[str, str]
    lease_s: float
    key: str


class Link(Protocol):
    """One sandbox. `run` gives the stdout of a line for a POSIX shell (stderr may be mixed in), whatever its exit code;
    its environment is what the sandbox was made with, and `env`. Text is ASCII; bytes go by `put` and `get`."""

    id: str

    def run(self, line: str, *, env: Mapping[str, str], timeout: float) -> Coroutine[Any, Any, str]: ...
    async def put(self, path: str, data: bytes) -> None: ...
    async def get(self, path: str) -> bytes: ...
    async def alive(self) -> bool: ...
    async def keep(self) -> None:
        """Anything that its provider counts as use."""
        ...

    async def extend(self, end: float, created_at: float, labels: Mapping[str, str]) -> None: ...


class Provider(Protocol):
    """`secrets` are texts that no error and no log may show."""

    @property
    def secrets(self) -> tuple[str, ...]: ...
    async def enter(self) -> None: ...
    async def leave(self) -> None: ...
    async def create(self, order: Order) -> Link: ...
    async def find(self, sandbox_id: str) -> tuple[Link, Found]: ...
    async def list(self, labels: Mapping[str, str]) -> Sequence[Found]: ...
    async def delete(self, sandbox_id: str) -> bool:
        """Whether this call did it; False when it was gone."""
        ...

    def delete_now(self, ids: Sequence[str], seconds: float) -> Sequence[str]:
        """The same for many, without a loop; returns those that may still be there."""
        ...

    def fault(self, error: Exception, text: str, about: str) -> Error: ...


def sdk(module: str, package: str, extra: str) -> Any:
    """A provider's SDK, imported when a backend is entered."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(package, extra, why=f"the {extra} backend") from None


def gone(sandbox_id: str) -> SandboxGone:
    return SandboxGone(f"sandbox {sandbox_id} is gone", hint="open another sandbox")


def hidden(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return " ".join(text.split())[:300]


def by_status(status: int | None, text: str, *, about: str, retry_after: float | None = None) -> Error | None:
    """What an HTTP status means, where it means the same everywhere; `about` is a sandbox's id, or ""."""
    if status in (401, 403):
        return ConfigError(
            f"the provider does not accept the key: {text}", hint="see this backend's page on credentials"
        )
    if status == 402:
        return ConfigError(f"the provider wants to be paid first: {text}")
    if status in (429, 503):
        return SandboxUnavailable(f"the provider is busy: {text}", retry_after=retry_after)
    if status in (404, 410):
        return gone(about) if about else ConfigError(f"the provider knows no such thing: {text}")
    if status in (400, 405, 409, 413, 422):
        return (
            SandboxError(f"the provider refused it: {text}")
            if about
            else ConfigError(f"the provider refused it: {text}")
        )
    if status in (408, 500, 502, 504, 524):
        return SandboxInterrupted(f"a call to the provider broke: {text}")
    return None


@contextlib.contextmanager
def speaking(provider: Provider, about: str = "") -> Generator[None]:
    """Around every call of an SDK. No cause is chained: a traceback would print what the text leaves out."""
    try:
        yield
    except (Error, asyncio.CancelledError):
        raise
    except Exception as error:  # noqa: BLE001 - SDKs raise kinds of several packages; each becomes one of ours
        text = hidden(f"{type(error).__name__}: {error}", provider.secrets)
        raise provider.fault(error, text, about) from None


async def left_alone(call: Coroutine[Any, Any, T]) -> T:
    """A call of an SDK, as a task of its own: some turn a cancellation into an error, and who cancelled would not see it."""
    task = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody is left to hear of it
        task.cancel()
        raise


_TRANSPORTS = (
    "httpx", "httpx2", *(f"{core}.{part}" for core in ("httpcore", "httpcore2") for part in ("connection", "http11", "http2")),
)  # fmt: skip


_PLAIN = logging.Formatter()


class Quiet(logging.Filter):
    """Takes secrets out of what an SDK and its transports log, while a backend is open. A server may say them aloud."""

    def __init__(self, provider: Provider, names: Sequence[str]) -> None:
        super().__init__()
        self._provider, self._loggers = provider, [logging.getLogger(name) for name in (*names, *_TRANSPORTS)]

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if any(secret in said for secret in self._provider.secrets):
            record.msg, record.args = hidden(said, self._provider.secrets), ()
        if record.exc_info and any(
            secret in _PLAIN.formatException(record.exc_info) for secret in self._provider.secrets
        ):
            record.exc_info = record.exc_text = None
        return True

    def __enter__(self) -> None:
        for logger in self._loggers:
            logger.addFilter(self)

    def __exit__(self, *_: object) -> None:
        for logger in self._loggers:
            logger.removeFilter(self)
