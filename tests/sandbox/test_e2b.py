"""The e2b backend through the real SDK: what goes wrong between it and a server, and a real agent that works through it."""

import subprocess
import sys
import traceback

import anyio
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

import rollyard as ry
from rollyard.core.errors import ConfigError, Error, SandboxGone, Unsupported
from rollyard.plane.e2b import e2b_app
from rollyard.sandbox.e2b.backend import E2BBackend
from tests.plane.e2b_server import listening, serving

pytest.importorskip("e2b", reason="the e2b SDK is not installed")
pytestmark = pytest.mark.anyio
KEY = "e2b_" + "c0ffee" * 7


def through(url, **options):
    return E2BBackend(key=KEY, url=url, isolation="namespace", **options)


@pytest.mark.agent
@pytest.mark.slow
@pytest.mark.parametrize("agent", ["pi", "codex"])
async def test_a_real_agent_solves_a_task_through_the_sdk_and_the_server(agent, backend):
    async with serving(backend) as url, through(url) as remote:
        done = await ry.run_rollout(
            "write out.txt",
            agent=agent,
            policy=ry.policy.scripted({"steps": [{"shell": "echo hello > out.txt"}, {"text": "done"}]}),
            sandbox=remote,
            verify=['test "$(cat out.txt)" = hello'],
        )
    assert done.failure is None, (done.failure, done.log_tail)
    assert (done.status, done.reward, done.exit_code) == ("completed", 1.0, 0)
    assert [turn.finish_reason for turn in done.turns] == ["tool_calls", "stop"]


async def echo(request):
    """A server at fault: it says the caller's key aloud."""
    return JSONResponse({"code": 500, "message": f"no: {request.headers.get('x-api-key')}"}, 500)


async def test_the_key_is_in_no_error(backend):
    texts = []

    async def failing(call):
        with pytest.raises(Error) as caught:
            await call
        texts.append("".join(traceback.format_exception(caught.value)) + repr(caught.value))

    rude = Starlette(routes=[Route("/{path:path}", echo, methods=["GET", "POST", "DELETE"])])
    async with listening(rude) as url, through(url) as remote:
        await failing(remote.open(ry.SandboxSpec()))
        await failing(remote.attach("sbx_none"))
        await failing(remote.list())
        await failing(remote.reap(labels={}))
    async with serving(backend, key="another") as url, through(url) as remote:
        await failing(remote.open(ry.SandboxSpec()))
    async with through("http://127.0.0.1:1") as remote:
        await failing(remote.open(ry.SandboxSpec(boot_s=2)))
    async with serving(backend, key=KEY) as url, through(url) as remote:
        async with remote.open(ry.SandboxSpec()) as box:
            await failing(box.read("/no/such/file"))
            assert KEY.encode() not in (await box.exec("env; cat /proc/[0-9]*/cmdline", timeout=30)).stdout
        await failing(box.exec("true", timeout=5))
    assert not [text for text in texts if KEY in text]


async def test_a_server_without_v2_is_named_with_the_version_to_install():
    async def refuse(request):
        return JSONResponse({"code": 405, "message": "Method Not Allowed"}, 405)

    old = Starlette(routes=[Route("/{path:path}", refuse, methods=["GET", "POST", "DELETE"])])
    async with listening(old) as url, through(url) as remote:
        with pytest.raises(ConfigError, match=r"e2b>=2\.21,<2\.51"):
            await remote.open(ry.SandboxSpec())


@pytest.mark.parametrize("status", [429, 503])
async def test_an_answer_lost_after_the_sandbox_was_made_makes_no_second_one(backend, status):
    app = e2b_app(backend)
    lost = []

    async def losing(scope, receive, send):
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] == "/v2/sandboxes" and not lost:
            lost.append(1)

            async def swallow(message):
                return None

            await app(scope, receive, swallow)
            retry = (b"retry-after", b"0")
            await send({"type": "http.response.start", "status": status, "headers": [retry]})
            await send({"type": "http.response.body", "body": b"{}"})
            return
        await app(scope, receive, send)

    try:
        async with listening(losing) as url, through(url) as remote:
            async with remote.open(ry.SandboxSpec()) as box:
                assert lost
                assert [info.id for info in await backend.list()] == [box.id]
    finally:
        await backend.reap(labels={}, older_than=0.0)


async def test_an_owned_sandbox_is_leased_and_the_lease_renewed_while_its_opener_lives(backend):
    app, renewed = e2b_app(backend), anyio.Event()

    async def watching(scope, receive, send):
        if scope["path"].endswith("/timeout"):
            renewed.set()
        await app(scope, receive, send)

    async with listening(watching) as url, through(url, lease_s=15) as remote:
        box = await remote.open(ry.SandboxSpec(ttl_s=600))
        (first,) = await backend.list()
        assert first.expires_at - first.created_at <= 16
        with anyio.fail_after(30):
            await renewed.wait()
        assert await box.alive()
        await box.kill()
        with pytest.raises(SandboxGone):
            await box.exec("true", timeout=5)


async def test_what_the_template_decides_is_refused_before_anything_is_opened(backend):
    async with serving(backend) as url, through(url) as remote:
        for spec in (
            ry.SandboxSpec(resources=ry.Resources(memory_mb=100)),
            ry.SandboxSpec(layers=("layer_x",)),
            ry.SandboxSpec(options={"privileged": "1"}),
        ):
            with pytest.raises(Unsupported):
                remote.open(spec)
        assert await backend.list() == []


def test_without_the_sdk_the_error_says_what_to_install():
    program = (
        "import sys, asyncio; sys.modules['e2b'] = None\n"
        "from rollyard.sandbox.e2b.backend import E2BBackend\n"
        "asyncio.run(E2BBackend(key='k').__aenter__())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'rollyard[e2b]'" in done.stderr
