"""What a registry says about an image: manifests and indexes, of OCI and of Docker (version 2, schema 2).

Only reading: bytes to values, and a refusal by name of what cannot be opened here.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError, ImageNotPulled
from rollyard.images.reference import is_digest

INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
ACCEPT = ", ".join((*INDEXES, *MANIFESTS))
_LAYERS = tuple(
    kind + packing
    for kind, packings in (
        ("application/vnd.oci.image.layer.v1.tar", ("", "+gzip", "+zstd")),
        ("application/vnd.docker.image.rootfs.diff.tar", ("", ".gzip", ".zstd")),
    )
    for packing in packings
)
MAX_LAYERS = 512
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """What programs an image holds. Without a variant any will do."""

    os: str = "linux"
    architecture: str
    variant: str | None = None

    @property
    def text(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


class Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    """A blob: its digest, its size, what it is. `urls` are of foreign layers, which a registry does not hold itself."""

    media_type: str
    digest: str
    size: int
    urls: tuple[str, ...] = ()
    platform: dict[str, Any] | None = None


class Manifest(msgspec.Struct, frozen=True):
    config: Descriptor
    layers: tuple[Descriptor, ...]  # lowest first


class _Document(msgspec.Struct, frozen=True, rename="camel"):
    """All kinds in one; the members tell which it is."""

    schema_version: int = 0
    media_type: str = ""
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] | None = None
    manifests: tuple[Descriptor, ...] | None = None


def this_platform() -> Platform:
    return Platform(architecture=ARCHITECTURES.get(platform.machine(), platform.machine()))


def parse_platform(text: str) -> Platform:
    parts = text.split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise ConfigError(f"{text!r} is no platform", hint="OS/ARCHITECTURE[/VARIANT], such as linux/amd64")
    return Platform(os=parts[0], architecture=parts[1], variant=parts[2] if len(parts) == 3 else None)


def read_manifest(data: bytes, name: str) -> Manifest | tuple[Descriptor, ...]:
    """A manifest, or the images of an index. `name` is for errors."""
    try:
        found = msgspec.json.decode(data, type=_Document)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ImageNotPulled(f"{name}: the registry sent no manifest: {str(error)[:200]}") from error
    if found.schema_version == 1:
        raise ImageNotPulled(
            f"{name} has a manifest of schema 1, which is not read", hint="push the image again with a newer tool"
        )
    if found.manifests is not None and found.config is None:
        _check(found.manifests, name)
        return found.manifests
    if found.config is None or found.layers is None:
        what = found.media_type[:100] or "a document of no known kind"
        raise ImageNotPulled(f"{name} is no image: the registry sent {what}")
    _check((found.config, *found.layers), name)
    for layer in found.layers:
        _check_layer(layer, name)
    return Manifest(found.config, found.layers)


def choose_platform(entries: Sequence[Descriptor], wanted: Platform, name: str) -> Descriptor:
    """The image of an index that fits; one without a variant before others."""
    fitting = [entry for entry in entries if _fits(_platform(entry), wanted)]
    if not fitting:
        there = sorted({found.text for entry in entries if (found := _platform(entry)).os != "unknown"})
        raise ImageNotPulled(
            f"{name} is not there for {wanted.text}", hint=f"it is for {', '.join(there)[:300] or 'no platform'}"
        )
    return next((entry for entry in fitting if _platform(entry).variant is None), fitting[0])


def _platform(entry: Descriptor) -> Platform:
    said = entry.platform or {}
    variant = said.get("variant")
    return Platform(
        os=str(said.get("os", "linux")),
        architecture=str(said.get("architecture", this_platform().architecture)),
        variant=str(variant) if variant else None,
    )


def _fits(found: Platform, wanted: Platform) -> bool:
    same = (found.os, found.architecture) == (wanted.os, wanted.architecture)
    return same and (wanted.variant is None or found.variant == wanted.variant)


def _check(blobs: Sequence[Descriptor], name: str) -> None:
    for blob in blobs:
        if not is_digest(blob.digest):
            raise ImageNotPulled(f"{name} names a blob by {blob.digest[:100]!r}; only sha256 digests are known")
        if blob.size < 0:
            raise ImageNotPulled(f"{name} names a blob of {blob.size} bytes")
    if len(blobs) > MAX_LAYERS:
        raise ImageNotPulled(f"{name} has {len(blobs)} parts; more than {MAX_LAYERS} are not pulled")


def _check_layer(layer: Descriptor, name: str) -> None:
    if layer.urls or "foreign" in layer.media_type or "nondistributable" in layer.media_type:
        raise ImageNotPulled(
            f"{name} has a foreign layer, which its registry does not hold ({layer.media_type[:100]})",
            hint="save the image where it is complete, and take it in with `rollyard image add ARCHIVE`",
        )
    if layer.media_type not in _LAYERS:
        raise ImageNotPulled(f"{name} has a layer of a kind that is not known: {layer.media_type[:100]!r}")
