"""Templates and snapshots as E2B's clients name them: names, tags and builds that lead to an image of the engine.

All of it is in the plane's storage, each template under its owner: every replica knows it, and a restart loses none. Tags point
at builds; `name` means `name:default`, and `owner/name` is the same template said in full. A snapshot is a template that was not
built. The files of a COPY are blobs of at most `PART` bytes each, listed under the hash that the client gave them.
"""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from rollyard.core.ids import new_id
from rollyard.core.sandbox import Resources
from rollyard.plane.compat.e2b.errors import E2bRefusal
from rollyard.plane.service.typed_records import TypedRecord, TypedRecords
from rollyard.plane.storage.protocol import PlaneStore

BASE = "base"
DEFAULT_TAG = "default"
PART = 32 * 2**20
MAX_ARCHIVE = 4 * 2**30
_IMAGES = "image"  # the scope of all images: their names are of no owner
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,127}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_HASH = re.compile(r"[A-Za-z0-9_-]{1,128}")
BuildState = Literal["waiting", "building", "ready", "error"]


class BuildLine(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    message: str
    level: str = "info"
    step: str | None = None


class TemplateBuild(msgspec.Struct, kw_only=True):
    """One build of a template: its image once it is ready, and how programs are started there. `asked` are the steps, `owner` and
    `key_id` are who asked, and `sandbox` is where they are carried out: the server that goes on with it needs no more."""

    id: str
    template: str
    owner: str
    created_at: float
    state: BuildState = "waiting"
    key_id: str = ""
    asked: Mapping[str, Any] = {}
    sandbox: str | None = None
    image: str = ""
    env: dict[str, str] = {}
    user: str | None = None
    workdir: str | None = None
    start: str | None = None
    ready: str | None = None
    resources: Resources = Resources()
    error: str = ""
    failed_step: str | None = None
    lines: list[BuildLine] = []


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """`sandbox` is what a snapshot was taken of, and "" for what was built. `tags` are builds by their tag."""

    id: str
    owner: str
    name: str
    created_at: float
    tags: Mapping[str, str] = {}
    tagged_at: Mapping[str, float] = {}
    sandbox: str = ""

    @property
    def key(self) -> str:
        """Under which it is kept: one name of one owner is one template."""
        return self.name or self.id

    def full_name(self, tag: str = DEFAULT_TAG) -> str:
        return f"{self.owner}/{self.name}:{tag}" if self.name else f"{self.id}:{tag}"

    def point(self, tags: list[str], build_id: str) -> Template:
        now = time.time()
        return replace(
            self,
            tags={**self.tags, **dict.fromkeys(tags, build_id)},
            tagged_at={**self.tagged_at, **dict.fromkeys(tags, now)},
        )

    def unpoint(self, tags: list[str]) -> Template:
        return replace(
            self,
            tags={tag: build for tag, build in self.tags.items() if tag not in tags},
            tagged_at={tag: at for tag, at in self.tagged_at.items() if tag not in tags},
        )


class _ImageOrigin(msgspec.Struct, frozen=True, kw_only=True):
    template: str
    build: str


class _Archive(msgspec.Struct, frozen=True, kw_only=True):
    """The sha256 of each part."""

    parts: tuple[str, ...]


class Templates:
    def __init__(self, store: PlaneStore, *, part: int = PART, clock: Callable[[], float] = time.time) -> None:
        self._store, self._part, self.clock = store, part, clock
        self._templates = TypedRecords(store, "e2b_template", Template, clock=clock)
        self.builds = TypedRecords(store, "e2b_build", TemplateBuild, clock=clock)
        self._images = TypedRecords(store, "e2b_image", _ImageOrigin, clock=clock)
        self._archives = TypedRecords(store, "e2b_archive", _Archive, clock=clock)

    async def begin(
        self, owner: str, text: str, tags: list[str], resources: Resources
    ) -> tuple[Template, TemplateBuild]:
        """A build that waits for its steps, of a template that is there or is made."""
        name, tag = _split(text, owner)
        if not _NAME.fullmatch(name):
            raise E2bRefusal("invalid_argument", f"template name {name!r}: lower case letters, digits, - and _")
        for one in (*tags, *([tag] if tag else ())):
            _check_tag(one)
        new = Template(id=new_id("tpl"), owner=owner, name=name, created_at=self.clock())
        build = TemplateBuild(
            id=str(uuid.uuid4()), template="", owner=owner, created_at=self.clock(), resources=resources
        )
        wanted = sorted({*tags, *([tag] if tag else ())}) or [DEFAULT_TAG]
        return await self._add(new, wanted, build), build

    async def add_snapshot(self, owner: str, text: str, sandbox_id: str, build: TemplateBuild) -> tuple[Template, str]:
        """A template of what a sandbox holds; also the tag that it has."""
        name, tag = _split(text, owner)
        if name and not _NAME.fullmatch(name):
            raise E2bRefusal("invalid_argument", f"snapshot name {name!r}: lower case letters, digits, - and _")
        new = Template(id=new_id("snp"), owner=owner, name=name, created_at=self.clock(), sandbox=sandbox_id)
        template = await self._add(new, [tag or DEFAULT_TAG], build)
        await self.note_image(build)
        return template, tag or DEFAULT_TAG

    async def _add(self, new: Template, tags: list[str], build: TemplateBuild) -> Template:
        """The build first, so that no tag ever points at none."""
        kept = await self._templates.get(new.owner, new.key)
        build.template = new.id if kept is None else kept.value.id
        await self.builds.add(build.template, build.id, build)
        template = await self._templates.update(new.owner, new.key, lambda old: (old or new).point(tags, build.id))
        if template.id != build.template:  # another made it meanwhile
            build.template = template.id
            await self.builds.add(template.id, build.id, build)
        return template

    async def note_image(self, build: TemplateBuild) -> None:
        """From here on the image leads to this build."""
        origin = _ImageOrigin(template=build.template, build=build.id)
        await self._images.update(_IMAGES, build.image, lambda _: origin)

    async def point(self, template: Template, tags: list[str], build_id: str) -> None:
        await self._templates.update(template.owner, template.key, lambda old: (old or template).point(tags, build_id))

    async def unpoint(self, template: Template, tags: list[str]) -> None:
        await self._templates.update(template.owner, template.key, lambda old: (old or template).unpoint(tags))

    async def remove(self, template: Template) -> list[str]:
        """The images that no template uses."""
        builds = await self.builds_of(template)
        await self._templates.drop(template.owner, template.key)
        await self.builds.drop(template.id)
        images = [build.image for build in builds if build.image]
        for image in images:
            await self._images.drop(_IMAGES, image)
        return images

    async def all(self, owner: str) -> list[Template]:
        """The owner's, newest first."""
        found = [one.value for one in await self._templates.list(owner)]
        return sorted(found, key=lambda one: (-one.created_at, one.id))

    async def builds_of(self, template: Template) -> list[TemplateBuild]:
        """Oldest first; one at least."""
        found = [one.value for one in await self.builds.list(template.id)]
        return sorted(found, key=lambda one: one.created_at)

    async def build(self, template: Template, build_id: str) -> TypedRecord[TemplateBuild] | None:
        return await self.builds.get(template.id, build_id)

    async def find(self, owner: str, text: str) -> tuple[Template, str] | None:
        """A template by its id or name, and the tag that was meant."""
        name, tag = _split(text, owner)
        kept = await self._templates.get(owner, name)
        found = None if kept is None else kept.value
        if found is None and name.startswith(("tpl_", "snp_")):
            found = next((one for one in await self.all(owner) if one.id == name), None)
        return None if found is None else (found, tag or DEFAULT_TAG)

    async def ready(self, owner: str, text: str) -> TemplateBuild | None:
        """The build that a sandbox of this template opens. Raises where the template is there and has none."""
        found = await self.find(owner, text)
        if found is None:
            return None
        template, tag = found
        kept = await self.build(template, template.tags.get(tag, ""))
        if kept is None or kept.value.state != "ready":
            state = "no such tag" if kept is None else kept.value.state
            raise E2bRefusal("not_found", f"template {text} cannot be opened: {state}", 404)
        return kept.value

    async def of_image(self, image: str) -> TemplateBuild | None:
        """The build that made this image, for sandboxes that are known by it."""
        origin = await self._images.get(_IMAGES, image) if image else None
        kept = None if origin is None else await self.builds.get(origin.value.template, origin.value.build)
        return None if kept is None else kept.value

    # the files of a COPY

    async def has_archive(self, owner: str, digest: str) -> bool:
        if not _HASH.fullmatch(digest):
            raise E2bRefusal("invalid_argument", "not a hash of files")
        return await self._archives.get(owner, digest) is not None

    async def take_archive(self, owner: str, digest: str, stream: AsyncIterator[bytes]) -> None:
        """Whole or not at all."""
        parts, part, size = list[str](), bytearray(), 0
        async for piece in stream:
            size += len(piece)
            if size > MAX_ARCHIVE:
                raise E2bRefusal("invalid_argument", f"more than {MAX_ARCHIVE} bytes", 413)
            part += piece
            while len(part) >= self._part:
                parts.append(await self._put(owner, bytes(part[: self._part])))
                del part[: self._part]
        if part or not parts:
            parts.append(await self._put(owner, bytes(part)))
        archive = _Archive(parts=tuple(parts))
        await self._archives.update(owner, digest, lambda _: archive)

    async def _put(self, owner: str, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        await self._store.put_blob(name, data, owner=owner, at=self.clock())
        return name

    async def read_archive(self, owner: str, digest: str) -> AsyncIterator[bytes]:
        kept = await self._archives.get(owner, digest)
        for name in () if kept is None else kept.value.parts:
            yield await self._store.get_blob(name)


def _split(text: str, owner: str) -> tuple[str, str]:
    """`owner/name:tag` as name and tag. Another owner's template is unknown here."""
    whole, _, tag = text.partition(":")
    space, slash, name = whole.rpartition("/")
    return (whole, tag) if slash and space != owner else (name, tag)


def _check_tag(tag: str) -> str:
    if not _TAG.fullmatch(tag):
        raise E2bRefusal("invalid_argument", f"{tag!r} is not a tag")
    return tag


def read_tags(tags: object, name: str) -> list[str]:
    """Tags as a client gives them: `tag`, or `name:tag` of the same template."""
    if not isinstance(tags, list) or not tags or not all(isinstance(tag, str) for tag in tags):
        raise E2bRefusal("invalid_argument", "tags is a list of texts")
    found: list[str] = []
    for text in tags:
        whole, colon, tag = text.rpartition(":")
        if colon and whole != name:
            raise E2bRefusal("invalid_argument", f"{text!r} is not a tag of {name}")
        found.append(_check_tag(tag))
    return found
