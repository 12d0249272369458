"""The data half, what runs inside a sandbox elsewhere: files over HTTP, programs and directories over Connect.

One address serves all sandboxes; `E2b-Sandbox-Id` says which is meant, and old clients, which leave it out after a connect,
are known by their token. Each sandbox has its own. A file can also be
reached by a signed URL, which names the path, the direction and an end.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import Error, SandboxGone
from rollyard.plane.compat.e2b import connect_frames
from rollyard.plane.compat.e2b.boxes import E2bSandbox, SandboxTokens
from rollyard.plane.compat.e2b.directories import METHODS
from rollyard.plane.compat.e2b.errors import E2bRefusal, connect, explain, rest
from rollyard.plane.compat.e2b.file_metadata import read_metadata, set_metadata
from rollyard.plane.compat.e2b.instance_boxes import InstanceBoxes
from rollyard.plane.compat.e2b.processes import KEEPALIVE_S, Process
from rollyard.plane.compat.e2b.watchers import DirectoryWatcher, Watchers

MAX_FILE = 512 * 2**20
_KERNEL = ("/proc/", "/sys/")
_READ_S = 30.0
Events = Callable[[float], AsyncIterator[dict[str, Any]]]  # by how often to say that the stream still lives


class Envd:
    def __init__(self, boxes: InstanceBoxes) -> None:
        self._boxes = boxes
        self._watchers: WeakKeyDictionary[E2bSandbox, Watchers] = WeakKeyDictionary()

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/files", self.download, methods=["GET"]),
            Route("/files", self.upload, methods=["POST"]),
            Route("/process.Process/Start", self.start, methods=["POST"]),
            Route("/process.Process/Connect", self.rejoin, methods=["POST"]),
            Route("/process.Process/{method}", self._unary(_process), methods=["POST"]),
            Route("/filesystem.Filesystem/WatchDir", self.watch, methods=["POST"]),
            Route("/filesystem.Filesystem/{method}", self._unary(self._filesystem), methods=["POST"]),
        ]

    async def _box(self, request: Request, *, signed: bool = False) -> E2bSandbox:
        given = request.headers.get("x-access-token", "")
        sandbox_id = _sandbox_id(request, self._boxes.tokens)
        if signed and not given and request.query_params.get("signature"):
            return await self._boxes.find(await self._find_signer(request, sandbox_id))
        if not hmac.compare_digest(given.encode(), self._boxes.tokens.of(sandbox_id).encode()):
            raise E2bRefusal("unauthenticated", "the access token is not this sandbox's")
        return await self._boxes.find(sandbox_id)

    async def _find_signer(self, request: Request, sandbox_id: str) -> str:
        """The sandbox whose token signed this URL. On one address for all, the URL itself does not say which it is."""

        def holds(token: str) -> bool:
            return _is_signed(request, token)

        if sandbox_id:
            found = sandbox_id if holds(self._boxes.tokens.of(sandbox_id)) else None
        else:
            found = await self._boxes.find_by_token(holds)
        if found is None:
            raise E2bRefusal("unauthenticated", "invalid signature")
        until = request.query_params.get("signature_expiration", "")
        if until and int(until) < time.time():
            raise E2bRefusal("unauthenticated", "signature is already expired")
        return found

    async def health(self, request: Request) -> Response:
        try:
            await self._boxes.find(_sandbox_id(request, self._boxes.tokens), wake=False)
        except Error as error:
            return rest(error)
        return Response(status_code=204)

    async def download(self, request: Request) -> Response:
        try:
            box = await self._box(request, signed=True)
            path = await box.accounts.path(request.query_params.get("path", ""), user_of(request))
            data = await _read_kernel_file(box, path) if path.startswith(_KERNEL) else None
            data = data if data is not None else await box.sandbox.read(path, max_bytes=MAX_FILE)
        except (Error, E2bRefusal) as error:
            return rest(error)
        return Response(data, media_type="application/octet-stream")

    async def upload(self, request: Request) -> Response:
        try:
            box = await self._box(request, signed=True)
            metadata, user = read_metadata(request.headers), user_of(request)
            if request.headers.get("content-type", "").startswith("multipart/form-data"):
                written = await _multipart(request, box, user)
            else:
                path = await box.accounts.path(request.query_params.get("path", ""), user)
                await box.sandbox.write(path, await _read_body(request), user=box.accounts.as_user(user))
                written = [path]
            for path in written:
                await set_metadata(box, path, metadata, user)
        except ClientDisconnect:
            return Response(status_code=400)
        except (Error, E2bRefusal) as error:
            return rest(error)
        extra = {"metadata": metadata} if metadata else {}
        return JSONResponse(
            [{"name": path.rpartition("/")[2], "type": "file", "path": path, **extra} for path in written]
        )

    async def start(self, request: Request) -> Response:
        async def begin(box: E2bSandbox, fields: dict[str, Any]) -> Events:
            millis = request.headers.get("connect-timeout-ms", "")
            deadline = int(millis) / 1000 if millis.isdigit() and int(millis) else None
            return _of_a_program(box, await box.processes.start(fields, user=user_of(request), deadline=deadline))

        return await self._stream(request, begin)

    async def rejoin(self, request: Request) -> Response:
        async def begin(box: E2bSandbox, fields: dict[str, Any]) -> Events:
            return _of_a_program(box, await box.processes.select(fields))

        return await self._stream(request, begin)

    async def watch(self, request: Request) -> Response:
        """The events themselves are the messages, where a program's are in a field."""

        async def begin(box: E2bSandbox, fields: dict[str, Any]) -> Events:
            watcher = DirectoryWatcher(box, fields, user_of(request))
            await watcher.begin()
            return watcher.stream

        return await self._stream(request, begin)

    async def _filesystem(self, request: Request, box: E2bSandbox, fields: dict[str, Any]) -> dict[str, Any]:
        method, user = request.path_params["method"], user_of(request)
        if method in METHODS:
            return await METHODS[method](box, fields, user)
        watchers = self._watchers.setdefault(box, Watchers())
        if method == "CreateWatcher":
            return await watchers.create(box, fields, user)
        if method == "GetWatcherEvents":
            return await watchers.events(fields)
        if method == "RemoveWatcher":
            return watchers.remove(fields)
        raise E2bRefusal("unimplemented", f"filesystem.Filesystem/{method} is not served here")

    async def _stream(
        self, request: Request, begin: Callable[[E2bSandbox, dict[str, Any]], Awaitable[Events]]
    ) -> Response:
        """Events, until there are no more. The client may hang up: what they are about goes on."""
        every = request.headers.get("keepalive-ping-interval", "")
        try:
            box = await self._box(request)
            events = await begin(box, connect_frames.only_message(await _read_body(request)))
        except SandboxGone as gone:
            return connect(gone)
        except (Error, E2bRefusal) as error:
            return Response(_to_error(error), media_type=connect_frames.CONTENT_TYPE)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for event in events(float(every) if every.isdigit() and int(every) else KEEPALIVE_S):
                    yield connect_frames.message(event)
                yield connect_frames.end()
            except (Error, E2bRefusal) as error:
                yield _to_error(error)

        return StreamingResponse(body(), media_type=connect_frames.CONTENT_TYPE)

    def _unary(
        self, serve: Callable[[Request, E2bSandbox, dict[str, Any]], Awaitable[dict[str, Any]]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                box = await self._box(request)
                fields = msgspec.json.decode(await _read_body(request) or b"{}", type=dict[str, Any])
                return JSONResponse(await serve(request, box, fields))
            except (*BAD_JSON, binascii.Error) as error:
                return connect(E2bRefusal("invalid_argument", f"not a request: {error}"))
            except (Error, E2bRefusal) as error:
                return connect(error)

        return answer


def _of_a_program(box: E2bSandbox, process: Process) -> Events:
    async def events(keepalive_s: float) -> AsyncIterator[dict[str, Any]]:
        try:
            async for event in process.events(keepalive_s):
                yield {"event": event}
        finally:
            box.processes.note_reader_gone(process)

    return events


def _sandbox_id(request: Request, tokens: SandboxTokens) -> str:
    said = request.headers.get("e2b-sandbox-id")
    return said or tokens.id_in(request.headers.get("x-access-token", ""))


async def _process(request: Request, box: E2bSandbox, fields: dict[str, Any]) -> dict[str, Any]:
    method = request.path_params["method"]
    if method == "List":
        return {"processes": await box.processes.list()}
    if method == "SendSignal":
        await box.processes.signal(fields)
    elif method == "SendInput":
        await box.processes.feed(fields)
    elif method == "Update":
        await box.processes.resize(fields)
    elif method == "CloseStdin":
        await (await box.processes.select(fields, running=True)).job.close_stdin()
    else:
        raise E2bRefusal("unimplemented", f"process.Process/{method} is not served here")
    return {}


async def _read_kernel_file(box: E2bSandbox, path: str) -> bytes | None:
    """What the kernel says there: backends read regular files alone. None where nothing could be read that way."""
    said = await box.sandbox.exec(["cat", path], timeout=_READ_S)
    return said.stdout if said.ok and not said.truncated else None


async def _multipart(request: Request, box: E2bSandbox, user: str | None) -> list[str]:
    only = request.query_params.get("path")
    written: list[str] = []
    async with request.form(max_files=1000) as form:
        for name, part in form.multi_items():
            if isinstance(part, UploadFile):
                path, data = only or part.filename or "", await part.read()
            elif name == "file" and only:  # a browser's form sends a text without a file's name
                path, data = only, part.encode()
            else:
                continue
            path = await box.accounts.path(path, user)
            await box.sandbox.write(path, data, user=box.accounts.as_user(user))
            written.append(path)
    if not written:
        raise E2bRefusal("invalid_argument", "no file in the request")
    return written


async def _read_body(request: Request) -> bytes:
    """The body, unpacked and bounded."""
    unpack = zlib.decompressobj(31) if request.headers.get("content-encoding") == "gzip" else None
    body = bytearray()
    try:
        async for part in request.stream():
            body += unpack.decompress(part, MAX_FILE - len(body) + 1) if unpack else part
            if len(body) > MAX_FILE:
                raise E2bRefusal("invalid_argument", f"more than {MAX_FILE} bytes", 413)
    except zlib.error as error:
        raise E2bRefusal("invalid_argument", f"not gzip: {error}") from error
    return bytes(body)


def _to_error(error: Error | E2bRefusal) -> bytes:
    found = explain(error)
    return connect_frames.end({"code": found.code, "message": found.message})


def user_of(request: Request) -> str | None:
    """The user that the client asks to be; None when it names none."""
    name = request.query_params.get("username", "")
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "basic":
        try:
            name = base64.b64decode(value).decode().partition(":")[0]
        except (binascii.Error, UnicodeDecodeError) as error:
            raise E2bRefusal("unauthenticated", "not a user name") from error
    return name or None


def _is_signed(request: Request, token: str) -> bool:
    query = request.query_params
    until = query.get("signature_expiration", "")
    if until and not until.isdigit():
        return False
    way = "read" if request.method == "GET" else "write"
    words = f"{query.get('path', '')}:{way}:{query.get('username', '')}:{token}" + (f":{until}" if until else "")
    digest = base64.b64encode(hashlib.sha256(words.encode()).digest()).decode().rstrip("=")
    return hmac.compare_digest(query.get("signature", "").encode(), f"v1_{digest}".encode())
