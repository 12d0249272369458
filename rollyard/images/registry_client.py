"""One image's repository on one server, by the protocol of OCI and Docker registries: manifests and blobs, read only.

Only what the user's rules allow is connected to. An answer may lead elsewhere (a redirect, a token server): over TLS to any
public host, or to another registry that the user named. Credentials go to the server that they are for and to the token server
it names, never along a redirect. Nothing is read beyond the size it was announced with. An error that asking again may heal
is `SandboxUnavailable`, any other `ImageNotPulled`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar, cast
from urllib.parse import urlencode, urljoin, urlsplit

import anyio
import anyio.to_thread

from rollyard.core.errors import ImageNotPulled, SandboxUnavailable
from rollyard.images.manifests import ACCEPT, Descriptor
from rollyard.images.reference import ImageReference
from rollyard.images.registries import Registries, RegistryEndpoint
from rollyard.images.registry_auth import Challenge, find_credentials, parse_challenge
from rollyard.net.egress.decide import EgressRules, NoAddress, NotAllowed
from rollyard.net.http_session import HttpFailure, HttpSession, HttpStream

CONNECT_S = 15.0
IDLE_S = 60.0  # a silence in the middle of an answer
MAX_DOCUMENT = 8 << 20  # a manifest, a configuration, a token
ATTEMPTS = 4  # without a byte gained between them
_MIRROR_ATTEMPTS = 2  # there is another server to ask
_MOST_ATTEMPTS = 100  # of one blob, however much each of them gained
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 5
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_WAIT_S = 60.0
_AGENT = "rollyard"
_FAILURES = {
    "ClientConnectorError": "no connection",
    "ClientConnectorDNSError": "no connection, or no such name",
    "ServerDisconnectedError": "it closed the connection",
    "ClientOSError": "the connection broke",
    "SocketTimeoutError": "it fell silent",
    "ClientPayloadError": "the connection broke",
}
_TLS_FAILURES = {
    "ClientConnectorCertificateError": (
        "its certificate is not trusted",
        "SSL_CERT_FILE names the certificates to trust",
    ),
    "ClientConnectorSSLError": ("it does not speak TLS", "write http:// before it where plain HTTP is meant"),
}
T = TypeVar("T")


class RegistryClient:
    """Enter it. `wait_s` is the first wait between two attempts."""

    def __init__(
        self, endpoint: RegistryEndpoint, reference: ImageReference, registries: Registries, *, wait_s: float = 0.5
    ) -> None:
        self.endpoint, self.reference = endpoint, reference
        self._wait_s = wait_s
        self._attempts = _MIRROR_ATTEMPTS if endpoint.mirror else ATTEMPTS
        self._base = f"{endpoint.url}/v2/{reference.repository}"
        self._origin = _origin(endpoint.url)
        self._known = (endpoint.rule, *registries.allowed)
        own = [endpoint.rule.rule.text]
        elsewhere = [one.rule.text for one in self._known]
        self._own = HttpSession(rules=EgressRules(own))
        self._elsewhere = HttpSession(rules=EgressRules([*elsewhere, "*"]))
        self._authorization: str | None = None
        self._asking = anyio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._own.aclose()
        await self._elsewhere.aclose()

    async def manifest(self, version: str) -> bytes:
        """The manifest or index under a tag or a digest; the latter is checked."""
        data, headers = await self._document(f"{self._base}/manifests/{version}", {"accept": ACCEPT}, MAX_DOCUMENT)
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        named = version if version.startswith("sha256:") else headers.get("docker-content-digest", digest)
        if named.startswith("sha256:") and named != digest:
            raise self._wrong_bytes("manifest", named, digest)
        return data

    async def document(self, blob: Descriptor) -> bytes:
        """A small blob, such as an image's configuration."""
        if blob.size > MAX_DOCUMENT:
            raise ImageNotPulled(f"{self.reference.text}: a configuration of {blob.size:,} bytes is too large")
        data, _ = await self._document(f"{self._base}/blobs/{blob.digest}", {}, blob.size)
        found = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if found != blob.digest:
            raise self._wrong_bytes("configuration", blob.digest, found)
        return data

    async def fetch(self, blob: Descriptor, path: Path, on_progress: Callable[[int], None]) -> None:
        """A blob into a file. What is there already is taken as its beginning, so that a broken download goes on where it
        broke; `on_progress` is given the number of bytes so far."""
        begun = _size(path) > 0
        await self._fetch_all(blob, path, on_progress)
        found = await anyio.to_thread.run_sync(_digest_of, path)
        if found != blob.digest and begun:  # what another process left may be no beginning of it
            path.unlink()
            await self._fetch_all(blob, path, on_progress)
            found = await anyio.to_thread.run_sync(_digest_of, path)
        if found != blob.digest:
            path.unlink()
            raise self._wrong_bytes("layer", blob.digest, found)

    async def _fetch_all(self, blob: Descriptor, path: Path, on_progress: Callable[[int], None]) -> None:
        vain = 0
        for _ in range(_MOST_ATTEMPTS):
            before = _size(path)
            try:
                await self._fetch_rest(blob, path, on_progress)
            except SandboxUnavailable as error:
                vain = 0 if _size(path) > before else vain + 1
                if vain >= self._attempts:
                    raise
                await self._wait(error, max(0, vain - 1))
            else:
                return
        raise SandboxUnavailable(f"{self._name}: the connection broke {_MOST_ATTEMPTS} times in one layer")

    async def _fetch_rest(self, blob: Descriptor, path: Path, on_progress: Callable[[int], None]) -> None:
        """One request for what is missing."""
        if (have := _size(path)) > blob.size:
            path.unlink()
            have = 0
        if have == blob.size and path.exists():
            return
        headers = {"range": f"bytes={have}-"} if have else {}
        stream = await self._get(f"{self._base}/blobs/{blob.digest}", headers)
        try:
            if stream.status == 416 or (stream.status == 206 and _start(stream.headers) != have):
                path.unlink(missing_ok=True)
                raise SandboxUnavailable(f"{self._name} cannot go on with a layer: it is fetched anew")
            if stream.status not in (200, 206):
                await self._refuse(stream)
            if stream.status == 200:
                have = 0
            with path.open("ab" if have else "wb") as file:
                async for chunk in self._chunks(stream):
                    have += len(chunk)
                    if have > blob.size:
                        path.unlink()
                        raise ImageNotPulled(
                            f"{self._name} sent more than the {blob.size:,} bytes of {blob.digest[:19]}"
                        )
                    file.write(chunk)
                    on_progress(have)
            if have < blob.size:
                raise SandboxUnavailable(f"{self._name}: a layer broke off after {have:,} of {blob.size:,} bytes")
        finally:
            await stream.aclose()

    async def _document(self, url: str, headers: Mapping[str, str], limit: int) -> tuple[bytes, Mapping[str, str]]:
        """A whole answer of at most `limit` bytes."""

        async def ask() -> tuple[bytes, Mapping[str, str]]:
            stream = await self._get(url, headers)
            try:
                if stream.status != 200:
                    await self._refuse(stream)
                return await self._read(stream, limit), stream.headers
            finally:
                await stream.aclose()

        return await self._retry(ask)

    async def _retry(self, ask: Callable[[], Awaitable[T]]) -> T:
        """An answer, asked for again while that may help."""
        for vain in range(self._attempts - 1):
            try:
                return await ask()
            except SandboxUnavailable as error:
                await self._wait(error, vain)
        return await ask()

    async def _wait(self, error: SandboxUnavailable, vain: int) -> None:
        """What the server says, or longer each time."""
        await asyncio.sleep(min(error.retry_after or self._wait_s * 2**vain, _LONGEST_WAIT_S))

    async def _read(self, stream: HttpStream, limit: int) -> bytes:
        data = bytearray()
        async for chunk in self._chunks(stream):
            data += chunk
            if len(data) > limit:
                raise ImageNotPulled(f"{self._name} sent more than {limit:,} bytes")
        return bytes(data)

    async def _chunks(self, stream: HttpStream) -> AsyncIterator[bytes]:
        try:
            async for chunk in stream:
                yield chunk
        except HttpFailure as error:
            raise SandboxUnavailable(f"{self._name}: {_FAILURES.get(error.kind, error.kind)}") from error

    # asking

    async def _get(self, url: str, headers: Mapping[str, str]) -> HttpStream:
        """The answer's head, after redirects and after giving the credentials that it asks for, once."""
        authorized = False
        for _ in range(_MAX_REDIRECTS + 2):
            own = _origin(url) == self._origin
            used = self._authorization if own else None
            sent = {"user-agent": _AGENT, **headers, **({"authorization": used} if used else {})}
            stream = await self._open(url, sent, own=own)
            if stream.status == 401 and own and not authorized:
                challenge = parse_challenge(stream.headers.get("www-authenticate", ""))
                await stream.aclose()
                authorized = await self._authorize(challenge, used)
                if not authorized:
                    raise self._not_authorized(401)
            elif stream.status in _REDIRECTS and "location" in stream.headers:
                url = urljoin(url, stream.headers["location"])
                await stream.aclose()
                self._check_onward(url)
            else:
                return stream
        raise ImageNotPulled(f"{self._name} redirects without end")

    async def _open(self, url: str, headers: Mapping[str, str], *, own: bool, form: bytes | None = None) -> HttpStream:
        session = self._own if own else self._elsewhere
        method = "GET" if form is None else "POST"
        try:
            return await session.stream(method, url, form, headers, connect_s=CONNECT_S, idle_s=IDLE_S)
        except NoAddress:
            raise SandboxUnavailable(f"{_host(url)} has no address here ({self.reference.text})") from None
        except NotAllowed as error:
            raise self._not_allowed(url, str(error)) from None
        except TimeoutError:
            raise SandboxUnavailable(f"{_host(url)} does not answer ({self.reference.text})") from None
        except HttpFailure as error:
            what = f"{_host(url)} cannot be reached for {self.reference.text}"
            if error.kind in _TLS_FAILURES:
                said, hint = _TLS_FAILURES[error.kind]
                raise ImageNotPulled(f"{what}: {said}", hint=hint) from None
            raise SandboxUnavailable(f"{what}: {_FAILURES.get(error.kind, error.kind)}") from error

    def _check_onward(self, url: str) -> None:
        """Plain HTTP only where the user named that very server with it."""
        parts = urlsplit(url)
        if parts.scheme == "https" or _origin(url) == self._origin:
            return
        try:
            host, port = parts.hostname or "", parts.port or 80
        except ValueError:
            host, port = "", 0
        if parts.scheme != "http" or not any(not one.secure and one.covers(host, port) for one in self._known):
            raise self._not_allowed(url, "it is not reached over TLS")

    async def _authorize(self, challenge: Challenge | None, used: str | None) -> bool:
        """Sets what requests are sent with from now on; False where there is nothing (more) to send."""
        async with self._asking:
            if self._authorization != used:
                return True  # another request asked meanwhile
            if challenge is None:
                return False
            credentials = await find_credentials(self.endpoint.account)
            if challenge.scheme == "basic":
                if credentials is None or credentials.identity_token or used == credentials.basic:
                    return False
                self._authorization = credentials.basic
                return True
            realm = urljoin(self._base, challenge.parameters.get("realm", ""))
            self._check_onward(realm)
            query = [(name, challenge.parameters[name]) for name in ("service",) if name in challenge.parameters]
            query.append(("scope", f"repository:{self.reference.repository}:pull"))
            if credentials is not None and credentials.identity_token:
                form = [*query, ("grant_type", "refresh_token"), ("refresh_token", credentials.identity_token)]
                token = await self._token(realm, {}, urlencode([*form, ("client_id", _AGENT)]).encode())
            else:
                basic = {"authorization": credentials.basic} if credentials is not None else {}
                joined = f"{realm}{'&' if '?' in realm else '?'}{urlencode(query)}"
                token = await self._token(joined, basic, None)
            self._authorization = f"Bearer {token}"
            return True

    async def _token(self, url: str, headers: Mapping[str, str], form: bytes | None) -> str:
        kind = {"content-type": "application/x-www-form-urlencoded"} if form is not None else {}
        sent = {"user-agent": _AGENT, **headers, **kind}

        async def ask() -> bytes:
            stream = await self._open(url, sent, own=_origin(url) == self._origin, form=form)
            try:
                if stream.status != 200:
                    await self._refuse(stream)
                return await self._read(stream, MAX_DOCUMENT)
            finally:
                await stream.aclose()

        found = _as_object(await self._retry(ask))
        token = found.get("token") or found.get("access_token")
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            raise ImageNotPulled(f"the token server {_host(url)} of {self.endpoint.host} gave no token")
        return token

    # refusals

    @property
    def _name(self) -> str:
        return f"{self.reference.text} at {self.endpoint.host}"

    async def _refuse(self, stream: HttpStream) -> NoReturn:
        """What an answer that is none means."""
        try:
            said = _error_text(await self._read(stream, MAX_DOCUMENT))
        except (SandboxUnavailable, ImageNotPulled):
            said = ""
        status = stream.status
        if status in _TRANSIENT:
            wait = stream.headers.get("retry-after", "")
            raise SandboxUnavailable(
                f"{self.endpoint.host} answered {status}{said} ({self.reference.text})",
                retry_after=min(float(wait), _LONGEST_WAIT_S) if wait.isdecimal() else None,
            )
        if status in (401, 403):
            raise self._not_authorized(status, said)
        if status == 404:
            raise ImageNotPulled(
                f"{self.endpoint.host} has no image {self.reference.text}{said}",
                status=404,
                hint="check the name and the tag",
            )
        raise ImageNotPulled(f"{self.endpoint.host} answered {status}{said} ({self.reference.text})", status=status)

    def _not_authorized(self, status: int, said: str = "") -> ImageNotPulled:
        account = self.endpoint.account
        return ImageNotPulled(
            f"{self.endpoint.host} refuses {self.reference.text}: {status}{said}",
            status=status,
            hint=f"is the name right? Credentials are read as `docker login {account}` keeps them, or from DOCKER_AUTH_CONFIG",
        )

    def _not_allowed(self, url: str, why: str) -> ImageNotPulled:
        place = _host(url)
        hint = "name it with --pull [http://]HOST[:PORT][@ADDRESS], or in the registries file"
        led = "" if _origin(url) == self._origin else f", to which {self.endpoint.host} leads,"
        return ImageNotPulled(f"{self.reference.text}: {place}{led} is not asked: {why}", hint=hint)

    def _wrong_bytes(self, what: str, named: str, found: str) -> ImageNotPulled:
        return ImageNotPulled(
            f"{self._name}: a {what} has the digest {found[:19]}, not {named[:19]}, by which it is named",
            hint="the registry or something on the way is damaged; nothing of it was used",
        )


def _origin(url: str) -> tuple[str, str, int | None]:
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return "", "", None


def _host(url: str) -> str:
    """Without account and path, which may hold a signature."""
    try:
        return urlsplit(url).netloc.rpartition("@")[2][:200]
    except ValueError:
        return "an address that is none"


def _start(headers: Mapping[str, str]) -> int | None:
    found = re.match(r"bytes (\d+)-", headers.get("content-range", ""))
    return int(found[1]) if found else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return f"sha256:{found}"


def _as_object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _error_text(data: bytes) -> str:
    """A registry's own words: printable, one line, short."""
    errors = _as_object(data).get("errors")
    first: Any = cast("list[Any]", errors)[0] if isinstance(errors, list) and errors else None
    if not isinstance(first, dict):
        return ""
    entry = cast("dict[str, Any]", first)
    text = " ".join(str(entry.get(name, "")) for name in ("code", "message")).strip()
    return f" ({''.join(letter for letter in text if letter.isprintable())[:200]})" if text else ""
