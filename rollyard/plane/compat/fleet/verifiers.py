"""Verifiers by what they are: a bundle is known by its sha256, uploaded once, and run in a sandbox against an instance.

A request's arguments come pickled, and a pickle is a program: it travels on as it came and is opened next to the verifier, in the
sandbox. Which instance is meant is read from the plain copy of the arguments.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import lzma
import time
import zipfile
import zlib
from collections.abc import Iterable
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
from rollyard.plane.service.typed_records import TypedRecords

_MAX_CODE = 4 * 2**20
_MAX_TIMEOUT_S = 300
_ID = "ver_"
# what a damaged zip raises, by the way that its member is packed
_BAD_ZIP = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, KeyError, ValueError, OSError, EOFError, RuntimeError)


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


class VerifierCatalog:
    """The code of verifiers, by the digest of the bundle it came in or of itself: an owner's, and the server's own."""

    def __init__(self, records: TypedRecords[StoredVerifier], own: Iterable[StoredVerifier] = ()) -> None:
        self._records, self._own = records, {one.sha256: one for one in own}

    async def find(self, owner: str, digest: str) -> StoredVerifier | None:
        kept = await self._records.get(owner, digest)
        return kept.value if kept is not None else self._own.get(digest)

    async def put(self, owner: str, verifier: StoredVerifier) -> StoredVerifier:
        """The one that was there first stays."""
        if await self._records.add(owner, verifier.sha256, verifier):
            return verifier
        return await self.find(owner, verifier.sha256) or verifier


def store_verifier(key: str, code: str, at: float, digest: str | None = None) -> StoredVerifier:
    """By the digest of its bundle, or of the code itself. Its id follows from that, so every replica gives it the same one."""
    digest = digest or hashlib.sha256(code.encode()).hexdigest()
    return StoredVerifier(id=_ID + digest, key=key, sha256=digest, code=code, created_at=at)


class Verifiers:
    def __init__(self, places: WorldInstances, guard: Guard, catalog: VerifierCatalog) -> None:
        self._places, self._guard, self._catalog = places, guard, catalog

    def routes(self) -> list[Route]:
        return [
            Route("/v1/verifiers/check", for_owner(self._guard, self.check), methods=["GET"]),
            Route("/v1/verifiers/execute", for_owner(self._guard, self.execute), methods=["POST"]),
            Route("/v1/verifiers/{id}", for_owner(self._guard, self.get), methods=["GET"]),
        ]

    async def check(self, request: Request, owner: str) -> Response:
        known = await self._catalog.find(owner, request.query_params.get("sha256", ""))
        return JSONResponse({"success": known is not None, "key": known.key if known else None})

    async def get(self, request: Request, owner: str) -> Response:
        known = await self._catalog.find(owner, request.path_params["id"].removeprefix(_ID))
        if known is None:
            raise FleetRefusal(404, "Verifier not found")
        return JSONResponse(verifier_json(known))

    async def execute(self, request: Request, owner: str) -> Response:
        wanted = await body(request, Execute)
        known, hit = await self._find_known(wanted, owner)
        place = await self._places.find(_instance_of(wanted), owner)
        check = VerifierCode(
            code=known.code,
            task_key=wanted.key or "",
            function=wanted.function_name,
            pickled=wanted.args,
            env_key=place.world.key,
            instance_id=place.id,
        )
        limit = min(max(wanted.timeout or 60, 1), _MAX_TIMEOUT_S)
        done = await run_check(self._places.checks, check, place.databases, timeout_s=limit)
        details = {"key": known.key, "version": 1, "verifier_id": known.id, "bundle_cache_hit": hit}
        return JSONResponse({**details, **describe_run(done)})

    async def _find_known(self, wanted: Execute, owner: str) -> tuple[StoredVerifier, bool]:
        if wanted.bundle is None:
            known = await self._catalog.find(owner, wanted.sha256 or "")
            if known is None:
                raise FleetRefusal(404, "bundle not found: send it once")
            return known, True
        try:
            packed = base64.b64decode(wanted.bundle, validate=True)
        except binascii.Error as error:
            raise FleetRefusal(400, "bundle is not base64") from error
        digest = hashlib.sha256(packed).hexdigest()
        if wanted.sha256 is not None and wanted.sha256 != digest:
            raise FleetRefusal(400, "the bundle is not the one that sha256 says")
        sent = store_verifier(wanted.key or "", unpack_code(packed), time.time(), digest)
        return await self._catalog.put(owner, sent), False


def unpack_code(packed: bytes) -> str:
    """The code in a bundle; nothing else of it is looked at."""
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as bundle, bundle.open("verifier.py") as file:
            code = file.read(_MAX_CODE + 1)
    except _BAD_ZIP as error:
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


def _instance_of(wanted: Execute) -> str:
    for value in reversed(wanted.args_array or []):
        if isinstance(value, dict) and isinstance(value.get("env"), str):
            return value["env"]
    raise FleetRefusal(400, "args_array names no instance")
