"""What a provider's file gives: a `SandboxProvider` that makes and finds sandboxes, and a `SandboxLink` to each of them.

Their methods may raise whatever the SDK raises: `SandboxProvider.fault` says which of our errors that is, and `translate_errors`
is around every call.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from rollyard.core.errors import ConfigError, Error, MissingExtra, Unsupported
from rollyard.core.sandbox import Resources, SandboxSpec

KEPT = "rollyard-"  # how the names of images begin that this project makes at a provider's


class FoundSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox as a provider's list tells of it; `expires_at` is for providers that know when they will end it."""

    id: str
    image: str
    labels: Mapping[str, str]
    created_at: float
    state: str = "running"
    expires_at: float | None = None


class KeptImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image that was made of a sandbox: its name, and what opens it."""

    name: str
    image: str


class SandboxRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a provider: the spec, the image it means, all labels, how long the sandbox may live without us
    (`lease_s`), and a key that is the same for every try."""

    spec: SandboxSpec
    image: str
    labels: Mapping[str, str]
    lease_s: float
    key: str


class SandboxLink(ABC):
    """One sandbox. Text is ASCII; bytes go by `put` and `get`. What a provider does not have is `Unsupported`."""

    id: str

    @abstractmethod
    async def run(self, line: str, *, env: Mapping[str, str], timeout: float) -> str:
        """The stdout (stderr may be mixed in) of a line for a POSIX shell, whatever its exit code. The line is one simple
        command; its environment is what the sandbox was made with, and `env`."""

    @abstractmethod
    async def put(self, path: str, data: bytes) -> None: ...
    @abstractmethod
    async def get(self, path: str) -> bytes: ...
    @abstractmethod
    async def alive(self) -> bool: ...
    @abstractmethod
    async def keep(self, seconds: float) -> None:
        """Let it live for `seconds` more without us: said to the provider, or anything that it counts as use."""

    def close(self) -> None:
        """Let go of what this process holds for it, such as connections; the sandbox is left as it is."""
        return

    def as_user(self, user: str) -> SandboxLink:
        """The same sandbox, with programs and files of this user."""
        raise Unsupported(f"sandbox {self.id} runs programs as one user", hint="leave `user` out")

    async def extend(self, end: float, labels: Mapping[str, str]) -> None:
        """What is needed beside `keep` for an end at another time."""
        raise Unsupported(f"sandbox {self.id} cannot be extended by its provider", hint="open it for longer")

    async def snapshot(self) -> str:
        raise Unsupported(f"the provider of sandbox {self.id} takes no snapshots", hint="use another backend")

    async def keep_image(self, name: str) -> str:
        """What to open for a copy of this sandbox's files, which `SandboxProvider.find_image` finds by this name."""
        raise Unsupported(f"the provider of sandbox {self.id} keeps no images", hint="use another backend")

    async def pause(self) -> None:
        raise Unsupported(f"the provider of sandbox {self.id} has no pause", hint="end it and open another")

    async def resume(self, seconds: float) -> None:
        raise Unsupported(f"the provider of sandbox {self.id} has no pause", hint="end it and open another")


class LiveProgram(Protocol):
    """A program whose stdin and stdout are connected to this process. Its stdout is ASCII text."""

    def output(self) -> AsyncIterator[str]: ...
    def last_errors(self) -> bytes:
        """The end of its stderr."""
        ...

    async def write(self, data: bytes) -> None: ...
    async def close_stdin(self) -> None: ...
    async def kill(self) -> None: ...
    async def disconnect(self) -> None: ...


class StreamingLink(SandboxLink):
    """For SDKs that stream programs, and whose files are any file of the sandbox: `put` writes it, `read` bounds it."""

    @abstractmethod
    async def start(self, line: str, *, env: Mapping[str, str]) -> LiveProgram:
        """A line as for `run`, with a stdin."""

    @abstractmethod
    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Raises `PathError` with EFBIG for a larger file."""

    async def get(self, path: str) -> bytes:
        return await self.read(path, max_bytes=2**63)


class SandboxProvider(ABC):
    """One account at one service. `secrets` are texts that no error and no log may show. One that `keeps_images` makes them of
    sandboxes, finds them by name, lists and deletes them."""

    keeps_images: ClassVar[bool] = False

    def __init__(self, key: str | None = None, url: str | None = None) -> None:
        self._key, self._url = key, url
        self._sdk: Any = None

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self._key,) if self._key else ()

    @abstractmethod
    async def enter(self) -> None: ...
    @abstractmethod
    async def leave(self) -> None: ...
    @abstractmethod
    async def create(self, request: SandboxRequest) -> SandboxLink: ...
    @abstractmethod
    async def find(self, sandbox_id: str) -> tuple[SandboxLink, FoundSandbox]: ...
    @abstractmethod
    async def list(self, labels: Mapping[str, str]) -> Sequence[FoundSandbox]: ...
    @abstractmethod
    async def delete(self, sandbox_id: str) -> bool:
        """Whether this call did it; False when it was gone."""

    async def take_image(self, image: str, resources: Resources) -> str:
        """What `create` takes for an image of this name, made once where it has to be."""
        return image

    async def find_image(self, name: str) -> str | None:
        return None

    async def list_images(self) -> Sequence[KeptImage]:
        return ()

    async def delete_image(self, image: str) -> None:
        """One that is gone is no error."""
        raise Unsupported(f"this provider keeps no images, so there is no {image!r} to delete")

    @abstractmethod
    def delete_now(self, ids: Sequence[str], seconds: float) -> Sequence[str]:
        """The same for many, without a loop; returns those that may still be there."""

    @abstractmethod
    def fault(self, error: Exception, text: str, about: str) -> Error:
        """Which of our errors an SDK's error is; `text` is what may be shown of it, `about` a sandbox's id or ""."""


def import_sdk(module: str, package: str, extra: str) -> Any:
    """A provider's SDK, imported when a backend is entered."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(package, extra, why=f"the {extra} backend") from None


def require_key(backend: str, key: str | None, *, what: str = "key", hint: str) -> str:
    if not key:
        raise ConfigError(f"the {backend} backend needs a {what}", hint=hint)
    return key


def whole_minutes(seconds: float) -> int:
    return max(1, math.ceil(seconds / 60))


def enum_text(value: Any) -> str:
    """SDKs give a state as a text or as an enum of texts."""
    return str(getattr(value, "value", value))
