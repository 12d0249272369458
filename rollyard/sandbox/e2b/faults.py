"""From the SDK's exceptions to errors a caller can act on. The key is taken out of every text, and no cause is chained: a
traceback would print what the text leaves out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any

from rollyard.core.errors import (
    ConfigError,
    Error,
    MissingExtra,
    SandboxError,
    SandboxGone,
    SandboxInterrupted,
    SandboxUnavailable,
    Unsupported,
)

V2_FROM = (2, 51)
_BROKE = (408, 502, 504)  # the request may have been carried out


def sdk() -> Any:
    """The SDK, imported when a backend is entered."""
    try:
        import e2b
    except ImportError:
        raise MissingExtra("e2b", "e2b", why="the e2b backend") from None
    return e2b


def version() -> tuple[int, ...]:
    from importlib.metadata import version as installed

    return tuple(int(part) for part in installed("e2b").split(".")[:2])


def gone(sandbox_id: str) -> SandboxGone:
    return SandboxGone(f"sandbox {sandbox_id} is gone", hint="open another sandbox")


def translated(error: Exception, *, about: str, key: str | None) -> Error:
    """`about` is a sandbox's id, or "" for a call that makes one."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error)
    if key:
        text = text.replace(key, "[key]")
    text = " ".join(text.split())[:300]
    status = getattr(error, "status_code", None)
    if names & {"SandboxNotRunningException", "SandboxNotFoundException"}:
        return gone(about) if about else ConfigError(f"the server knows no such template: {text}")
    if "AuthenticationException" in names:
        return ConfigError("the server does not accept the key", hint="set E2B_API_KEY, or pass key=")
    if "RateLimitException" in names or "ServiceBusyException" in names or status in (429, 503):
        return SandboxUnavailable(f"the server is busy: {text}")
    if names & {"ConnectError", "ConnectTimeout"} and type(error).__module__.startswith("httpx"):
        return SandboxUnavailable(f"the sandbox server cannot be reached: {text}", hint="is its address right?")
    if status == 501:
        return Unsupported(f"this server does not serve it: {text}")
    if not about and (status in (404, 405) or text.startswith(("404", "405"))) and version() >= V2_FROM:
        return ConfigError(
            "this server has no /v2/sandboxes, which e2b 2.51 and later ask for",
            hint="pip install 'e2b>=2.21,<2.51' (the extra `cube`)",
        )
    if "InvalidArgumentException" in names or status == 400 or text.startswith("400"):
        return ConfigError(f"the server refused it: {text}")
    if status in _BROKE:
        return SandboxInterrupted(f"no answer came through the server's gateway: {text}")
    if names & {"SandboxUnreachableException", "TimeoutException"} or not names & {"SandboxException"}:
        return SandboxInterrupted(f"a call to the sandbox server broke: {type(error).__name__}: {text}")
    return SandboxError(f"{type(error).__name__}: {text}")


@contextlib.contextmanager
def speaking(about: str, key: str | None) -> Generator[None]:
    try:
        yield
    except (Error, asyncio.CancelledError, TimeoutError):
        raise
    except Exception as error:  # noqa: BLE001 - the SDK raises kinds of four packages; each becomes one of ours
        raise translated(error, about=about, key=key) from None
