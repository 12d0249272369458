"""Names of images as registries have them: `[REGISTRY/]REPOSITORY[:TAG][@DIGEST]`, with the short forms of docker.io.

Only a name: whether its registry may be asked is said in `registries.py`.
"""

from __future__ import annotations

import re

import msgspec

from rollyard.core.errors import ConfigError

DOCKER_HUB = "docker.io"
_HUB_NAMES = {"docker.io", "index.docker.io", "registry-1.docker.io"}
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REGISTRY = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")
_LONGEST = 255


class ImageReference(msgspec.Struct, frozen=True, kw_only=True):
    """`registry` is HOST[:PORT]; the digest, where there is one, decides, and the tag is then a remark."""

    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def text(self) -> str:
        """The whole name: two spellings of one image have the same."""
        return f"{self.registry}/{self.repository}{f'@{self.digest}' if self.digest else f':{self.tag}'}"

    @property
    def version(self) -> str:
        """What a registry is asked for."""
        return self.digest or self.tag or "latest"


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def parse_reference(text: str) -> ImageReference:
    if (found := _parse(text)) is None:
        raise ConfigError(
            f"{text[:300]!r} names no image of a registry",
            hint="[REGISTRY/]REPOSITORY[:TAG][@sha256:...], such as python:3.12-slim or ghcr.io/acme/app:1",
        )
    return found


def canonical_name(text: str) -> str | None:
    """The whole name of an image; None for what no registry could have."""
    found = _parse(text)
    return None if found is None else found.text


def _parse(text: str) -> ImageReference | None:
    name, at, digest = text.partition("@")
    if (at and not is_digest(digest)) or len(name) > _LONGEST + 129:
        return None
    first, slash, rest = name.partition("/")
    if slash and (first == "localhost" or first != first.lower() or any(mark in first for mark in ".:[")):
        registry, path = first.lower(), rest
    else:
        registry, path = DOCKER_HUB, name
    head, colon, tag = path.rpartition(":")
    repository, tag = (head, tag) if colon else (path, None)
    if registry in _HUB_NAMES:
        registry = DOCKER_HUB
        repository = repository if "/" in repository else f"library/{repository}"
    wrong = not _REGISTRY.fullmatch(registry) or not _REPOSITORY.fullmatch(repository) or len(repository) > _LONGEST
    if wrong or (tag is not None and not _TAG.fullmatch(tag)):
        return None
    return ImageReference(
        registry=registry,
        repository=repository,
        tag=tag or (None if digest else "latest"),
        digest=digest or None,
    )
