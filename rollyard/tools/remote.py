"""`RemoteTools`: the tools of one or more MCP servers somewhere else, as one list, each call sent to its owner.

A URL that ends in `/` is a root: its tools are at `mcp`, at `api/v1/mcp`, or at both, each tried by itself. A server or an
endpoint of a root that is down while others answer costs its own tools and leaves a warning that names it; when all are down
that is an error with every cause, never an empty list. Only what may succeed when asked again is asked again: an unknown tool,
a refusal and a tool's own error are not. A call whose connection broke after it was sent is sent again only to a server that
knows it by its key and answers it once (`Toolset`); any other might run it twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeVar

import msgspec

from rollyard.core.errors import ConfigError, EnvError, EnvUnavailable, UnknownTool
from rollyard.core.ids import new_id
from rollyard.core.log import Log
from rollyard.core.message import ToolSpec
from rollyard.tools.answers import ToolAnswer
from rollyard.tools.endpoint import Endpoint, EndpointAbsent

T = TypeVar("T")
Collisions = Literal["first", "prefix", "error"]
DISCOVERED = ("mcp", "api/v1/mcp")
ATTEMPTS = 3
PAUSES_S = (1.0, 2.0, 4.0)

_log = Log("rollyard.tools")


class _Place(msgspec.Struct, frozen=True):
    """One URL as it was given: the name its tools get where names collide, and the endpoints it may stand for."""

    label: str
    url: str
    endpoints: tuple[Endpoint, ...]


class Listing(NamedTuple):
    """What the endpoints of one place said, those that failed with why."""

    found: dict[Endpoint, list[ToolSpec]]
    failed: dict[Endpoint, EnvError]


class RemoteTools:
    """`async with RemoteTools(urls, key) as tools`. `urls` is one URL, several, or several by name.

    `collisions` decides about a name that two servers have: `first` (the earlier URL owns it), `prefix` (both are offered as
    `name_tool`, by the names of `urls` or `s1`, `s2` ...) or `error`. Every request has a deadline of `timeout_s`; one that could
    not be served is tried `attempts` times in all, after pauses of 1, 2 and 4 s. `warnings` names the servers that were down
    when the tools were last listed.
    """

    def __init__(
        self,
        urls: str | Iterable[str] | Mapping[str, str],
        key: str | None = None,
        *,
        timeout_s: float = 60.0,
        collisions: Collisions = "first",
        attempts: int = ATTEMPTS,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        named = _name(urls)
        if not named:
            raise ConfigError("no URL to get tools from", hint="pass the URL of an MCP server")
        if collisions not in ("first", "prefix", "error"):
            raise ConfigError(f"collisions is first, prefix or error, not {collisions!r}")
        self.urls = tuple(named.values())
        self.warnings: tuple[str, ...] = ()
        self._places = [
            _Place(label, url, tuple(Endpoint(one, key, timeout_s=timeout_s) for one in candidates(url)))
            for label, url in named.items()
        ]
        self._collisions: Collisions = collisions
        self._attempts, self._pauses = max(1, attempts), tuple(pauses_s)
        self._routes: dict[str, tuple[Endpoint, str]] | None = None
        self._specs: list[ToolSpec] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        for place in self._places:
            for endpoint in place.endpoints:
                await endpoint.aclose()

    async def list(self, *, attempts: int | None = None) -> list[ToolSpec]:
        """The union, asked anew; it is also what `call` routes by from now on. More `attempts` are for servers that start."""
        found = await asyncio.gather(
            *(self._list_of(place, attempts) for place in self._places), return_exceptions=True
        )
        causes: list[str] = []
        offers: list[tuple[_Place, Endpoint, ToolSpec]] = []
        for place, got in zip(self._places, found, strict=True):
            if isinstance(got, EnvError):
                causes.append(got.message)
            elif isinstance(got, BaseException):
                raise got
            else:
                offers += [(place, endpoint, spec) for endpoint, specs in got.found.items() for spec in specs]
                dead = [e.message for e in got.failed.values() if not isinstance(e, EndpointAbsent)]
                causes += dead
        if not any(isinstance(got, Listing) for got in found):
            raise EnvUnavailable(f"no tools can be reached: {'; '.join(causes)}")
        for cause in causes:
            _log.warning("tools of a server that is down are missing: %s", cause)
        self.warnings = tuple(causes)
        self._routes, self._specs = self._route(offers)
        return list(self._specs)

    async def openai(self) -> list[dict[str, Any]]:
        """The tools as an OpenAI chat request names them, from the list at hand."""
        if self._routes is None:
            await self.list()
        return [openai_tool(spec) for spec in self._specs]

    async def ask(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """The whole result; a tool that failed is an answer too. Raises `UnknownTool` without asking a server."""
        if self._routes is None:
            await self.list()
        assert self._routes is not None
        if name not in self._routes:
            raise UnknownTool(name, tuple(self._routes))
        endpoint, own_name = self._routes[name]
        key = new_id("call")
        return await self._try(lambda: endpoint.call(own_name, arguments, key=key))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result as text; a tool that reports an error raises `EnvError` with its words."""
        answer = await self.ask(name, arguments)
        if answer.is_error:
            raise EnvError(answer.text or f"{name} failed")
        return answer.text

    async def _list_of(self, place: _Place, attempts: int | None) -> Listing:
        """What its endpoints offer, each tried by itself. One that is absent beside another that answers is no endpoint of the
        place; where none answers, each of them may be starting."""
        listing = Listing({}, {})
        most = attempts or self._attempts
        for attempt in range(1, most + 1):
            await _ask_missing(place, listing)
            again = [e for e in listing.failed.values() if _may_come(e, alone=not listing.found)]
            if not again or attempt == most:
                break
            await asyncio.sleep(self._pause(attempt))
        if not listing.found:
            kind = EnvUnavailable if any(isinstance(e, EnvUnavailable) for e in listing.failed.values()) else EnvError
            raise kind("; ".join(failure.message for failure in listing.failed.values()))
        return listing

    def _pause(self, attempt: int) -> float:
        return self._pauses[min(attempt, len(self._pauses)) - 1] if self._pauses else 0.0

    async def _try(self, once: Callable[[], Awaitable[T]]) -> T:
        for attempt in range(1, self._attempts + 1):
            try:
                return await once()
            except EnvUnavailable:
                if attempt == self._attempts:
                    raise
                await asyncio.sleep(self._pause(attempt))
        raise AssertionError("attempts is at least one")

    def _route(
        self, offers: Sequence[tuple[_Place, Endpoint, ToolSpec]]
    ) -> tuple[dict[str, tuple[Endpoint, str]], list[ToolSpec]]:
        holders: dict[str, list[_Place]] = {}
        for place, _, spec in offers:
            holders.setdefault(spec.name, []).append(place)
        routes: dict[str, tuple[Endpoint, str]] = {}
        specs: list[ToolSpec] = []
        for place, endpoint, spec in offers:
            others = [other for other in holders[spec.name] if other is not place]
            if others and self._collisions == "error":
                raise EnvError(
                    f"tool {spec.name!r} is at {place.url} and at {others[0].url}",
                    hint="pass collisions='first' or 'prefix'",
                )
            prefixed = bool(others) and self._collisions == "prefix"
            name = f"{place.label}_{spec.name}" if prefixed else spec.name
            if name in routes:
                if prefixed:
                    raise EnvError(f"two tools would be named {name!r}", hint="give the URLs other names")
                continue
            routes[name] = (endpoint, spec.name)
            specs.append(msgspec.structs.replace(spec, name=name))
        return routes, specs


def candidates(url: str) -> tuple[str, ...]:
    """The endpoints that a URL may stand for."""
    return tuple(url + tail for tail in DISCOVERED) if url.endswith("/") else (url,)


def openai_tool(spec: ToolSpec) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": spec.name,
            "description": spec.description,
            "parameters": msgspec.json.decode(spec.schema),
        },
    }


def _name(urls: str | Iterable[str] | Mapping[str, str]) -> dict[str, str]:
    if isinstance(urls, Mapping):
        return dict(urls)
    given = [urls] if isinstance(urls, str) else list(urls)
    return {f"s{position}": url for position, url in enumerate(given, 1)}


async def _ask_missing(place: _Place, listing: Listing) -> None:
    """Asks the endpoints that have not answered and may yet."""
    alone = not listing.found
    missing = [
        endpoint
        for endpoint in place.endpoints
        if endpoint not in listing.found
        and (endpoint not in listing.failed or _may_come(listing.failed[endpoint], alone=alone))
    ]
    found = await asyncio.gather(*(endpoint.list() for endpoint in missing), return_exceptions=True)
    for endpoint, got in zip(missing, found, strict=True):
        listing.failed.pop(endpoint, None)
        if isinstance(got, EnvError):
            listing.failed[endpoint] = got
        elif isinstance(got, BaseException):
            raise got
        else:
            listing.found[endpoint] = got


def _may_come(failure: EnvError, *, alone: bool) -> bool:
    return isinstance(failure, EnvUnavailable) and (alone or not isinstance(failure, EndpointAbsent))
