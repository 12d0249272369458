"""`passthrough`: the agent's own bytes to a provider and back, untouched (`black_box`).

The only things changed are headers: hop-by-hop ones are dropped, those that would choose another method or another account
too, and the rollout's key is swapped for the provider's on the host side, in the form in which the agent sent it. Nothing is
decoded, nothing recorded but that a call happened. The provider's key is cut out of whatever comes back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from urllib.parse import parse_qsl, urlencode

from rollyard.core.call import Call, Reply
from rollyard.core.errors import Unsupported, UpstreamError
from rollyard.core.protocols import RawRequest, RawResponse
from rollyard.net.http_session import HttpFailure, HttpStream
from rollyard.policy.connection import ModelConnection, Timeouts, check_url, resolve_key
from rollyard.policy.key_scrubber import KeyScrubber
from rollyard.policy.model_server import cannot_answer, show_url

HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"}
    | {"transfer-encoding", "upgrade", "host", "content-length", "expect"}
)
KEY_HEADERS = ("authorization", "x-api-key", "x-goog-api-key", "api-key")
# They speak for the key's owner (which account pays, whose session it is), or turn a POST into something else.
OWNERS = frozenset(
    {"cookie", "openai-organization", "openai-project", "x-goog-user-project"}
    | {"x-http-method-override", "x-http-method", "x-method-override"}
)


def passthrough(
    url: str, key: str | None = None, *, key_env: str | None = None, timeouts: Timeouts | None = None
) -> ProviderPassthrough:
    return ProviderPassthrough(check_url(url), resolve_key(key, key_env), timeouts or Timeouts())


class ProviderPassthrough:
    """A `Passthrough`. `url` is the provider's root; the request's path (`/v1/messages?...`) is appended to it."""

    honours = frozenset[str]()
    text: str | None = None  # that `parse` read

    def __init__(self, url: str, key: str | None, timeouts: Timeouts) -> None:
        self.url = url
        self._key = key
        self._connection = ModelConnection(timeouts=timeouts, secrets=(key,) if key else ())

    async def __call__(self, call: Call) -> Reply:
        raise Unsupported("passthrough relays bytes; it does not answer decoded calls")

    async def relay(self, request: RawRequest) -> RawResponse:
        limits = self._connection.timeouts
        try:
            response = await self._connection.session().stream(
                request.method,
                join_url(self.url, swap_query(request.path, self._key)),
                request.body or None,
                outgoing_headers(request.headers, self._key),
                connect_s=limits.connect,
                idle_s=limits.idle,
            )
        except TimeoutError as error:
            raise UpstreamError(f"{show_url(self.url)} did not answer in time", status=504) from error
        except HttpFailure as error:
            raise UpstreamError(f"no answer from {show_url(self.url)} ({error.kind})", status=502) from None
        headers = {name: value for name, value in response.headers.items() if name not in HOP}

        def explain(body: bytes) -> str:
            return self._connection.refusal(join_url(self.url, request.path), response.status, body).message

        scrubber: KeyScrubber | None = None
        if self._key is not None:
            try:
                scrubber = KeyScrubber(self._key, headers.pop("content-encoding", "").strip().lower())
            except UpstreamError:
                await response.aclose()
                raise
            headers = {name: scrubber.text(value) for name, value in headers.items()}
        return RawResponse(
            status=response.status, headers=MappingProxyType(headers), body=Chunks(response, scrubber), explain=explain
        )

    async def check(self, model: str) -> None:
        """Whether a server listens. Nothing else: how a key is sent, and for which model, is the agent's."""
        try:
            await self._connection.exchange("GET", join_url(self.url, "/v1/models"), None, {})
        except UpstreamError as error:
            raise cannot_answer(error, model, ()) from None

    async def closed(self, rollout_id: str) -> None:
        return None

    async def aclose(self) -> None:
        await self._connection.aclose()


class Chunks(AsyncIterator[bytes]):
    """The answer as it comes; a break in it is an `UpstreamError`. Our key is taken out of it: servers quote the key that they
    refuse, and it is not for the agent."""

    def __init__(self, stream: HttpStream, scrubber: KeyScrubber | None = None) -> None:
        self._stream = stream
        self._scrubber = scrubber

    async def __anext__(self) -> bytes:
        while True:
            try:
                chunk = await anext(self._stream)
            except HttpFailure as error:
                raise UpstreamError(f"the upstream's stream broke ({error.kind})", status=502) from None
            except StopAsyncIteration:
                if self._scrubber is not None and (rest := self._scrubber.finish()):
                    return rest
                raise
            if self._scrubber is None:
                return chunk
            if plain := self._scrubber.feed(chunk):
                return plain

    async def aclose(self) -> None:
        await self._stream.aclose()


def join_url(url: str, path: str) -> str:
    """A base url that already ends in `/v1` takes `/v1/...` paths without doubling it."""
    path = "/" + path.lstrip("/")
    for version in ("/v1", "/v1beta"):
        if url.endswith(version) and (path == version or path.startswith((version + "/", version + "?"))):
            return url + path[len(version) :]
    return url + path


def outgoing_headers(headers: Mapping[str, str], key: str | None) -> dict[str, str]:
    named = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    kept: dict[str, str] = {}
    sent = [name for name in KEY_HEADERS if name in headers]
    for name, value in headers.items():
        if name not in HOP and name not in named and name not in KEY_HEADERS and name not in OWNERS:
            kept[name] = value
    if key is not None:
        kept["accept-encoding"] = "identity"  # what cannot be read cannot be scrubbed
        for name in sent or ["authorization"]:
            kept[name] = f"Bearer {key}" if name == "authorization" else key
    return kept


def swap_query(path: str, key: str | None) -> str:
    """Gemini clients may send the key as `?key=`; the rollout's own never leaves."""
    before, mark, query = path.partition("?")
    sent = parse_qsl(query, keep_blank_values=True) if mark else []
    pairs = [(k, v) for k, v in sent if k != "key"]
    if len(pairs) == len(sent):
        return path
    if key is not None:
        pairs.append(("key", key))
    return before + ("?" + urlencode(pairs) if pairs else "")
