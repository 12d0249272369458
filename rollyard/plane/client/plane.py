"""The plane's client: `async with rollyard.plane.connect(url, key) as plane:`, then `plane.envs`, `plane.instances`.

Refusals come back as the errors the server raised, by status. Whatever else a server, a proxy or a broken network answers
(HTML, half a body, JSON of another shape) is a `PlaneUnavailable`, never a KeyError. Nothing is tried again here: creating
with an `idempotency_key` is what makes that safe, and only the caller knows whether it is wanted.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Self

import msgspec

from rollyard.core.errors import (
    ConfigError,
    PlaneConflict,
    PlaneDraining,
    PlaneError,
    PlaneForbidden,
    PlaneGone,
    PlaneInvalid,
    PlaneNotFound,
    PlaneQuota,
    PlaneRateLimited,
    PlaneTooLarge,
    PlaneUnauthorized,
    PlaneUnavailable,
    PlaneUnsupported,
)
from rollyard.core.sandbox import Exit
from rollyard.net.http_session import HttpFailure, HttpSession
from rollyard.net.paging import each_page
from rollyard.plane.client.instance import InstanceClient, OpenedInstance

_ERRORS: Mapping[int, type[PlaneError]] = {
    kind.status: kind
    for kind in (
        PlaneInvalid,
        PlaneUnauthorized,
        PlaneForbidden,
        PlaneNotFound,
        PlaneConflict,
        PlaneGone,
        PlaneTooLarge,
        PlaneQuota,
        PlaneUnsupported,
        PlaneDraining,
    )
}
_CODES: Mapping[str, type[PlaneError]] = {kind.code: kind for kind in (*_ERRORS.values(), PlaneRateLimited)}
_TIMEOUT_S = 60.0
_CREATE_S = 330.0
_PROBE_S = 10.0


class Plane:
    """One server and one key. Enter it, or close it with `aclose`."""

    def __init__(self, url: str, key: str, *, data_plane: bool = True, timeout_s: float = _TIMEOUT_S) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not the URL of a plane", hint="give http://host:port")
        self.url, self.key, self.timeout_s, self.data_plane = url.rstrip("/"), key, timeout_s, data_plane
        self._session = HttpSession(headers={"Authorization": f"Bearer {key}"} if key else {})
        self.envs = Envs(self)
        self.instances = PlaneInstances(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._session.aclose()

    async def engines(self) -> dict[str, Any]:
        """The capability map."""
        return await self.json("GET", "/v1/engines")

    async def usage(self, owner: str | None = None) -> dict[str, Any]:
        return await self.json("GET", "/v1/usage", query={"owner": owner})

    def at(self, instance_id: str) -> InstanceClient:
        """One instance: its tools, functions, reward and health."""
        return InstanceClient(self, instance_id)

    def open(self, *, skip_health: bool = False, within_s: float = 45.0, **body: Any) -> OpenedInstance:
        """`async with plane.open(env="name@version") as one`: made, healthy, and deleted at the end. `skip_health` leaves
        out the probe and nothing else; without the data plane there is none."""
        return OpenedInstance(self, body, skip_health=skip_health, within_s=within_s)

    async def wait_for_health(self, instance_id: str, *, within_s: float = 45.0) -> None:
        """Until the environment's own server answers its health with 2xx."""
        headers = {"Authorization": f"Bearer {self.key}"}
        url = f"{self.url}/v1/instances/{instance_id}/data/health"
        await wait_until_ok(url, within_s=within_s, headers=headers)

    async def trace(self, any_id: str) -> dict[str, Any]:
        """Everything behind an instance's or a rollout's id."""
        return await self.json("GET", f"/v1/trace/{any_id}")

    async def ready(self) -> dict[str, Any]:
        """Whether it takes creations, and the room of its engines; `ready` is False while it does not."""
        _, raw = await self.ask("GET", "/ready")
        return _object(raw, "GET /ready")

    async def create_key(self, role: str, owner: str, *, instance_id: str | None = None) -> dict[str, Any]:
        """`key` in the answer is shown this once."""
        return await self.json("POST", "/v1/keys", {"role": role, "owner": owner, "instance_id": instance_id})

    async def json(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        data = None if body is None else msgspec.json.encode(body)
        raw = await self.bytes(method, path, data, query=query, headers=headers, timeout_s=timeout_s)
        return _object(raw, f"{method} {path}")

    async def bytes(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        status, raw = await self.ask(method, path, data, query=query, headers=headers, timeout_s=timeout_s)
        if 200 <= status < 300:
            return raw
        raise self.refusal(status, raw, f"{method} {path}")

    async def ask(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, bytes]:
        """Any answer at all, as its status and its body."""
        params = [
            (name, str(one))
            for name, value in (query or {}).items()
            for one in (value if isinstance(value, list) else [value])
            if one is not None
        ]
        try:
            answer = await self._session.request(
                method, self.url + path, data, query=params, headers=headers, timeout_s=timeout_s or self.timeout_s
            )
        except TimeoutError as error:
            raise PlaneUnavailable(f"{self.url} did not answer {method} {path} in time") from error
        except HttpFailure as error:
            cause = error.__cause__
            if isinstance(cause, ConnectionError) or getattr(cause, "errno", None) == errno.ECONNREFUSED:
                hint = "start one with `rollyard serve plane`, or name another with ROLLYARD_URL"
                raise PlaneUnavailable(f"no control plane answers at {self.url}", hint=hint) from error
            raise PlaneUnavailable(f"{method} {path} at {self.url} broke: {error}") from error
        return answer.status, answer.body

    def refusal(self, status: int, raw: bytes, what: str) -> PlaneError:
        """The error that an answer is."""
        return refusal_of(status, raw, what)


class Envs:
    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def create(self, name: str, version: str, *, owner: str | None = None, **spec: Any) -> dict[str, Any]:
        """An admin may name the `owner`; `aenv` is that of AEnvironment's callers without a key."""
        body = {"name": name, "version": version, "spec": spec, "owner": owner}
        return await self._plane.json("POST", "/v1/envs", body)

    async def get(self, name: str, version: str) -> dict[str, Any]:
        return await self._plane.json("GET", f"/v1/envs/{name}/{version}")

    async def exists(self, name: str, version: str) -> bool:
        return (await self._plane.json("GET", f"/v1/envs/{name}/{version}/exists")).get("exists") is True

    async def update(self, name: str, version: str, *, revision: int, **spec: Any) -> dict[str, Any]:
        """Raises `PlaneConflict` when it is not at the revision you read any more."""
        return await self._plane.json("PUT", f"/v1/envs/{name}/{version}", {"revision": revision, "spec": spec})

    async def release(self, name: str, version: str, *, revision: int | None = None) -> dict[str, Any]:
        return await self._plane.json("POST", f"/v1/envs/{name}/{version}/release", {"revision": revision})

    async def builds(self, name: str, version: str) -> dict[str, Any]:
        """What came of building its pushed files, by engine: `image` (None where it failed), `start`, `log`, `seconds`."""
        return await self._plane.json("GET", f"/v1/envs/{name}/{version}/builds")

    async def build_output(self, name: str, version: str, engine: str) -> str:
        """All that the build on this engine printed."""
        said = await self._plane.bytes("GET", f"/v1/envs/{name}/{version}/builds/{engine}/output")
        return said.decode("utf-8", "replace")

    async def delete(self, name: str, version: str) -> None:
        await self._plane.bytes("DELETE", f"/v1/envs/{name}/{version}")

    async def upload(self, data: bytes) -> str:
        """Keep a bundle at the plane; gives the sha256 that an environment's `artifacts` name it by."""
        sha256 = hashlib.sha256(data).hexdigest()
        link = await self._plane.json("POST", "/v1/bundles", {"sha256": sha256, "size": len(data)})
        if link.get("exists") is not True:
            await self._send_signed("PUT", link.get("url"), data)
        return sha256

    async def download(self, sha256: str) -> bytes:
        """A bundle's bytes, checked against their name."""
        link = await self._plane.json("POST", f"/v1/bundles/{sha256}", {})
        data = await self._send_signed("GET", link.get("url"))
        if hashlib.sha256(data).hexdigest() != sha256:
            raise PlaneUnavailable(f"what came for bundle {sha256} is something else")
        return data

    async def _send_signed(self, method: str, url: object, data: bytes | None = None) -> bytes:
        """The key does not go to a signed URL."""
        if not isinstance(url, str):
            raise PlaneUnavailable("the plane gave no URL")
        async with Plane(url, "") as other:
            return await other.bytes(method, "", data, timeout_s=_CREATE_S)

    def list(self, *, search: str | None = None, status: str | None = None) -> AsyncGenerator[dict[str, Any]]:
        """All of them, a page at a time."""
        return _list(self._plane, "/v1/envs", {"q": search, "status": status})


class PlaneInstances:
    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def create(self, *, idempotency_key: str | None = None, **body: Any) -> dict[str, Any]:
        """`env="name@version"` or `image=...`, with engine, ttl_s, idle_ttl_s, labels, environment, run_id, ..."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else None
        return await self._plane.json("POST", "/v1/instances", body, headers=headers, timeout_s=_CREATE_S)

    async def get(self, instance_id: str) -> dict[str, Any]:
        return await self._plane.json("GET", f"/v1/instances/{instance_id}")

    async def history(self, instance_id: str) -> dict[str, Any]:
        return await self._plane.json("GET", f"/v1/instances/{instance_id}/history")

    async def heartbeat(self, instance_id: str) -> dict[str, Any]:
        return await self._plane.json("POST", f"/v1/instances/{instance_id}/heartbeat")

    async def extend(self, instance_id: str, ttl_s: float) -> dict[str, Any]:
        return await self._plane.json("POST", f"/v1/instances/{instance_id}/extend", {"ttl_s": ttl_s})

    async def exec(
        self, instance_id: str, command: str | Sequence[str], *, timeout_s: float = 60.0, **more: Any
    ) -> Exit:
        """`env`, `cwd` and `stdin` (bytes) are passed on."""
        if "stdin" in more:
            more["stdin_base64"] = base64.b64encode(more.pop("stdin")).decode()
        body = {"command": command, "timeout_s": timeout_s, **more}
        path = f"/v1/instances/{instance_id}/exec"
        found = await self._plane.json("POST", path, body, timeout_s=timeout_s + _TIMEOUT_S)
        try:
            return msgspec.convert(found, Exit)
        except msgspec.ValidationError as error:
            raise PlaneUnavailable(f"the answer to {path} is not a program's end: {error}") from error

    async def read(self, instance_id: str, path: str) -> bytes:
        return await self._plane.bytes("GET", f"/v1/instances/{instance_id}/files", query={"path": path})

    async def write(self, instance_id: str, path: str, data: bytes) -> None:
        await self._plane.bytes("PUT", f"/v1/instances/{instance_id}/files", data, query={"path": path})

    async def presign(self, instance_id: str, port: int, *, minutes: float = 5.0) -> str:
        """A URL to one port, for the holder, until it expires; it ends with a slash."""
        body = {"port": port, "minutes": minutes}
        url = (await self._plane.json("POST", f"/v1/instances/{instance_id}/presign", body)).get("url")
        if not isinstance(url, str):
            raise PlaneUnavailable("the answer to presign has no URL")
        return url

    async def wait(self, instance_id: str, port: int, path: str = "/", *, within_s: float = 45.0) -> str:
        """The URL of a port, once `path` there answers with 2xx: an instance that runs is not ready yet."""
        url = await self.presign(instance_id, port, minutes=max(5.0, within_s / 30))
        await wait_until_ok(url.rstrip("/") + "/" + path.lstrip("/"), within_s=within_s)
        return url

    async def delete(self, instance_id: str) -> None:
        await self._plane.bytes("DELETE", f"/v1/instances/{instance_id}", timeout_s=_CREATE_S)

    async def delete_many(self, **which: Any) -> dict[str, str]:
        """`ids`, `run_id` or `labels`; what became of each."""
        found = await self._plane.json("POST", "/v1/instances/delete", which, timeout_s=_CREATE_S)
        outcomes = found.get("outcomes")
        if not isinstance(outcomes, dict):
            raise PlaneUnavailable("the answer to a batch of deletions has no outcomes")
        return {str(name): str(outcome) for name, outcome in outcomes.items()}

    async def pause(self, instance_id: str) -> dict[str, Any]:
        return await self._plane.json("POST", f"/v1/instances/{instance_id}/pause", timeout_s=_CREATE_S)

    async def resume(self, instance_id: str) -> dict[str, Any]:
        return await self._plane.json("POST", f"/v1/instances/{instance_id}/resume", timeout_s=_CREATE_S)

    async def snapshot(self, instance_id: str) -> str:
        """The name of an image to create others from."""
        found = await self._plane.json("POST", f"/v1/instances/{instance_id}/snapshot", timeout_s=_CREATE_S)
        if not isinstance(found.get("image"), str):
            raise PlaneUnavailable("the answer to snapshot has no image")
        return found["image"]

    async def fork(self, instance_id: str, count: int = 1) -> list[dict[str, Any]]:
        path = f"/v1/instances/{instance_id}/fork"
        found = (await self._plane.json("POST", path, {"count": count}, timeout_s=_CREATE_S)).get("items")
        if not isinstance(found, list):
            raise PlaneUnavailable("the answer to fork has no instances")
        return found

    async def link(self, instance_id: str, rollout_id: str) -> dict[str, Any]:
        """From here on the rollout's id leads to it."""
        return await self._plane.json("POST", f"/v1/instances/{instance_id}/link", {"rollout_id": rollout_id})

    async def logs(self, instance_id: str, *, stream: str = "stdout", tail: int = 65536) -> bytes:
        """The end of what its own program printed."""
        query = {"stream": stream, "tail": tail}
        return await self._plane.bytes("GET", f"/v1/instances/{instance_id}/logs", query=query)

    async def changes(self, cursor: str | None = None, *, wait_s: float = 0.0) -> tuple[list[dict[str, Any]], str]:
        """What changed since the cursor, and the next one; without a cursor, where to begin."""
        query = {"cursor": cursor, "wait_s": wait_s}
        page = await self._plane.json("GET", "/v1/changes", query=query, timeout_s=wait_s + _TIMEOUT_S)
        items, following = page.get("items"), page.get("next")
        if not isinstance(items, list) or not isinstance(following, str):
            raise PlaneUnavailable("the answer to changes is not one")
        return items, following

    def list(self, *, labels: Mapping[str, str] | None = None, **query: Any) -> AsyncGenerator[dict[str, Any]]:
        """All of them, a page at a time; `env`, `run_id`, `live` ("true", "false", "any"), `owner` for admins."""
        return _list(self._plane, "/v1/instances", {**query, "label": [f"{k}={v}" for k, v in (labels or {}).items()]})


async def wait_until_ok(
    url: str, *, within_s: float = 45.0, every_s: float = 0.25, headers: Mapping[str, str] | None = None
) -> None:
    """Ask until the answer is 2xx. Raises `PlaneUnavailable` with the last answer when the time is over."""
    last = "nothing"
    try:
        async with asyncio.timeout(within_s), HttpSession(headers=headers) as session:
            while True:
                try:
                    answer = await session.request("GET", url, timeout_s=_PROBE_S)
                    if 200 <= answer.status < 300:
                        return
                    last = f"status {answer.status}"
                except HttpFailure as error:
                    last = error.kind
                except TimeoutError:
                    last = f"no answer within {_PROBE_S:g} s"
                await asyncio.sleep(every_s)
    except TimeoutError as error:
        raise PlaneUnavailable(f"no 2xx within {within_s:g} s; the last answer was {last}") from error


def _object(raw: bytes, what: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError) as error:
        raise PlaneUnavailable(f"{what} was not answered with a JSON object") from error


def _list(plane: Plane, path: str, query: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    async def read(cursor: str | None) -> tuple[list[dict[str, Any]], str | None]:
        page = await plane.json("GET", path, query={**query, "cursor": cursor, "limit": 200})
        items, following = page.get("items"), page.get("next")
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise PlaneUnavailable(f"the answer to {path} is not a page")
        return items, following if items else None

    return each_page(read)


def refusal_of(status: int, raw: bytes, what: str) -> PlaneError:
    answer: Any = None
    try:
        answer = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError):
        answer = None  # a proxy's page, or half an answer: the status says enough
    inner: Any = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("message"), str):
        return PlaneUnavailable(f"{what} was answered with status {status} by something that is not a plane")
    hint = inner.get("hint")
    kind = _CODES.get(str(inner.get("code"))) or _ERRORS.get(status, PlaneUnavailable)
    return kind(inner["message"], hint=hint if isinstance(hint, str) else None)
