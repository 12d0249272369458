"""From what SDKs raise to errors a caller can act on. A provider's key is taken out of every text and of what the SDK logs, so no
file of a provider has to think of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator, Sequence

from rollyard.core.errors import ConfigError, Error, SandboxError, SandboxGone, SandboxInterrupted, SandboxUnavailable
from rollyard.sandbox.remote.provider import SandboxProvider

HIDDEN = "[key]"


def gone_error(sandbox_id: str) -> SandboxGone:
    return SandboxGone(f"sandbox {sandbox_id} is gone", hint="open another sandbox")


def hide_secrets(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return " ".join(text.split())[:300]


def error_by_status(status: int | None, text: str, *, about: str, retry_after: float | None = None) -> Error | None:
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
        return gone_error(about) if about else ConfigError(f"the provider knows no such thing: {text}")
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
def translate_errors(provider: SandboxProvider, about: str = "") -> Generator[None]:
    """Around every call of an SDK. No cause is chained: a traceback would print what the text leaves out."""
    try:
        yield
    except (Error, asyncio.CancelledError):
        raise
    except Exception as error:  # noqa: BLE001 - SDKs raise kinds of several packages; each becomes one of ours
        text = hide_secrets(f"{type(error).__name__}: {error}", provider.secrets)
        raise provider.fault(error, text, about) from None


_TRANSPORTS = (
    "httpx", "httpx2", *(f"{core}.{part}" for core in ("httpcore", "httpcore2") for part in ("connection", "http11", "http2")),
)  # fmt: skip


_PLAIN = logging.Formatter()


class SecretFilter(logging.Filter):
    """Takes secrets out of what an SDK and its transports log, while a backend is open. A server may say them aloud."""

    def __init__(self, provider: SandboxProvider, names: Sequence[str]) -> None:
        super().__init__()
        self._provider, self._loggers = provider, [logging.getLogger(name) for name in (*names, *_TRANSPORTS)]

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if any(secret in said for secret in self._provider.secrets):
            record.msg, record.args = hide_secrets(said, self._provider.secrets), ()
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
