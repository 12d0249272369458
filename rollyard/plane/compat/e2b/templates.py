"""Templates and snapshots as E2B's clients name them: names, tags and builds that lead to an image of the engine.

A template is one file of a folder beside the engine's images, so any process on that folder knows it. Its tags point at builds;
`name` means `name:default`, and `owner/name` is the same template said in full. A snapshot is a template that was not built.
"""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from rollyard.core.cache import replace_file
from rollyard.core.home import private_dir
from rollyard.core.ids import new_id
from rollyard.core.sandbox import Resources
from rollyard.plane.compat.e2b.errors import E2bRefusal

BASE = "base"
DEFAULT_TAG = "default"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,127}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_HASH = re.compile(r"[A-Za-z0-9_-]{1,128}")
_ID = re.compile(r"(tpl|snp)_[A-Za-z0-9]+")
BuildState = Literal["waiting", "building", "ready", "error"]


class BuildLine(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    message: str
    level: str = "info"
    step: str | None = None


class TemplateBuild(msgspec.Struct, kw_only=True):
    """One build of a template: its image once it is ready, and how programs are started there."""

    id: str
    created_at: float
    state: BuildState = "waiting"
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


class Template(msgspec.Struct, kw_only=True):
    """`sandbox` is what a snapshot was taken of, and "" for what was built."""

    id: str
    owner: str
    name: str
    created_at: float
    tags: dict[str, str] = {}
    tagged_at: dict[str, float] = {}
    builds: dict[str, TemplateBuild] = {}
    sandbox: str = ""

    def full_name(self, tag: str = DEFAULT_TAG) -> str:
        return f"{self.owner or 'rollyard'}/{self.name}:{tag}" if self.name else f"{self.id}:{tag}"

    def point(self, tags: list[str], build_id: str) -> None:
        for tag in tags:
            self.tags[tag], self.tagged_at[tag] = build_id, time.time()


class Templates:
    """One folder of them. What is written by a build is written by one process, the one that builds."""

    def __init__(self, folder: Path) -> None:
        self._folder = private_dir(folder / "templates")
        self._files = private_dir(folder / "files")

    def begin(self, owner: str, text: str, tags: list[str], resources: Resources) -> tuple[Template, TemplateBuild]:
        """A build that waits for its steps, of a template that is there or is made."""
        name, tag = _split(text, owner)
        if not _NAME.fullmatch(name):
            raise E2bRefusal("invalid_argument", f"template name {name!r}: lower case letters, digits, - and _")
        for one in (*tags, *([tag] if tag else ())):
            _check_tag(one)
        found = self._by_name(owner, name)
        template = found or Template(id=new_id("tpl"), owner=owner, name=name, created_at=time.time())
        build = TemplateBuild(id=str(uuid.uuid4()), created_at=time.time(), resources=resources)
        template.builds[build.id] = build
        template.point(sorted({*tags, *([tag] if tag else ())}) or [DEFAULT_TAG], build.id)
        self.save(template)
        return template, build

    def add_snapshot(self, owner: str, text: str, sandbox_id: str, build: TemplateBuild) -> tuple[Template, str]:
        """A template of what a sandbox holds; also the tag that it has."""
        name, tag = _split(text, owner)
        if name and not _NAME.fullmatch(name):
            raise E2bRefusal("invalid_argument", f"snapshot name {name!r}: lower case letters, digits, - and _")
        found = self._by_name(owner, name) if name else None
        made = Template(id=new_id("snp"), owner=owner, name=name, created_at=time.time(), sandbox=sandbox_id)
        template = found or made
        template.builds[build.id] = build
        template.point([tag or DEFAULT_TAG], build.id)
        self.save(template)
        return template, tag or DEFAULT_TAG

    def save(self, template: Template) -> None:
        replace_file(self._folder / template.id, msgspec.json.encode(template))

    def remove(self, template: Template) -> None:
        (self._folder / template.id).unlink(missing_ok=True)

    def all(self, owner: str) -> list[Template]:
        """The owner's, newest first."""
        return sorted((one for one in self._each() if one.owner == owner), key=lambda one: (-one.created_at, one.id))

    def find(self, owner: str, text: str) -> tuple[Template, str] | None:
        """A template by its id or name, and the tag that was meant."""
        name, tag = _split(text, owner)
        found = self.by_id(name)
        found = found if found is not None and found.owner == owner else self._by_name(owner, name)
        return None if found is None else (found, tag or DEFAULT_TAG)

    def ready(self, owner: str, text: str) -> TemplateBuild | None:
        """The build that a sandbox of this template opens. Raises where the template is there and has none."""
        found = self.find(owner, text)
        if found is None:
            return None
        template, tag = found
        build = template.builds.get(template.tags.get(tag, ""))
        if build is None or build.state != "ready":
            state = "no such tag" if build is None else build.state
            raise E2bRefusal("not_found", f"template {text} cannot be opened: {state}", 404)
        return build

    def of_image(self, image: str) -> tuple[Template, TemplateBuild] | None:
        """The build that made this image, for sandboxes that are known by it."""
        for template in self._each():
            for build in template.builds.values():
                if build.image == image:
                    return template, build
        return None

    def archive(self, owner: str, digest: str) -> Path:
        """Where the files of a COPY are, or are to be put. Clients make the hash, and nobody can check it against the archive: so
        what one owner sent under it is that owner's."""
        if not _HASH.fullmatch(digest):
            raise E2bRefusal("invalid_argument", "not a hash of files")
        return private_dir(self._files / hashlib.sha256(owner.encode()).hexdigest()[:32]) / digest

    def by_id(self, template_id: str) -> Template | None:
        """Whoever it belongs to."""
        return self._load(template_id) if _ID.fullmatch(template_id) else None

    def _by_name(self, owner: str, name: str) -> Template | None:
        return next((one for one in self._each() if one.owner == owner and one.name == name and name), None)

    def _each(self) -> Iterator[Template]:
        for path in self._folder.iterdir():
            if not path.name.startswith(".") and (found := self._load(path.name)) is not None:
                yield found

    def _load(self, template_id: str) -> Template | None:
        try:
            return msgspec.json.decode((self._folder / template_id).read_bytes(), type=Template)
        except (FileNotFoundError, ValueError):
            return None


def _split(text: str, owner: str) -> tuple[str, str]:
    """`owner/name:tag` as name and tag. Another's template is nobody's here."""
    whole, _, tag = text.partition(":")
    space, slash, name = whole.rpartition("/")
    return (whole, tag) if slash and space != (owner or "rollyard") else (name, tag)


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
