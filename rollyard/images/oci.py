"""Reading `docker save` archives, OCI archives and OCI layout directories: which layers, which settings.

Only reading: nothing here talks to a registry. Blobs are checked against the digests that name them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tarfile
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.images.archives import list_members
from rollyard.images.manifests import this_platform
from rollyard.images.reference import is_digest


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image's own defaults."""

    env: dict[str, str] = {}
    workdir: str = "/"
    user: str | None = None
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()


class Blobs(Protocol):
    """Files by name: in an archive or in a directory."""

    def names(self) -> set[str]: ...
    def open(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]: ...


class OciLayer(msgspec.Struct, frozen=True):
    """`blob` is the file's name among the blobs; `diff_id` is what its uncompressed bytes must hash to, in hexadecimal."""

    blob: str
    diff_id: str


class OciImage(msgspec.Struct, frozen=True, kw_only=True):
    layers: tuple[OciLayer, ...]  # lowest first
    config: ImageConfig
    tags: tuple[str, ...] = ()


class ArchiveBlobs:
    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive
        self._members = list_members(archive)

    def names(self) -> set[str]:
        return set(self._members)

    @contextlib.contextmanager
    def open(self, name: str) -> Generator[IO[bytes]]:
        member, hops = self._members.get(name), 0
        while member is not None and member.issym() and hops < 5:  # older docker links equal layers
            target = (Path(member.name).parent / member.linkname).as_posix()
            member, hops = self._members.get(_normal(target)), hops + 1
        stream = self._archive.extractfile(member) if member is not None else None
        if stream is None:
            raise ConfigError(f"the archive names {name!r} but does not hold it")
        with stream:
            yield stream


class DirectoryBlobs:
    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self) -> set[str]:
        return {path.relative_to(self._root).as_posix() for path in self._root.rglob("*") if path.is_file()}

    @contextlib.contextmanager
    def open(self, name: str) -> Generator[IO[bytes]]:
        path = (self._root / name).resolve()
        if not path.is_relative_to(self._root.resolve()) or not path.is_file():
            raise ConfigError(f"the layout names {name!r} but does not hold it")
        with path.open("rb") as stream:
            yield stream


def is_oci(names: set[str]) -> bool:
    return "oci-layout" in names or "manifest.json" in names


def read_image(blobs: Blobs) -> OciImage:
    """The one image in there, for this machine's architecture. Whatever the archive holds, only an `Error` of ours (or of
    the archive's reader) leaves here."""
    try:
        if "manifest.json" in blobs.names():
            return _docker_image(blobs)
        return _oci_image(blobs, _json(blobs, "index.json"))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the archive does not describe an image ({type(error).__name__}: {str(error)[:200]})",
            hint="save it again with `docker save` or as an OCI layout",
        ) from error


def _docker_image(blobs: Blobs) -> OciImage:
    entries = _json(blobs, "manifest.json")
    if not isinstance(entries, list) or not entries or "Layers" not in entries[0]:
        raise ConfigError("manifest.json is not one that `docker save` writes")
    if len(entries) > 1:
        tags = [str((entry.get("RepoTags") or ["?"])[0]) for entry in entries]
        raise ConfigError(f"the archive holds {len(entries)} images: {', '.join(tags)}", hint="save them one by one")
    entry: dict[str, Any] = entries[0]
    config = _json(blobs, entry["Config"])
    layers = zip(entry["Layers"], read_diff_ids(config, len(entry["Layers"])), strict=True)
    return OciImage(
        layers=tuple(OciLayer(blob, diff_id) for blob, diff_id in layers),
        config=read_config(config),
        tags=tuple(entry.get("RepoTags") or ()),
    )


def _oci_image(blobs: Blobs, index: dict[str, Any], depth: int = 0) -> OciImage:
    manifests: list[dict[str, Any]] = [m for m in index["manifests"] if _runs_here(m.get("platform") or {})]
    if len(manifests) != 1 or depth > 4:
        raise ConfigError(
            f"{len(manifests)} images in the archive are for {this_platform().text}; exactly one is wanted",
            hint="save a single image for one platform",
        )
    found = manifests[0]
    document = _blob_json(blobs, found["digest"])
    if "manifests" in document:
        return _oci_image(blobs, document, depth + 1)
    config = _blob_json(blobs, document["config"]["digest"])
    layers = zip(document["layers"], read_diff_ids(config, len(document["layers"])), strict=True)
    name = (found.get("annotations") or {}).get("io.containerd.image.name")
    return OciImage(
        layers=tuple(OciLayer(_blob_name(layer["digest"]), diff_id) for layer, diff_id in layers),
        config=read_config(config),
        tags=(name,) if name else (),
    )


def _runs_here(wanted: dict[str, Any]) -> bool:
    here = this_platform()
    return wanted.get("os", here.os) == here.os and wanted.get("architecture", here.architecture) == here.architecture


def read_diff_ids(document: dict[str, Any], layers: int) -> tuple[str, ...]:
    """The digests that an image's configuration names its unpacked layers by, in hexadecimal, lowest first. They become names of
    directories here, so nothing but a digest is one."""
    found: list[Any] = document["rootfs"]["diff_ids"]
    if len(found) != layers:
        raise ConfigError(f"the image has {layers} layers, and its configuration names {len(found)}")
    for diff_id in found:
        if not is_digest(str(diff_id)):
            raise ConfigError(f"a layer is named by {str(diff_id)[:100]!r}; only sha256 digests are known")
    return tuple(str(diff_id).partition(":")[2] for diff_id in found)


def read_config(document: dict[str, Any]) -> ImageConfig:
    config: dict[str, Any] = document.get("config") or {}
    env = dict(pair.partition("=")[::2] for pair in config.get("Env") or ())
    return ImageConfig(
        env=env,
        workdir=config.get("WorkingDir") or "/",
        user=config.get("User") or None,
        entrypoint=tuple(config.get("Entrypoint") or ()),
        cmd=tuple(config.get("Cmd") or ()),
    )


def _blob_name(digest: str) -> str:
    kind, _, value = digest.partition(":")
    if kind != "sha256" or not value.isalnum():
        raise ConfigError(f"a blob is named by {digest!r}; only sha256 digests are known")
    return f"blobs/sha256/{value}"


def _blob_json(blobs: Blobs, digest: str) -> dict[str, Any]:
    with blobs.open(_blob_name(digest)) as stream:
        data = stream.read(64 << 20)
    if hashlib.sha256(data).hexdigest() != digest.partition(":")[2]:
        raise ConfigError(f"the blob {digest} does not have the contents its name says: the archive is damaged")
    return json.loads(data)


def _json(blobs: Blobs, name: str) -> Any:
    with blobs.open(name) as stream:
        return json.loads(stream.read(64 << 20))


def _normal(path: str) -> str:
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts:
            parts.pop()
        elif part not in ("", ".", ".."):
            parts.append(part)
    return "/".join(parts)
