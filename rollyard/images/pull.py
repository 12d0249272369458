"""Pulling an image from a registry into the image store: manifest, configuration, and the layers that are not here.

A layer is fetched and unpacked once per machine, however many processes want it: under a lock of its own, at most `DOWNLOADS`
at a time. What was fetched of a layer stays when a process dies, and the next one goes on from there. Nothing is opened before
all its bytes have the digest that names them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import msgspec

from rollyard.core.cache import hold_lock_async, hold_one_of
from rollyard.core.errors import ConfigError, ImageNotPulled, SandboxUnavailable
from rollyard.core.home import private_dir
from rollyard.images.catalog import ImageRecord
from rollyard.images.imports import make_record, unpack_layer
from rollyard.images.manifests import (
    Descriptor,
    Manifest,
    Platform,
    choose_platform,
    read_manifest,
    this_platform,
)
from rollyard.images.oci import read_config, read_diff_ids
from rollyard.images.reference import ImageReference
from rollyard.images.registries import Registries
from rollyard.images.registry_client import RegistryClient
from rollyard.images.stacks import Stacks

T = TypeVar("T")
PULL_TIMEOUT_S = 3600.0
DOWNLOADS = 3  # layers at a time, on one machine
MAX_IMAGE_BYTES = 64 << 30  # compressed
MAX_LAYER_BYTES = 128 << 30  # unpacked
_KEEP_FREE = 1 << 30  # of the disk
_MAX_NESTING = 3


class PullProgress(NamedTuple):
    """How far a pull is: bytes that are here of those that are fetched, layers that are unpacked of all."""

    bytes: int
    total_bytes: int
    layers: int
    total_layers: int


class PulledImage(msgspec.Struct, frozen=True, kw_only=True):
    """What a pull did. `digest` is of the image's manifest; `endpoint` is the server that gave it."""

    record: ImageRecord
    reference: str
    digest: str
    platform: str
    endpoint: str
    layers: int
    fetched_layers: int
    fetched_bytes: int


OnProgress = Callable[[PullProgress], None]


async def pull(
    stacks: Stacks,
    reference: ImageReference,
    registries: Registries,
    *,
    platform: Platform | None = None,
    timeout_s: float = PULL_TIMEOUT_S,
    on_progress: OnProgress | None = None,
) -> PulledImage:
    """The image, with all its layers in the store; its record is not kept yet."""
    endpoints = registries.endpoints(reference)
    if not endpoints:
        raise ImageNotPulled(
            f"{reference.text} is not pulled: its registry is not one that you named",
            hint=f"--pull {reference.registry}, or `rollyard image pull {reference.text}`",
        )
    try:
        with anyio.fail_after(timeout_s):
            async with AsyncExitStack() as stack:
                clients = [
                    await stack.enter_async_context(RegistryClient(endpoint, reference, registries))
                    for endpoint in endpoints
                ]
                return await _Pull(stacks, clients, platform or this_platform(), timeout_s, on_progress).run()
    except TimeoutError:
        raise SandboxUnavailable(
            f"{reference.text} was not pulled within {timeout_s:g} s",
            hint="what was fetched is kept: pulling again goes on from there",
        ) from None


class _Pull:
    def __init__(
        self,
        stacks: Stacks,
        clients: list[RegistryClient],
        platform: Platform,
        timeout_s: float,
        on_progress: OnProgress | None,
    ) -> None:
        self._stacks, self._clients, self._platform = stacks, clients, platform
        self._reference = clients[0].reference
        self._timeout_s, self._on_progress = timeout_s, on_progress
        self._places = anyio.CapacityLimiter(DOWNLOADS)
        self._have: dict[str, int] = {}
        self._total = self._done = self._layers = 0
        self._unpacked = 0

    async def run(self) -> PulledImage:
        digest, manifest = await self._manifest()
        config = _as_config(await self._ask(lambda client: client.document(manifest.config)), self._reference.text)
        self._check_platform(config)
        try:
            diff_ids = read_diff_ids(config, len(manifest.layers))
            settings = read_config(config)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ImageNotPulled(
                f"{self._reference.text}: its configuration is none of an image ({error!r:.100})"
            ) from error
        missing = {
            diff_id: layer
            for diff_id, layer in zip(diff_ids, manifest.layers, strict=True)
            if not self._stacks.has(diff_id)
        }
        self._total, self._layers = sum(layer.size for layer in missing.values()), len(set(diff_ids))
        self._done = self._layers - len(missing)
        self._check_size()
        try:
            async with anyio.create_task_group() as group:
                for diff_id, layer in missing.items():
                    group.start_soon(self._layer, diff_id, layer)
        except ExceptionGroup as failed:  # the first one ended the others
            raise failed.exceptions[0] from None
        source = f"{self._reference.registry}/{self._reference.repository}@{digest}"
        record = make_record(
            [f"tree:{diff_id[:24]}" for diff_id in reversed(diff_ids)], source, settings, self._unpacked
        )
        return PulledImage(
            record=record,
            reference=self._reference.text,
            digest=digest,
            platform=self._platform.text,
            endpoint=self._clients[0].endpoint.url,
            layers=len(diff_ids),
            fetched_layers=len(self._have),
            fetched_bytes=sum(self._have.values()),
        )

    async def _manifest(self) -> tuple[str, Manifest]:
        version = self._reference.version
        for _ in range(_MAX_NESTING):
            data = await self._ask(lambda client, version=version: client.manifest(version))
            found = read_manifest(data, self._reference.text)
            if isinstance(found, Manifest):
                return f"sha256:{hashlib.sha256(data).hexdigest()}", found
            version = choose_platform(found, self._platform, self._reference.text).digest
        raise ImageNotPulled(f"{self._reference.text} is an index of indexes of indexes")

    def _check_platform(self, config: dict[str, Any]) -> None:
        found = f"{config.get('os') or 'linux'}/{config.get('architecture') or self._platform.architecture}"
        if found != f"{self._platform.os}/{self._platform.architecture}":
            raise ImageNotPulled(
                f"{self._reference.text} is for {found[:100]}, not for {self._platform.text}",
                hint=f"--platform {found[:100]} pulls it all the same",
            )

    def _check_size(self) -> None:
        free = shutil.disk_usage(self._stacks.root).free
        if self._total > MAX_IMAGE_BYTES:
            raise ImageNotPulled(
                f"{self._reference.text} has {self._total:,} bytes of layers, more than {MAX_IMAGE_BYTES:,}"
            )
        if self._total + _KEEP_FREE > free:
            raise ConfigError(
                f"{self._reference.text} has {self._total:,} bytes to fetch, and {self._stacks.root} has {free:,} left",
                hint="free some space, or set ROLLYARD_HOME to another disk",
            )

    async def _layer(self, diff_id: str, blob: Descriptor) -> None:
        """One layer: waits for another process that is fetching it, and then finds it here."""
        locks = private_dir(self._stacks.root / "locks")
        async with self._places, hold_lock_async(locks / f"layer-{diff_id}", self._timeout_s):
            if not self._stacks.has(diff_id):
                path = private_dir(self._stacks.root / "downloads") / blob.digest.partition(":")[2]
                slots = [locks / f"download-{number}" for number in range(DOWNLOADS)]
                async with hold_one_of(slots, self._timeout_s):
                    await self._ask(lambda client: client.fetch(blob, path, lambda have: self._count(diff_id, have)))
                    self._count(diff_id, blob.size)
                    self._unpacked += await anyio.to_thread.run_sync(self._unpack, path, diff_id)
                    path.unlink()
            else:
                self._total -= blob.size
            self._done += 1
            self._tell()

    def _unpack(self, path: Path, diff_id: str) -> int:
        room = min(MAX_LAYER_BYTES, max(0, shutil.disk_usage(self._stacks.root).free - _KEEP_FREE))
        try:
            with path.open("rb") as stream:
                return unpack_layer(self._stacks, stream, diff_id, max_bytes=room)
        except ConfigError as error:
            path.unlink()  # its digest is right, so fetching it again gives the same
            raise ImageNotPulled(f"{self._reference.text}: {error.message}", hint=error.hint) from error

    async def _ask(self, ask: Callable[[RegistryClient], Awaitable[T]]) -> T:
        """Of the first server that has an answer, which is asked first from then on. A mirror that lies is an error."""
        reasons: list[str] = []
        clients = list(self._clients)
        for client in clients:
            try:
                answer = await ask(client)
            except (SandboxUnavailable, ImageNotPulled) as error:
                if isinstance(error, ImageNotPulled) and error.status is None:
                    raise
                reasons.append(error.message)
                if client is clients[-1]:
                    raise _with_reasons(error, reasons[:-1]) from error
                continue
            self._clients.sort(key=lambda one: one is not client)
            return answer
        raise AssertionError("unreachable: the last server's error is raised")

    def _count(self, diff_id: str, have: int) -> None:
        self._have[diff_id] = have
        self._tell()

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(PullProgress(sum(self._have.values()), self._total, self._done, self._layers))


def _as_config(data: bytes, name: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ImageNotPulled(f"{name}: its configuration is no JSON") from error
    if not isinstance(found, dict):
        raise ImageNotPulled(f"{name}: its configuration is none of an image")
    return found


def _with_reasons(
    error: SandboxUnavailable | ImageNotPulled, mirrors: Sequence[str]
) -> SandboxUnavailable | ImageNotPulled:
    """The registry's own error, and what its mirrors said before."""
    if not mirrors:
        return error
    message = f"{error.message}; before that: {'; '.join(mirrors)}"
    if isinstance(error, SandboxUnavailable):
        return SandboxUnavailable(message, retry_after=error.retry_after, hint=error.hint)
    return ImageNotPulled(message, status=error.status, hint=error.hint)
