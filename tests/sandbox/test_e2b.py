"""The e2b backend through the real SDK: what goes wrong between it and a server, and a real agent that works through it."""

import asyncio
import base64
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
import traceback
from urllib.parse import parse_qs

import anyio
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

import rollyard as ry
from rollyard.core.errors import ConfigError, Error, SandboxGone, Unsupported
from rollyard.sandbox.providers.e2b import E2BBackend
from rollyard.testing.serve import serve_app
from tests.plane.e2b_server import list_ids, serving
from tests.sandbox.fault_proxy import fault_proxy

pytest.importorskip("e2b", reason="the e2b SDK is not installed")
pytestmark = pytest.mark.anyio
KEY = "e2b_" + secrets.token_hex(21)  # a run's own: one test looks for it among all processes of the machine


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
    return JSONResponse({"code": 400, "message": f"no: {request.headers.get('x-api-key')}"}, 400)


@pytest.mark.slow
async def test_the_key_is_in_no_error_log_command_line_or_sandbox(backend, caplog, capsys):
    """A canary through every way a call can fail, with everything that logs turned up."""
    caplog.set_level(logging.DEBUG)
    texts = []

    async def failing(call):
        with pytest.raises(Error) as caught:
            await call
        texts.append("".join(traceback.format_exception(caught.value)) + repr(caught.value))

    rude = Starlette(routes=[Route("/{path:path}", echo, methods=["GET", "POST", "DELETE"])])
    async with serve_app(rude) as url, through(url) as remote:
        await failing(remote.open(ry.SandboxSpec()))
        await failing(remote.attach("sbx_none"))
        await failing(remote.list())
        await failing(remote.reap(labels={}))
    async with serving(backend, key="another") as url, through(url) as remote:
        await failing(remote.open(ry.SandboxSpec()))
    async with through("http://127.0.0.1:1") as remote:
        await failing(remote.open(ry.SandboxSpec(boot_s=2)))
    async with serving(backend, key=KEY) as url, fault_proxy(url) as (faults, address), through(address) as remote:
        for fault in (
            {"kind": "reset"},
            {"kind": "lose", "status": 504},
            {"kind": "refuse", "status": 503, "json": True},
        ):
            faults.add(request="POST /v2/sandboxes$", times=1000, **fault)
            await failing(remote.open(ry.SandboxSpec(boot_s=2)))
            faults.faults.clear()
        async with remote.open(ry.SandboxSpec()) as box:
            await failing(box.read("/no/such/file"))
            await failing(box.dial(9))
            for fault in ({"kind": "refuse", "status": 502}, {"kind": "refuse", "status": 429, "json": True}):
                faults.add(request="POST /process", times=1000, **fault)
                await failing(box.exists("/tmp"))
                faults.faults.clear()
            for path in ("pause", "snapshots", "timeout"):
                faults.add("refuse", f"POST /sandboxes/.*/{path}", status=500, json=True, times=1000)
            for call in (box.pause(), box.snapshot(), box.extend(60)):
                await failing(call)
            inside = (
                "env; cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ; cat $(find /tmp /run /srv /workspace -type f) 2>&1"
            )
            texts.append((await box.exec(inside, timeout=60)).text)
            texts.append(subprocess.run(["ps", "axww"], capture_output=True, text=True).stdout)
        await failing(box.exec("true", timeout=5))
    texts += [str(record.__dict__) for record in caplog.records] + list(capsys.readouterr())
    assert len(texts) > 25
    assert not [text for text in texts if KEY in text]


async def test_a_server_without_v2_is_named_with_the_version_to_install():
    async def refuse(request):
        return JSONResponse({"code": 405, "message": "Method Not Allowed"}, 405)

    old = Starlette(routes=[Route("/{path:path}", refuse, methods=["GET", "POST", "DELETE"])])
    async with serve_app(old) as url, through(url) as remote:
        with pytest.raises(ConfigError, match=r"e2b>=2\.21,<2\.51"):
            await remote.open(ry.SandboxSpec())


@pytest.mark.parametrize("status", [429, 503])
async def test_an_answer_lost_after_the_sandbox_was_made_makes_no_second_one(backend, status):
    lost = []

    def losing(app):
        async def serve(scope, receive, send):
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

        return serve

    async with serving(backend, wrap=losing) as url, through(url) as remote, remote.open(ry.SandboxSpec()) as box:
        assert lost
        assert await list_ids(backend) == [box.id]


def watching(look):
    """`look` at the scope of each request."""

    def wrap(app):
        async def serve(scope, receive, send):
            look(scope)
            await app(scope, receive, send)

        return serve

    return wrap


async def test_an_owned_sandbox_is_leased_and_the_lease_renewed_while_its_opener_lives(backend):
    renewed = anyio.Event()

    def look(scope):
        if scope["path"].endswith("/timeout"):
            renewed.set()

    async with serving(backend, wrap=watching(look)) as url, through(url, lease_s=15) as remote:
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
            ry.SandboxSpec(layers=("layer_x",)),
            ry.SandboxSpec(options={"privileged": "1"}),
        ):
            with pytest.raises(Unsupported):
                remote.open(spec)
        assert await backend.list() == []


def test_without_the_sdk_the_error_says_what_to_install():
    program = (
        "import sys, asyncio; sys.modules['e2b'] = None\n"
        "from rollyard.sandbox.providers.e2b import E2BBackend\n"
        "asyncio.run(E2BBackend(key='k').__aenter__())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'rollyard[e2b]'" in done.stderr


async def test_a_sandbox_that_was_extended_is_kept_and_listed_until_its_new_end(backend):
    async with serving(backend) as url, through(url, lease_s=15) as remote, through(url) as other:
        for lifetime in ("owner", "ttl"):
            async with remote.open(ry.SandboxSpec(ttl_s=30, lifetime=lifetime)) as box:
                await box.extend(900)
                assert box.info.expires_at > time.time() + 800
                (seen,) = await other.list()
                (kept,) = await backend.list()
                if lifetime == "owner":  # leased: the server is told little at a time, and nobody takes it for over
                    assert kept.expires_at <= time.time() + 16
                else:
                    assert seen.expires_at > time.time() + 800
                assert await other.reap() == []
                assert await box.alive()


async def test_a_paused_sandbox_is_not_kept_and_one_that_was_resumed_is(backend):
    told = []

    def look(scope):
        if scope["path"].endswith("/timeout"):
            told.append(scope["path"])

    async with (
        serving(backend, wrap=watching(look)) as url,
        through(url) as remote,
        remote.open(ry.SandboxSpec()) as box,
    ):
        await box.pause()
        await box.keep()  # what its lease does, time and again
        assert told == []
        await box.resume()
        await box.keep()
        assert told == [f"/sandboxes/{box.id}/timeout"]


async def test_programs_and_files_are_of_the_user_that_was_asked_for_also_after_attaching(backend):
    users = []

    def look(scope):
        asked = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")[2]
        query = parse_qs(scope["query_string"].decode()).get("username", [""])[0]
        users.append(base64.b64decode(asked).decode().removesuffix(":") or query)

    async def seen(call):
        users.clear()
        await call
        return {user for user in users if user}

    async with serving(backend, wrap=watching(look)) as url, through(url) as remote, through(url) as other:
        async with remote.open(ry.SandboxSpec(user="agent")) as box:
            assert await seen(box.exec("true", timeout=30)) == {"agent"}
            assert await seen(box.exec("true", timeout=30, user="root", stdin=b"x")) == {"root"}
            assert await seen(box.write("/tmp/x", b"x", user="root")) == {"root"}
            assert await seen(box.read("/tmp/x")) == {"agent"}
            again = await other.attach(box.id)
            assert await seen(again.exec("true", timeout=30)) == {"agent"}


async def test_what_the_server_behind_cannot_do_is_an_error_that_names_it(backend):
    async def without(request):
        return JSONResponse({"code": 501, "message": "the backend cannot pause"}, 501)

    def wrap(app):
        app.router.routes.insert(0, Route("/sandboxes/{id}/pause", without, methods=["POST"]))
        return app

    async with serving(backend, wrap=wrap) as url, through(url) as remote, remote.open(ry.SandboxSpec()) as box:
        with pytest.raises(Unsupported, match="cannot pause"):
            await box.pause()


LATE = """
import asyncio, sys
from rollyard.sandbox.providers.e2b import E2BBackend
from rollyard.core.sandbox import SandboxSpec
backend = E2BBackend(key=sys.argv[1], url=sys.argv[2], isolation="namespace")

async def main():
    await backend.__aenter__()
    for _ in range(3):
        print((await backend.open(SandboxSpec(labels={"run": "late"}))).id, flush=True)
    sys.stdin.readline()

asyncio.run(main())
if sys.argv[3] == "call":
    print(backend.close_now())
elif sys.argv[3] == "crash":
    raise ValueError("a crash")
"""


@pytest.mark.parametrize(
    "ending",
    ["call", "twice", *(pytest.param(name, marks=pytest.mark.slow) for name in ("exit", "crash", "interrupt"))],
)
async def test_teardown_works_after_the_event_loop_is_gone(backend, ending):
    async with serving(backend, key=KEY) as url:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LATE, KEY, url, ending,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        for _ in range(3):
            assert (await asyncio.wait_for(child.stdout.readline(), 60)).startswith(b"inst_")
        assert len(await backend.list()) == 3
        if ending in ("interrupt", "twice"):
            child.send_signal(signal.SIGINT)
        if ending == "twice":
            child.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(child.communicate(b"\n"), 60)
        assert await backend.list() == [], err.decode()
        assert KEY not in (out + err).decode()
        if ending == "call":
            assert out == b"[]\n"


async def test_what_could_not_be_deleted_at_the_end_is_named(backend):
    async with serving(backend, key=KEY) as url, fault_proxy(url) as (faults, address):
        faults.add("refuse", "DELETE /", status=500, times=1000)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LATE, KEY, address, "exit",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        out, _ = await asyncio.wait_for(child.communicate(b"\n"), 90)
        left = await list_ids(backend)
        assert len(left) == 3 and all(f"'{name}'" in out.decode() for name in left), out.decode()
        assert KEY not in out.decode()


async def test_clean_removes_what_a_killed_host_left_by_label_alone(backend):
    async with serving(backend, key=KEY) as url, through(url) as remote:
        foreign = await backend.open(ry.SandboxSpec(labels={"rollyard.run": "run_1"}, lifetime="ttl"))
        other = await remote.open(ry.SandboxSpec(labels={"rollyard.run": "run_2"}))
        program = LATE.replace('{"run": "late"}', '{"rollyard.run": "run_1"}')
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            KEY,
            url,
            "exit",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        left = {(await asyncio.wait_for(child.stdout.readline(), 60)).decode().strip() for _ in range(3)}
        child.kill()
        await child.wait()
        assert left <= {info.id for info in await remote.list()}
        env = {**os.environ, "E2B_API_KEY": KEY, "E2B_API_URL": url, "E2B_SANDBOX_URL": url}
        main = [sys.executable, "-c", "from rollyard.cli.main import main; main()"]
        argv = [*main, "clean", "--backend", "e2b", "--run", "run_1", "--json"]
        clean = await asyncio.create_subprocess_exec(*argv, env=env, stdout=asyncio.subprocess.PIPE)
        out, _ = await asyncio.wait_for(clean.communicate(), 60)
        assert set(json.loads(out)["removed"]) == left
        assert [info.id for info in await remote.list()] == [other.id]
        assert await foreign.alive() and len(await backend.list()) == 2
        await foreign.kill()
