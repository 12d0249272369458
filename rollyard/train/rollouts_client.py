"""`RolloutsClient`: rollouts of a server on another machine (`rollyard serve rollouts`), for a trainer in Python.

    async with RolloutsClient("http://runner:8800", key) as rollouts:
        job = await rollouts.submit(tasks=[{"instruction": "...", "verify": ["..."]}], attempts=8)
        job = await rollouts.wait(job["id"])
        rows = await rollouts.rows(job["id"], format="trl")

A request whose answer was lost is sent again; the same job comes back, since each `submit` has a key of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self
from urllib.parse import urlencode

import anyio
import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import Error, PolicyError
from rollyard.core.ids import new_id
from rollyard.net.http_client import BadAnswer, HttpPool

_PAUSES_S = (0.25, 0.5, 1.0)
_WAIT_S = 30.0  # of one long poll
_LONGEST = 2**30


class RolloutsRefused(Error):
    """The server said no: `status` and `code` say how."""

    def __init__(self, status: int, code: str, message: str, hint: str | None) -> None:
        super().__init__(message, hint=hint)
        self.status, self.code = status, code


class RolloutsClient:
    """`timeout_s` is for one request beside what the server is asked to wait."""

    def __init__(self, url: str, key: str | None = None, *, timeout_s: float = 60.0) -> None:
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._pool = HttpPool(connect_s=10.0, idle_s=5.0, max_body=_LONGEST)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.aclose()

    # jobs

    async def submit(self, *, key: str | None = None, **request: Any) -> dict[str, Any]:
        """A job: the fields of `RolloutJobRequest`. `key` names the request, for a caller that may be started again."""
        headers = {"idempotency-key": key or new_id("req")}
        return await self._ask("POST", "/v1/jobs", request, headers=headers)

    async def job(self, job_id: str) -> dict[str, Any]:
        return await self._ask("GET", f"/v1/jobs/{job_id}")

    async def wait(self, job_id: str) -> dict[str, Any]:
        """The job once it is over."""
        while True:
            found = await self._ask("GET", f"/v1/jobs/{job_id}", query={"wait": _WAIT_S})
            if found["state"] not in ("queued", "running"):
                return found

    async def cancel(self, job_id: str) -> dict[str, Any]:
        return await self._ask("DELETE", f"/v1/jobs/{job_id}")

    async def rollouts(self, job_id: str) -> list[dict[str, Any]]:
        return (await self._ask("GET", f"/v1/jobs/{job_id}/rollouts"))["rollouts"]

    async def rows(self, job_id: str, format: str = "samples", *, group: str | None = None) -> Any:
        """Rows for a trainer; `left_out` of the answer to `row_answer` names rollouts that give none."""
        return (await self.row_answer(job_id, format, group=group))["rows"]

    async def row_answer(self, job_id: str, format: str = "samples", *, group: str | None = None) -> dict[str, Any]:
        query = {"format": format, **({"group": group} if group is not None else {})}
        return await self._ask("GET", f"/v1/jobs/{job_id}/rows", query=query)

    # the trainer's half, where the server's policy is a queue

    async def take(self, *, wait: float = 10.0, most: int = 64) -> list[dict[str, Any]]:
        """Model calls that wait for an answer, at least one unless `wait` seconds pass first."""
        return (await self._ask("GET", "/v1/calls", query={"wait": wait, "max": most}))["calls"]

    async def reply(
        self,
        call_id: str,
        *,
        ids: Sequence[int] | None = None,
        logprobs: Sequence[float] | None = None,
        text: str | None = None,
        version: int | None = None,
    ) -> None:
        given = {"ids": ids, "logprobs": logprobs, "text": text, "version": version}
        body = {name: value for name, value in given.items() if value is not None}
        await self._ask("POST", f"/v1/calls/{call_id}/reply", body, once=True)

    async def fail(self, call_id: str, message: str) -> None:
        await self._ask("POST", f"/v1/calls/{call_id}/fail", {"message": message}, once=True)

    async def publish(self, version: int) -> None:
        """From now on answers are of this policy version."""
        await self._ask("POST", "/v1/policy_version", {"version": version})

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        once: bool = False,
    ) -> dict[str, Any]:
        url = f"{self._url}{path}" + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else msgspec.json.encode(body)
        within = self._timeout_s + float((query or {}).get("wait", 0))
        waits = [] if once else list(_PAUSES_S)  # before each further try
        while True:
            try:
                answer = await self._pool.exchange(method, url, data, {**self._headers, **(headers or {})}, within)
                return _read(answer.status, answer.body)
            except (OSError, TimeoutError, BadAnswer) as error:
                if not waits:
                    raise PolicyError(f"the server of rollouts at {self._url} does not answer: {error}") from error
                await anyio.sleep(waits.pop(0))


def _read(status: int, body: bytes) -> dict[str, Any]:
    try:
        found: Any = msgspec.json.decode(body)
    except BAD_JSON:
        found = None
    if status < 400 and isinstance(found, dict):
        return found  # pyright: ignore[reportUnknownVariableType]
    error: Any = found.get("error") if isinstance(found, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if isinstance(error, dict):
        raise RolloutsRefused(status, error["code"], error["message"], error.get("hint"))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    raise RolloutsRefused(status, "unknown", body[:200].decode(errors="replace"), None)
