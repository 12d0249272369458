"""What a store knows by name: one small JSON file per image or snapshot, one for names and aliases.

Files are replaced whole by `rename` and read without a lock. A record never changes; names may be moved to another image.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from rollyard.core.cache import hold_lock_async, replace_file
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.core.home import private_dir
from rollyard.images.oci import ImageConfig
from rollyard.images.reference import canonical_name

Kind = Literal["image", "snapshot"]


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`stack` are references, topmost first: `tree:<name>`, `layer:<id>`, `dir:<path>` or `host`. `over` are frozen uppers
    of the host image's writable trees, by target, topmost first."""

    id: str
    kind: Kind = "image"
    created_at: float = 0.0
    source: str = ""
    stack: tuple[str, ...]
    over: Mapping[str, tuple[str, ...]] = {}
    config: ImageConfig = ImageConfig()
    bytes: int = 0


HOST = ImageRecord(id="host", source="host", stack=("host",))


class ImageCatalog:
    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self) -> dict[str, str]:
        try:
            return msgspec.json.decode((self.root / "names.json").read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}

    def records(self) -> list[ImageRecord]:
        found = (self.load(path.stem) for path in (self.root / "images").glob("*.json"))
        return sorted((record for record in found if record is not None), key=lambda record: record.created_at)

    def load(self, image_id: str) -> ImageRecord | None:
        if image_id == "host":
            return HOST
        if not image_id.startswith(("img_", "snap_")) or "/" in image_id:
            return None
        try:
            return msgspec.json.decode((self.root / "images" / f"{image_id}.json").read_bytes(), type=ImageRecord)
        except FileNotFoundError:
            return None

    def look_up(self, image: str) -> ImageRecord | None:
        """By name, alias or id; `python:3.12` and `docker.io/library/python:3.12` are one name."""
        names = self.names()
        if (record := self.load(names.get(image, image))) is not None or (whole := canonical_name(image)) is None:
            return record
        same = next((target for name, target in names.items() if canonical_name(name) == whole), None)
        return None if same is None else self.load(same)

    def save(self, record: ImageRecord) -> ImageRecord:
        """Keep a record; when its id is taken, the one that is there stands."""
        if (known := self.load(record.id)) is not None:
            return known
        record = msgspec.structs.replace(record, created_at=time.time())
        replace_file(private_dir(self.root / "images") / f"{record.id}.json", msgspec.json.encode(record))
        return record

    async def name(self, image_id: str, names: Sequence[str]) -> None:
        for name in names:
            if not name or name == "host" or name.startswith(("/", ".", "-", "~", "img_", "snap_")):
                raise ConfigError(f"{name!r} cannot name an image", hint="use a name such as `python:3.11-slim`")
        if names:
            async with hold_lock_async(self.root / "locks" / "names", 30):
                self._write_names(self.names() | dict.fromkeys(names, image_id))

    async def remove(self, image: str) -> list[str]:
        """Forget a name, and with its last name the image; given by id, the image with all its names."""
        async with hold_lock_async(self.root / "locks" / "names", 30):
            names = self.names()
            if image == "host" or (image not in names and self.load(image) is None):
                raise UnknownName("image to remove", image, sorted(names))
            image_id = names.get(image, image)
            gone = [image] if image in names else [name for name, target in names.items() if target == image_id]
            left = {name: target for name, target in names.items() if name not in gone}
            self._write_names(left)
            if image_id != "host" and image_id not in left.values():
                (self.root / "images" / f"{image_id}.json").unlink(missing_ok=True)
                gone.append(image_id)
        return gone

    def _write_names(self, names: dict[str, str]) -> None:
        replace_file(self.root / "names.json", msgspec.json.encode(names, order="sorted"))
