"""A general HTTP client over aiohttp, which is imported on first use: whole answers, and answers relayed as they come.

No cookies, no redirects, no proxies from the environment, no retries: a key goes only to the server it was given for. A
deadline is a `TimeoutError`; every other way in which no answer came is an `HttpFailure`. Where one kind of request is
made very often to one server, `rollyard.net.http_client` costs a quarter of this. With `rules` only what they allow is connected
to, at the address that was checked; anything else is `NotAllowed`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from rollyard.net.http_client import HttpResponse

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.abc import AbstractResolver

    from rollyard.net.egress.decide import EgressRules

_CLOSE_S = 5.0


class HttpFailure(Exception):
    """No answer came; `kind` is the name of what happened, which holds neither address nor key."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.kind = type(error).__name__


class HttpSession:
    """A connection pool, opened by the first request in the loop that makes it. Enter it, or close it with `aclose`; a
    closed session opens again with the next request. `limit` bounds the connections; 0 is no bound."""

    def __init__(
        self,
        *,
        headers: Mapping[str, str] | None = None,
        limit: int = 100,
        idle_s: float = 15.0,
        rules: EgressRules | None = None,
    ) -> None:
        self._headers, self._limit, self._idle_s, self._rules = headers, limit, idle_s, rules
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            async with asyncio.timeout(_CLOSE_S):
                await session.close()

    async def request(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        query: Sequence[tuple[str, str]] | Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> HttpResponse:
        """The whole answer, whatever its status. Header names come in lower case."""
        import aiohttp

        await self._check(url)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._open().request(
                    method, url, data=body, params=query, headers=headers, allow_redirects=False
                ) as response,
            ):
                found = {name.lower(): value for name, value in response.headers.items()}
                return HttpResponse(response.status, found, await response.read())
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise HttpFailure(error) from error

    async def stream(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], *, connect_s: float, idle_s: float
    ) -> HttpStream:
        """An answer whose head is here and whose body comes as the server sends it, undecoded. The URL is sent as it is
        written and no header is added; `idle_s` bounds each silence."""
        import aiohttp
        import yarl

        await self._check(url)
        try:
            response = await self._open().request(
                method,
                yarl.URL(url, encoded=True),
                data=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=idle_s),
                allow_redirects=False,
                auto_decompress=False,
                skip_auto_headers=("content-type", "user-agent", "accept-encoding", "accept"),
            )
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise HttpFailure(error) from None
        return HttpStream(response)

    async def _check(self, url: str) -> None:
        """An address in a URL is never looked up, so it is checked here; a name by the resolver too."""
        if self._rules is not None:
            parts = urlsplit(url)
            await self._rules.find(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            resolver = None if self._rules is None else _make_resolver(self._rules)
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(
                    limit=self._limit,
                    keepalive_timeout=self._idle_s,
                    ttl_dns_cache=60,
                    use_dns_cache=resolver is None,
                    resolver=resolver,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                trust_env=False,
                read_bufsize=2**18,
            )
        return self._session


def _make_resolver(rules: EgressRules) -> AbstractResolver:
    from aiohttp.abc import AbstractResolver, ResolveResult

    from rollyard.net.egress.decide import NotAllowed

    class CheckedResolver(AbstractResolver):
        """Gives the one address that the rules allow."""

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
        ) -> list[ResolveResult]:
            try:
                found = await rules.find(host, port)
            except NotAllowed as error:
                raise OSError(str(error)) from None
            kind = socket.AF_INET6 if ":" in found.address else socket.AF_INET
            return [
                ResolveResult(
                    hostname=host, host=found.address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST
                )
            ]

        async def close(self) -> None:
            return None

    return CheckedResolver()


class HttpStream(AsyncIterator[bytes]):
    """The body as it comes. Unlike a generator it lets the connection go even when it was never started."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}

    async def __anext__(self) -> bytes:
        import aiohttp

        try:
            chunk = await self._response.content.readany()
        except (TimeoutError, aiohttp.ClientError) as error:
            self._response.close()
            raise HttpFailure(error) from None
        except BaseException:  # cancelled too: a half-read stream is not used again
            self._response.close()
            raise
        if not chunk:
            self._response.release()
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        self._response.close()
