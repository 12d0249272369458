"""How an image gets in: from a directory, a tar of a root file system, a `docker save` archive or an OCI layout."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path
from typing import IO

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.images.archives import compression, open_archive, unpack
from rollyard.images.catalog import ImageRecord
from rollyard.images.oci import ArchiveBlobs, Blobs, DirectoryBlobs, ImageConfig, is_oci, read_image
from rollyard.images.snapshots import copy_upper
from rollyard.images.stacks import Stacks
from rollyard.images.trees import manifest, tree_digest

FIRST_MEMBERS = 4096


def import_image(stacks: Stacks, path: Path) -> tuple[ImageRecord, tuple[str, ...]]:
    """A record named by what it holds, and the tags the archive carried. The record is not kept yet."""
    if path.is_dir():
        if (path / "oci-layout").is_file():
            return _import_oci(stacks, DirectoryBlobs(path), str(path))
        return _import_directory(stacks, path), ()
    with path.open("rb") as stream:
        if compression(stream) != "zstd":
            with open_archive(stream) as archive:
                if is_oci(_first_names(archive)):
                    return _import_oci(stacks, ArchiveBlobs(archive), str(path))
    with path.open("rb") as stream:
        tree, size = _unpack(stacks, stream, None)
    return make_record([f"tree:{tree}"], str(path), ImageConfig(), size), ()


def _import_oci(stacks: Stacks, blobs: Blobs, source: str) -> tuple[ImageRecord, tuple[str, ...]]:
    image = read_image(blobs)
    stack: list[str] = []
    size = 0
    for layer in image.layers:
        if not stacks.has(layer.diff_id):
            with blobs.open(layer.blob) as stream:
                size += unpack_layer(stacks, stream, layer.diff_id)
        stack.insert(0, f"tree:{layer.diff_id[:24]}")
    return make_record(stack, source, image.config, size), image.tags


def unpack_layer(stacks: Stacks, stream: IO[bytes], diff_id: str, *, max_bytes: int | None = None) -> int:
    """A layer becomes the tree that its digest names; gives the bytes of its files."""
    return _unpack(stacks, stream, diff_id, max_bytes)[1]


def _import_directory(stacks: Stacks, path: Path) -> ImageRecord:
    name = ""
    with stacks.making(lambda: name) as scratch:
        size = copy_upper(path, scratch)
        name = tree_digest(manifest(scratch))[:24]
    return make_record([f"tree:{name}"], str(path), ImageConfig(), size)


def _unpack(stacks: Stacks, stream: IO[bytes], expected: str | None, max_bytes: int | None = None) -> tuple[str, int]:
    name = ""
    with stacks.making(lambda: name) as scratch:
        unpacked = unpack(stream, scratch, whiteouts=expected is not None, max_bytes=max_bytes)
        if expected is not None and unpacked.digest != expected:
            raise ConfigError(
                f"a layer's contents are {unpacked.digest[:12]}, not the {expected[:12]} it is named by",
                hint="the archive is damaged: save it again",
            )
        name = unpacked.digest[:24]
    return name, unpacked.bytes


def make_record(stack: list[str], source: str, config: ImageConfig, size: int) -> ImageRecord:
    digest = hashlib.sha256(msgspec.json.encode([stack, config])).hexdigest()[:24]
    return ImageRecord(id=f"img_{digest}", source=source, stack=tuple(stack), config=config, bytes=size)


def _first_names(archive: tarfile.TarFile) -> set[str]:
    """Not all of them: a root file system of a million files is not read through to learn that it is one."""
    found: set[str] = set()
    for member in archive:
        found.add(member.name.removeprefix("./"))
        if len(found) > FIRST_MEMBERS or is_oci(found):
            break
    return found
