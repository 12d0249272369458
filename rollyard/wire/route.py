"""Which dialect and endpoint a path means. Paths are matched with and without `/v1`, and below an optional
`/r/{rollout_id}` prefix: agents join base URLs in different ways, and a path that names its rollout must agree with the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal
from urllib.parse import quote, unquote

import msgspec

from rollyard.core.call import Dialect
from rollyard.core.errors import BadRequest

Endpoint = Literal["generate", "models", "count_tokens"]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """`model` and `stream` are None where the body says them; `framing` is how Gemini wants its stream."""

    dialect: Dialect
    endpoint: Endpoint
    model: str | None = None
    stream: bool | None = None
    framing: Literal["sse", "array"] = "sse"
    rollout_id: str | None = None


_FIXED: dict[tuple[str, str], tuple[Dialect, Endpoint]] = {
    ("POST", "chat/completions"): ("chat", "generate"),
    ("POST", "completions"): ("completions", "generate"),
    ("POST", "responses"): ("responses", "generate"),
    ("POST", "responses/input_tokens"): ("responses", "count_tokens"),
    ("POST", "messages"): ("messages", "generate"),
    ("POST", "messages/count_tokens"): ("messages", "count_tokens"),
    ("GET", "models"): ("chat", "models"),
}
_GEMINI: dict[str, tuple[Endpoint, bool]] = {
    "generateContent": ("generate", False),
    "streamGenerateContent": ("generate", True),
    "countTokens": ("count_tokens", False),
}
_VERSIONS = ("v1", "v1beta", "v1alpha")
_VERBS = {(endpoint, stream): verb for verb, (endpoint, stream) in _GEMINI.items()}


def model_in_path(name: str) -> str:
    """A model's name as part of a path at a provider: an agent chose it, and it must not choose the path."""
    if len(name) > 256 or any(part in ("", ".", "..") for part in name.replace("\\", "/").split("/")):
        raise BadRequest(f"model: {name[:60]!r} is not a model's name")
    return "/".join(quote(part, safe=":@") for part in name.split("/"))


def provider_path(route: Route, path: str) -> str:
    """The path of a relayed call, written anew from what it means: nothing else of an agent's path leaves."""
    parts = [part for part in path.split("/") if part]
    if route.dialect != "gemini" or route.model is None:
        return "/" + "/".join(parts)
    version = parts.pop(0) + "/" if parts[0] in _VERSIONS else ""
    kind = "tunedModels" if "tunedModels" in parts[:2] else "models"
    return f"/{version}{kind}/{model_in_path(route.model)}:{_VERBS[route.endpoint, bool(route.stream)]}"


def route(
    method: str,
    path: str,
    query: Mapping[str, str] | None = None,
    *,
    anthropic: bool = False,
    google: bool = False,
) -> Route | None:
    """The route of a request, or None. `path` has no query. Three dialects list their models at `/v1/models`:
    `anthropic` is True when the request carries `anthropic-version`, `google` when it carries `x-goog-api-key`."""
    parts = [part for part in path.split("/") if part]
    rollout_id = None
    if len(parts) > 2 and parts[0] == "r":
        rollout_id, parts = unquote(parts[1]), parts[2:]
    version = ""
    if parts and parts[0] in _VERSIONS:
        version, parts = parts[0], parts[1:]
        if parts and parts[0] == "v1":  # a base URL that ended in /v1, joined with a path that begins with it
            parts = parts[1:]
    google = google or version in ("v1beta", "v1alpha")
    listing: Dialect = "messages" if anthropic else "gemini" if google else "chat"
    found = _FIXED.get((method, "/".join(parts)))
    if found is not None:
        dialect, endpoint = found
        if endpoint == "models":
            dialect = listing
        return Route(dialect=dialect, endpoint=endpoint, rollout_id=rollout_id)
    return _model_route(method, parts, query or {}, rollout_id, listing)


def _model_route(
    method: str, parts: list[str], query: Mapping[str, str], rollout_id: str | None, listing: Dialect
) -> Route | None:
    if len(parts) < 2 or parts[0] not in ("models", "tunedModels"):
        return None
    rest = unquote("/".join(parts[1:]))  # a model id may hold slashes
    if method == "GET":
        return Route(dialect=listing, endpoint="models", model=rest, rollout_id=rollout_id)
    model, _, verb = rest.rpartition(":")
    if method != "POST" or not model or verb not in _GEMINI:
        return None
    endpoint, stream = _GEMINI[verb]
    return Route(
        dialect="gemini",
        endpoint=endpoint,
        model=model,
        stream=stream,
        framing="sse" if not stream or query.get("alt") == "sse" else "array",
        rollout_id=rollout_id,
    )
