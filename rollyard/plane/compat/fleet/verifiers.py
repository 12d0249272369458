"""Verifiers by what they are: a bundle is known by its sha256, uploaded once, and run in a sandbox against an instance.

A request's arguments come pickled, and a pickle is a program: it travels on as it came and is opened next to the verifier, in the
sandbox. Which instance is meant is read from the plain copy of the arguments.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import time
import zipfile
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollyard.core.ids import new_id
from rollyard.envs.fleet.verifier_code import Checked, VerifierCode, run_check
from rollyard.plane.compat.fleet.control import body, for_owner
from rollyard.plane.compat.fleet.errors import FleetRefusal
from rollyard.plane.compat.fleet.guard import Guard
from rollyard.plane.compat.fleet.instances import WorldInstances
from rollyard.plane.service.shapes import rfc3339

_MAX_CODE = 4 * 2**20
_MAX_TIMEOUT_S = 300
_KEPT = 10_000


class Execute(msgspec.Struct, frozen=True, kw_only=True):
    key: str | None = None
    sha256: str | None = None
    bundle: str | None = None
    args: str | None = None
    args_array: list[Any] | None = None
    function_name: str | None = "verify"
    timeout: int | None = 60


class StoredVerifier(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    key: str
    sha256: str
    code: str
    created_at: float


class Shelf:
    """The code of verifiers, by the digest of the bundle it came in or of itself."""

    def __init__(self) -> None:
        self._by_digest: dict[str, StoredVerifier] = {}
        self._by_id: dict[str, StoredVerifier] = {}

    def find(self, digest: str) -> StoredVerifier | None:
        return self._by_digest.get(digest)

    def by_id(self, verifier_id: str) -> StoredVerifier | None:
        return self._by_id.get(verifier_id)

    def put(self, key: str, code: str, digest: str | None = None) -> StoredVerifier:
        digest = digest or hashlib.sha256(code.encode()).hexdigest()
        if (known := self._by_digest.get(digest)) is not None:
            return known
        while len(self._by_id) >= _KEPT:
            oldest = self._by_id.pop(next(iter(self._by_id)))
            self._by_digest.pop(oldest.sha256, None)
        made = StoredVerifier(id=new_id("ver"), key=key, sha256=digest, code=code, created_at=time.time())
        self._by_digest[digest] = self._by_id[made.id] = made
        return made


class Verifiers:
    def __init__(self, places: WorldInstances, guard: Guard, shelf: Shelf) -> None:
        self._places, self._guard, self._shelf = places, guard, shelf

    def routes(self) -> list[Route]:
        return [
            Route("/v1/verifiers/check", for_owner(self._guard, self.check), methods=["GET"]),
            Route("/v1/verifiers/execute", for_owner(self._guard, self.execute), methods=["POST"]),
            Route("/v1/verifiers/{id}", for_owner(self._guard, self.get), methods=["GET"]),
        ]

    async def check(self, request: Request, owner: str) -> Response:
        known = self._shelf.find(request.query_params.get("sha256", ""))
        return JSONResponse({"success": known is not None, "key": known.key if known else None})

    async def get(self, request: Request, owner: str) -> Response:
        known = self._shelf.by_id(request.path_params["id"])
        if known is None:
            raise FleetRefusal(404, "Verifier not found")
        return JSONResponse(verifier_json(known))

    async def execute(self, request: Request, owner: str) -> Response:
        asked = await body(request, Execute)
        known, hit = self._find_known(asked)
        place = await self._places.find(_instance_of(asked), owner)
        check = VerifierCode(
            code=known.code,
            task_key=asked.key or "",
            function=asked.function_name,
            pickled=asked.args,
            env_key=place.world.key,
            instance_id=place.id,
        )
        limit = min(max(asked.timeout or 60, 1), _MAX_TIMEOUT_S)
        done = await run_check(self._places.checks, check, place.databases, timeout_s=limit)
        told = {"key": known.key, "version": 1, "verifier_id": known.id, "bundle_cache_hit": hit}
        return JSONResponse({**told, **describe_run(done)})

    def _find_known(self, asked: Execute) -> tuple[StoredVerifier, bool]:
        if asked.bundle is None:
            known = self._shelf.find(asked.sha256 or "")
            if known is None:
                raise FleetRefusal(404, "bundle not found: send it once")
            return known, True
        try:
            packed = base64.b64decode(asked.bundle, validate=True)
        except binascii.Error as error:
            raise FleetRefusal(400, "bundle is not base64") from error
        digest = hashlib.sha256(packed).hexdigest()
        if asked.sha256 is not None and asked.sha256 != digest:
            raise FleetRefusal(400, "the bundle is not the one that sha256 says")
        return self._shelf.put(asked.key or "", unpack_code(packed), digest), False


def unpack_code(packed: bytes) -> str:
    """The code in a bundle; nothing else of it is looked at."""
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as bundle, bundle.open("verifier.py") as file:
            code = file.read(_MAX_CODE + 1)
    except (zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError) as error:
        raise FleetRefusal(400, f"the bundle has no readable verifier.py: {error}") from error
    if len(code) > _MAX_CODE:
        raise FleetRefusal(413, f"verifier code is at most {_MAX_CODE} bytes")
    try:
        return code.decode()
    except UnicodeDecodeError as error:
        raise FleetRefusal(400, "verifier.py is not text") from error


def describe_run(done: Checked) -> dict[str, Any]:
    """A check's end as clients read it; one without a score is no success, whatever the code returned."""
    cause = done.cause or {"type": "Error", "message": done.error or ""}
    error = None
    if done.score is None:
        error = {"type": cause["type"], "message": done.error, "traceback": cause.get("traceback", "")}
    return {
        "success": done.score is not None,
        "result": done.result if done.score is not None else None,
        "error": error,
        "execution_id": new_id("exec"),
        "execution_time_ms": round(done.seconds * 1000),
        "stdout": done.stdout,
    }


def verifier_json(verifier: StoredVerifier) -> dict[str, Any]:
    return {
        "verifier_id": verifier.id,
        "key": verifier.key,
        "version": 1,
        "sha256": verifier.sha256,
        "code": verifier.code,
        "created_at": rfc3339(verifier.created_at),
    }


def _instance_of(asked: Execute) -> str:
    for value in reversed(asked.args_array or []):
        if isinstance(value, dict) and isinstance(value.get("env"), str):
            return value["env"]
    raise FleetRefusal(400, "args_array names no instance")
