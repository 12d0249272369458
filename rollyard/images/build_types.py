"""What a build needs and gives: the image store and cache it asks, the options it is given, the image it returns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from rollyard.core.cache import replace_file
from rollyard.core.sandbox import Isolation, Network, Resources

DEFAULT_SHELL = ("/bin/sh", "-c")


class ImageDefaults(Protocol):
    """What an image says about programs started in it. `image` is its own id, which no other content gets: a name may be given
    to another image."""

    @property
    def image(self) -> str: ...
    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def workdir(self) -> str: ...
    @property
    def user(self) -> str | None: ...
    @property
    def entrypoint(self) -> tuple[str, ...]: ...
    @property
    def cmd(self) -> tuple[str, ...]: ...


@runtime_checkable
class Images(Protocol):
    """The part of an image store that a build needs. An unknown name raises `UnknownName`."""

    async def resolve(self, image: str) -> ImageDefaults: ...


class BuildCache(Protocol):
    """Small records under a key. `FileCache` is one."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, value: bytes) -> None: ...
    def drop(self, key: str) -> None: ...


class FileCache:
    """A directory of small files. `made` are the keys that this object was given."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: set[str] = set()
        root.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> bytes | None:
        path = self.root / key
        return path.read_bytes() if path.is_file() else None

    def put(self, key: str, value: bytes) -> None:
        replace_file(self.root / key, value)
        self.made.add(key)

    def drop(self, key: str) -> None:
        (self.root / key).unlink(missing_ok=True)


class NoCache:
    """Knows nothing and keeps nothing."""

    def get(self, key: str) -> bytes | None:
        return None

    def put(self, key: str, value: bytes) -> None:
        return None

    def drop(self, key: str) -> None:
        return None


class ForeseenStates:
    """Says of every state that it is here, and notes its key: with it a build looks its states up and runs nothing."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def get(self, key: str) -> bytes | None:
        self.keys.append(key)
        return key.encode()

    def put(self, key: str, value: bytes) -> None:
        return None

    def drop(self, key: str) -> None:
        return None


class ForeseenImages:
    """An image store that has foreseen states too."""

    def __init__(self, images: Images, states: ForeseenStates) -> None:
        self._images, self._states = images, states

    async def resolve(self, image: str) -> ImageDefaults:
        return Built(image=image) if image in self._states.keys else await self._images.resolve(image)


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """An image and what its Dockerfile says about running it. `entrypoint` and `cmd` are recorded; a sandbox does not run
    them by itself."""

    image: str
    env: Mapping[str, str] = {}
    workdir: str = "/"
    user: str | None = None
    shell: tuple[str, ...] = DEFAULT_SHELL
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    labels: Mapping[str, str] = {}
    expose: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    healthcheck: str | None = None
    stop_signal: str | None = None
    ran: int = 0  # instructions carried out
    cached: int = 0  # instructions found in the cache


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`network` is what RUN commands may reach; `env` is for them alone, and is in no image and no key; `timeout_s` covers the
    whole build. `may_open` raises for an image that the author of the Dockerfile may not open. `say` is called with each
    instruction and all that its command printed."""

    dockerfile: str = "Dockerfile"
    args: Mapping[str, str] = {}
    target: str | None = None
    network: Network = "none"
    allowed_hosts: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    timeout_s: float = 600.0
    resources: Resources = Resources()
    min_isolation: Isolation = "landlock"
    allow_unsafe: bool = False
    may_open: Callable[[str], Awaitable[None]] | None = None
    say: Callable[[str], None] | None = None
