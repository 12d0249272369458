"""The backends hf, daytona and prime through their real SDKs: keys, faults, leases, ends. Their servers are on the loopback."""

import asyncio
import importlib
import json
import logging
import os
import subprocess
import sys
import time
import traceback
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

import rollyard as ry
from rollyard.core.errors import ConfigError, Error, SandboxGone, Unsupported
from rollyard.sandbox import backend as made_by_name
from rollyard.sandbox.local.backend import LocalBackend
from tests.plane.e2b_server import listening
from tests.sandbox import sdks
from tests.sandbox.hf_server import Endpoint

NAMES = ["hf", *(pytest.param(name, marks=[] if sdks.ready(name) else [pytest.mark.slow]) for name in sdks.PINNED)]
RUN = {"hf": "/v1/exec", "daytona": "/process/execute", "prime": "/command_session.CommandSession/Start"}
CREATE = {"hf": "/api/jobs/tester", "daytona": "/api/sandbox", "prime": "/api/v1/sandbox"}
SECRET = {"hf": "token", "daytona": "key", "prime": "key"}


@pytest.fixture(params=NAMES)
def name(request):
    with sdks.sdk(request.param):
        yield request.param


def served(name, backend, **options):
    return importlib.import_module(f"tests.sandbox.{name}_server").serving(backend, **options)


@asynccontextmanager
async def through(name, backend, **options):
    """A backend of this name whose sandboxes are those of `backend`."""
    async with served(name, backend) as given, made_by_name(name, **given, **options) as remote:
        yield remote


@asynccontextmanager
async def at(name, app, secret):
    """The options of a backend whose whole service is `app`."""
    if name == "hf":
        with Endpoint() as endpoint:
            async with endpoint.serving(app):
                yield {"token": secret, "namespace": "tester", "network": "none", "isolation": "namespace"}
    else:
        async with listening(app) as url:
            path = "/api" if name == "daytona" else ""
            yield {"key": secret, "url": url + path, "isolation": "namespace"}


class Heard(logging.Handler):
    """Every record, as it would be written."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.text = ""

    def emit(self, record):
        self.text += self.format(record) + "\n"

    def __enter__(self):
        root = logging.getLogger()
        self._level = root.level
        root.setLevel(logging.DEBUG)
        root.addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger().removeHandler(self)
        logging.getLogger().setLevel(self._level)


def rude(status):
    """A server at fault: it says the caller's key aloud, whatever is asked."""

    async def echo(request):
        said = f"no: {dict(request.headers)}"
        told = {"error": said, "message": said, "detail": said}
        return JSONResponse(told, status, headers={"x-error-message": said.replace("\n", " ")})

    return Starlette(routes=[Route("/{path:path}", echo, methods=["GET", "POST", "PUT", "DELETE"])])


def command_lines():
    """Of every program on this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            continue


@pytest.mark.anyio
@pytest.mark.adversarial
async def test_the_key_is_in_no_error_log_command_line_or_sandbox(name, backend, capsys):
    secret, texts = "canary-" + "c0ffee" * 6, []

    async def failing(call):
        with pytest.raises(Error) as caught:
            await call
        texts.append("".join(traceback.format_exception(caught.value)) + repr(caught.value))

    with Heard() as heard:
        for status in (400, 401):
            async with at(name, rude(status), secret) as options, made_by_name(name, **options) as remote:
                await failing(remote.open(ry.SandboxSpec()))
                await failing(remote.attach("sbx_none"))
                await failing(remote.list())
                await failing(remote.reap(labels={}))
        async with served(name, backend, **{SECRET[name]: secret}) as options:
            async with made_by_name(name, **options) as remote:
                async with remote.open(ry.SandboxSpec(labels={"a": "b"})) as box:
                    await failing(box.read("/no/such/file"))
                    await failing(box.exec("true", cwd="/no/such/place", timeout=30))
                    job = await box.start("sleep 30")
                    look = "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; grep -rls canary- /tmp /var/tmp"
                    inside = await box.exec(look.replace("canary-", "canary''-"), timeout=60)
                    assert b"ROLLYARD_JOB" in inside.stdout
                    assert secret.encode() not in inside.stdout
                    assert not [line for line in command_lines() if secret.encode() in line]
                    await job.kill()
                await failing(box.exec("true", timeout=5))
                await failing(box.write("/tmp/x", b"x" * 100_000))
            wrong = {**options, SECRET[name]: f"{secret}-wrong"}
            if name == "hf":
                wrong["namespace"] = "tester"
            async with made_by_name(name, **wrong) as remote:
                await failing(remote.open(ry.SandboxSpec()))
    said = capsys.readouterr()
    for text in (*texts, heard.text, said.out, said.err):
        assert secret not in text
    assert len(texts) == 13


@pytest.mark.anyio
@pytest.mark.slow
async def test_the_key_is_in_no_error_when_nobody_answers_or_the_answer_is_broken(name, capsys):
    secret, texts = "canary-" + "c0ffee" * 6, []
    with Heard() as heard:
        for app in (rude(500), rude(503)):
            async with at(name, app, secret) as options, made_by_name(name, **options) as remote:
                for call in (remote.open(ry.SandboxSpec(boot_s=5)), remote.list()):
                    with pytest.raises(Error) as caught:
                        await call
                    texts.append("".join(traceback.format_exception(caught.value)) + repr(caught.value))
        async with made_by_name(name, **options) as remote:  # its server is gone
            with pytest.raises(Error) as caught:
                await remote.open(ry.SandboxSpec(boot_s=5))
            texts.append("".join(traceback.format_exception(caught.value)) + repr(caught.value))
            assert caught.value.retry in ("safe", "if_idempotent")
    said = capsys.readouterr()
    for text in (*texts, heard.text, said.out, said.err):
        assert secret not in text


class Losing:
    """Lets one request through and loses its answer: a 504, or a connection that is cut."""

    def __init__(self, app, matches, *, status=None):
        self._app, self._matches, self._status = app, matches, status
        self.lost = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        sent = False

        async def again():
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body}

        if self.lost or not self._matches(scope, body):
            await self._app(scope, again, send)
            return
        self.lost += 1

        async def swallow(message):
            return None

        await self._app(scope, again, swallow)
        if self._status is None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
            await send({"type": "http.response.body", "body": b"{", "more_body": True})
            raise ConnectionResetError("cut on purpose")
        await send({"type": "http.response.start", "status": self._status, "headers": [(b"retry-after", b"0")]})
        await send({"type": "http.response.body", "body": b"{}"})


@asynccontextmanager
async def losing(name, backend, matches, **options):
    """A backend whose server loses one answer."""
    module = importlib.import_module(f"tests.sandbox.{name}_server")
    kind = {"hf": "HFServer", "daytona": "DaytonaServer", "prime": "PrimeServer"}[name]
    server = getattr(module, kind)(backend)
    app = Losing(server.app, matches, **options)
    try:
        with getattr(module, "another_home", lambda: Path("/"))() if name == "prime" else sdks.contextlib.nullcontext():
            async with at(name, app, server.key if name != "hf" else server.token) as given:
                url = given.get("url", os.environ.get("HF_ENDPOINT", "")).removesuffix("/api")
                server.url = url
                async with made_by_name(name, **given) as remote:
                    yield remote, app
    finally:
        for one in (server.jobs if name == "hf" else server.made).values():
            one.watch.cancel()
        await backend.reap(labels={}, older_than=0.0)


@pytest.mark.anyio
@pytest.mark.parametrize("status", [504, 503])
async def test_an_answer_lost_after_the_sandbox_was_made_makes_no_second_one(name, backend, status):
    def create(scope, body):
        return scope["method"] == "POST" and scope["path"] == CREATE[name]

    async with losing(name, backend, create, status=status) as (remote, app):
        async with remote.open(ry.SandboxSpec(boot_s=60)) as box:
            assert app.lost == 1
            assert (await box.exec("echo up", timeout=30)).stdout == b"up\n"
            assert len(await backend.list()) == 1
            assert [info.id for info in await remote.list()] == [box.id]


@pytest.mark.anyio
async def test_a_program_whose_answer_was_lost_runs_once_and_is_told(name, backend):
    def run(scope, body):
        return scope["path"].endswith(RUN[name]) and b"count-me" in body

    async with losing(name, backend, run) as (remote, app):
        async with remote.open(ry.SandboxSpec(boot_s=60)) as box:
            done = await box.exec("echo count-me >> /tmp/count; cat /tmp/count", timeout=60)
            assert (app.lost, done.exit_code, done.stdout) == (1, 0, b"count-me\n")


@pytest.mark.anyio
async def test_an_owned_sandbox_is_made_to_end_without_its_opener_and_is_used_while_it_lives(name, backend):
    async with through(name, backend, lease_s=30) as remote:
        box = await remote.open(ry.SandboxSpec(ttl_s=600))
        (info,) = await remote.list()
        assert info.expires_at is not None
        assert 600 <= info.expires_at - time.time() <= 700
        assert await box.alive()
    with pytest.raises(SandboxGone):
        await box.exec("true", timeout=5)
    assert await backend.list() == []


@pytest.mark.anyio
async def test_what_the_provider_decides_is_refused_before_anything_is_made(name, backend):
    async with through(name, backend) as remote:
        for spec in (
            ry.SandboxSpec(layers=("layer_x",)),
            ry.SandboxSpec(user="nobody"),
            ry.SandboxSpec(resources=ry.Resources(pids=100)),
            ry.SandboxSpec(resources=ry.Resources(gpus=1)),
            ry.SandboxSpec(network="allowlist", allowed_hosts=("example.org",)),
            ry.SandboxSpec(options={"privileged": "1"}),
            ry.SandboxSpec(idle_ttl_s=60),
        ):
            with pytest.raises(Unsupported):
                remote.open(spec)
        with pytest.raises(ConfigError, match="allow_unsafe"):
            remote.open(ry.SandboxSpec(network="host"))
        assert await backend.list() == []


@pytest.mark.anyio
async def test_hugging_face_jobs_have_the_internet_and_the_backend_says_so(backend):
    with sdks.sdk("hf"):
        async with served("hf", backend) as options:
            async with made_by_name("hf", **{**options, "network": "host"}) as remote:
                assert not remote.capabilities.network_none
                with pytest.raises(Unsupported, match="network='host' and allow_unsafe=True"):
                    remote.open(ry.SandboxSpec())
                async with remote.open(ry.SandboxSpec(network="host", allow_unsafe=True)) as box:
                    assert (await box.exec("true", timeout=30)).ok


@pytest.mark.anyio
async def test_clean_finds_what_a_killed_host_left_by_label_and_nothing_else(name, backend):
    async with through(name, backend) as remote:
        kept = ry.SandboxSpec(labels={"rollyard.run": "run_other"}, lifetime="ttl")
        left = ry.SandboxSpec(labels={"rollyard.run": "run_1"}, lifetime="ttl")
        boxes = [await remote.open(spec) for spec in (kept, left, left)]
        assert {info.id for info in await remote.list({"rollyard.run": "run_1"})} == {box.id for box in boxes[1:]}
        assert set(await remote.reap({"rollyard.run": "run_1"})) == {box.id for box in boxes[1:]}
        assert [info.id for info in await remote.list()] == [boxes[0].id]
        for box in boxes[1:]:
            with pytest.raises(SandboxGone):
                await box.exec("true", timeout=5)


def test_sandboxes_are_deleted_without_an_event_loop_and_those_that_stay_are_named(name, tmp_path):
    async def serve(stop, ready):
        async with LocalBackend(root=tmp_path / "home") as local, served(name, local) as options:
            ready.append((options, local))
            await stop.wait()

    async def opened(options):
        remote = await made_by_name(name, **options).__aenter__()
        boxes = [await remote.open(ry.SandboxSpec(boot_s=60)) for _ in range(3)]
        return remote, [box.id for box in boxes]

    with start_blocking_portal() as portal:
        stop, ready = portal.call(anyio.Event), []
        serving = portal.start_task_soon(serve, stop, ready)
        while not ready:
            assert not serving.done(), serving.result()
            time.sleep(0.05)
        options, local = ready[0]
        remote, ids = asyncio.run(opened(options))
        assert len(portal.call(local.list)) == 3
        assert remote.close_now() == []
        assert portal.call(local.list) == []
        remote, ids = asyncio.run(opened(options))
        portal.call(stop.set)
        serving.result(60)
        assert sorted(remote.close_now()) == sorted(ids)
        for one in ids:
            remote._owned.discard(one)


def test_without_the_sdk_the_error_says_what_to_install():
    for name, module, secret in (
        ("hf", "huggingface_hub", "token"),
        ("daytona", "daytona", "key"),
        ("prime", "prime_sandboxes", "key"),
    ):
        program = (
            f"import sys, asyncio; sys.modules[{module!r}] = None\n"
            "from rollyard.sandbox import backend\n"
            f"asyncio.run(backend({name!r}, {secret}='k').__aenter__())"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert f"pip install 'rollyard[{name}]'" in done.stderr, done.stderr


def test_importing_the_backends_imports_no_sdk():
    program = (
        "import sys\n"
        "import rollyard.sandbox.hf, rollyard.sandbox.daytona, rollyard.sandbox.prime\n"
        "print([name for name in ('huggingface_hub', 'daytona', 'prime_sandboxes', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []


@pytest.mark.anyio
async def test_a_sandbox_that_was_to_have_no_network_and_has_one_is_ended(backend, tmp_path):
    """What the backend was told about its endpoint is looked at in each sandbox."""
    from tests.sandbox.hf_server import serving

    with sdks.sdk("hf"):
        spec = ry.SandboxSpec(ttl_s=600, lifetime="ttl", network="host", allow_unsafe=True)
        async with serving(backend, spec=spec) as options, made_by_name("hf", **options) as remote:
            with pytest.raises(ConfigError, match="network"):
                await remote.open(ry.SandboxSpec())
            assert await backend.list() == []
