"""The backends hf, daytona and prime through their real SDKs: keys, faults, leases, ends. Their servers are on the loopback."""

import asyncio
import json
import logging
import os
import re
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
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import JSONResponse
from starlette.routing import Route

import rollyard as ry
from rollyard.core.errors import ConfigError, Error, SandboxGone, Unsupported
from rollyard.sandbox import backend as made_by_name
from rollyard.sandbox.local.backend import LocalBackend
from tests.sandbox import sdks
from tests.sandbox.remote_servers import answering, serving

SLOW = {name: pytest.param(name, marks=pytest.mark.slow) for name in sdks.PINNED}
SECRET = {"hf": "token", "daytona": "key", "prime": "key", "runloop": "key"}


@pytest.fixture(params=["hf", *SLOW.values()])
def name(request):
    """hf always; the others with `make test-slow`."""
    with sdks.sdk(request.param):
        yield request.param


@pytest.fixture(params=["hf", *(name if sdks.ready(name) else slow for name, slow in SLOW.items())])
def each(request):
    """All of them, where their SDKs are at hand."""
    with sdks.sdk(request.param):
        yield request.param


@asynccontextmanager
async def through(name, backend, **options):
    """A backend of this name whose sandboxes are those of `backend`."""
    async with serving(name, backend) as server, made_by_name(name, **server.options, **options) as remote:
        yield remote


@pytest.mark.anyio
@pytest.mark.agent
@pytest.mark.slow
async def test_a_real_agent_solves_a_task_through_the_sdk_with_no_network(name, backend):
    async with through(name, backend) as remote:
        done = await ry.run_rollout(
            "write out.txt",
            agent="pi",
            policy=ry.policy.scripted({"steps": [{"shell": "echo hello > out.txt"}, {"text": "done"}]}),
            sandbox=remote,
            verify=['test "$(cat out.txt)" = hello'],
            limits=ry.Limits(boot=60.0, install=600.0),
        )
        assert await remote.list() == []
    assert done.failure is None, (done.failure, done.log_tail)
    assert (done.status, done.reward, done.exit_code) == ("completed", 1.0, 0)
    assert [turn.finish_reason for turn in done.turns] == ["tool_calls", "stop"]


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
async def test_the_key_is_in_no_error_log_command_line_or_sandbox(each, backend, capsys):
    secret, texts = "canary-" + "c0ffee" * 6, []

    async def failing(call):
        with pytest.raises(Error) as caught:
            await call
        texts.append("".join(traceback.format_exception(caught.value)) + repr(caught.value))

    with Heard() as heard:
        for status in (400, 401):
            async with answering(each, rude(status), secret) as options, made_by_name(each, **options) as remote:
                await failing(remote.open(ry.SandboxSpec()))
                await failing(remote.attach("sbx_none"))
                await failing(remote.list())
                await failing(remote.reap(labels={}))
        async with serving(each, backend, key=secret) as server:
            async with made_by_name(each, **server.options) as remote:
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
            wrong = {**server.options, SECRET[each]: f"{secret}-wrong"}
            async with made_by_name(each, **wrong) as remote:
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
        async with answering(name, rude(500), secret) as options, made_by_name(name, **options) as remote:
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


def idle_or_alive(launch):
    idle = launch.get("lifecycle", {}).get("after_idle", {})
    return idle.get("idle_time_seconds") or launch["keep_alive_time_seconds"]


LEASE = {
    "hf": lambda asked: float(asked["environment"]["SBX_IDLE_TIMEOUT"]),
    "daytona": lambda asked: 60.0 * asked["autoStopInterval"],
    "prime": lambda asked: 60.0 * asked["idle_timeout_minutes"],
    "runloop": lambda asked: idle_or_alive(asked["launch_parameters"]),
}


@pytest.mark.anyio
@pytest.mark.slow
async def test_an_owned_sandbox_ends_soon_without_its_opener_and_is_used_while_that_lives(name, backend):
    async with serving(name, backend) as server:
        async with made_by_name(name, **server.options, lease_s=30) as remote:
            box = await remote.open(ry.SandboxSpec(ttl_s=600))
            (made,) = server.live
            assert 30 <= LEASE[name](made.asked) <= 60
            (info,) = await remote.list()
            assert 600 <= info.expires_at - time.time() <= 700
            used = made.used
            with anyio.fail_after(30):
                while made.used == used:
                    await anyio.sleep(0.2)
        with pytest.raises(SandboxGone):
            await box.exec("true", timeout=5)
        assert await backend.list() == []


@pytest.mark.anyio
async def test_two_kills_at_once_are_one_and_both_wait_for_it(name, backend):
    async with through(name, backend) as remote:
        box = await remote.open(ry.SandboxSpec())

        async def killed():
            done = await box.kill()
            return done, len(await backend.list())

        assert sorted(await asyncio.gather(killed(), killed())) == [(False, 0), (True, 0)]


def connections_to(server):
    """Of this process, as a client."""
    port, found = int(server.url.split(":")[2].split("/")[0]), 0
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state, *_ = line.split()
        found += state == "01" and int(remote.split(":")[1], 16) == port
    return found


@pytest.mark.anyio
async def test_a_sandbox_that_ended_holds_no_connection(each, backend):
    async with serving(each, backend) as server, made_by_name(each, **server.options) as remote:
        ended, counts = [], []
        for _ in range(4):
            async with remote.open(ry.SandboxSpec()) as box:
                await box.keep()  # as its lease does
            ended.append(box)  # kept: nothing is closed because nobody has it
            counts.append(connections_to(server))
        assert max(counts) <= counts[0] + 1, counts


HELD = {
    "hf": "POST /api/jobs/[^/]+/[^/]+/cancel",
    "daytona": "DELETE /api/sandbox/",
    "prime": "DELETE /api/v1/sandbox",
    "runloop": "POST /v1/devboxes/[^/]+/shutdown",
}


@pytest.mark.anyio
async def test_a_batch_is_deleted_at_once(each, backend):
    """The server answers no delete before all of them have come."""
    count = 1 if each == "prime" else 6  # prime deletes many by one call
    came, all_came = [], anyio.Event()

    async def hold(request, call_next):
        if re.match(HELD[each], f"{request.method} {request.url.path}"):
            came.append(request.url.path)
            if len(came) >= count:
                all_came.set()
            await all_came.wait()
        return await call_next(request)

    async with serving(each, backend) as server:
        server.app.add_middleware(BaseHTTPMiddleware, dispatch=hold)
        server.app.middleware_stack = None
        with anyio.fail_after(120):
            async with made_by_name(each, **server.options) as remote:
                for _ in range(count):
                    await remote.open(ry.SandboxSpec(boot_s=60))
        assert await backend.list() == []
        assert len(came) >= count


@pytest.mark.anyio
async def test_what_outlives_its_opener_is_kept_by_its_provider_for_its_ttl(name, backend):
    async with serving(name, backend) as server:
        async with made_by_name(name, **server.options, lease_s=30) as remote:
            box = await remote.open(ry.SandboxSpec(ttl_s=600, lifetime="ttl"))
        (made,) = server.live
        assert 600 <= LEASE[name](made.asked) <= 660
        async with made_by_name(name, **server.options) as remote:
            again = await remote.attach(box.id)
            assert (await again.exec("echo on", timeout=30)).stdout == b"on\n"
            assert await again.kill()


@pytest.mark.anyio
async def test_what_the_provider_decides_is_refused_before_anything_is_made(each, backend):
    async with through(each, backend) as remote:
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
    async with serving("hf", backend) as server:
        async with made_by_name("hf", **{**server.options, "network": "host"}) as remote:
            assert not remote.capabilities.network_none
            with pytest.raises(Unsupported, match="network='host' and allow_unsafe=True"):
                remote.open(ry.SandboxSpec())
            async with remote.open(ry.SandboxSpec(network="host", allow_unsafe=True)) as box:
                assert (await box.exec("true", timeout=30)).ok


KILLED = """
import asyncio, json, sys
import rollyard as ry
async def main():
    remote = await ry.sandbox.backend(sys.argv[1], **json.loads(sys.stdin.readline())).__aenter__()
    for _ in range(2):
        print((await remote.open(ry.SandboxSpec(labels={"rollyard.run": "run_1"}, boot_s=60))).id, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""
CLEAN = [
    sys.executable,
    "-c",
    "from rollyard.cli.main import main; main()",
    "clean",
    "--json",
    "--run",
    "run_1",
    "--backend",
]


def credentials(name, server):
    """The environment by which the command line finds a provider."""
    if name == "hf":
        return {"HF_TOKEN": server.token, "HF_ENDPOINT": server.url}
    named = {
        "daytona": ("DAYTONA_API_KEY", "DAYTONA_API_URL"),
        "prime": ("PRIME_API_KEY", "PRIME_API_BASE_URL"),
        "runloop": ("RUNLOOP_API_KEY", "RUNLOOP_BASE_URL"),
    }[name]
    return dict(zip(named, (server.options["key"], server.options["url"]), strict=True))


@pytest.mark.anyio
async def test_clean_removes_what_a_killed_host_left_by_label_alone(name, backend):
    pipe = asyncio.subprocess.PIPE
    async with serving(name, backend) as server, made_by_name(name, **server.options) as remote:
        other = await remote.open(ry.SandboxSpec(labels={"rollyard.run": "run_2"}))
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, name, stdin=pipe, stdout=pipe)
        child.stdin.write(json.dumps(server.options).encode() + b"\n")
        left = {(await asyncio.wait_for(child.stdout.readline(), 90)).decode().strip() for _ in range(2)}
        child.kill()
        await child.wait()
        assert {info.id for info in await remote.list({"rollyard.run": "run_1"})} == left
        env = {**os.environ, **credentials(name, server)}
        clean = await asyncio.create_subprocess_exec(*CLEAN, name, env=env, stdout=pipe)
        out, _ = await asyncio.wait_for(clean.communicate(), 90)
        assert set(json.loads(out)["removed"]) == left
        assert [info.id for info in await remote.list()] == [other.id]
        assert len(await backend.list()) == 1


@pytest.mark.anyio
async def test_the_suite_runs_on_it_by_the_command_line(name, backend):
    async with serving(name, backend) as server:
        options = [f"--option={key}={value}" for key, value in server.options.items()]
        argv = [*CLEAN[:3], "check", "sandbox", name, *options, "--option=lease_s=60", "--only=E1", "--json"]
        check = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        out, _ = await asyncio.wait_for(check.communicate(), 120)
    assert check.returncode == 0
    assert [json.loads(out)[key] for key in ("backend", "passed", "failed")] == [name, 1, 0]


DOCTOR = [*CLEAN[:3], "doctor", "--json", "--sandbox"]
STEPS = ["enter", "open", "run", "upload 10 MB", "check upload", "kill"]


@pytest.mark.anyio
async def test_the_doctor_uses_a_sandbox_once_and_times_each_step(name, backend):
    async with serving(name, backend) as server:
        env = {**os.environ, **credentials(name, server)}
        right = await anyio.run_process([*DOCTOR, name], env=env, check=False)
        wrong = await anyio.run_process([*DOCTOR, name, "--image", "no/such:1"], env=env, check=False)
        assert await backend.list() == []
    told = json.loads(right.stdout)
    assert (right.returncode, told["healthy"]) == (0, True), told
    assert [row["name"] for row in told["findings"] if row.get("seconds", 0) > 0] == STEPS
    (price,) = [row for row in told["findings"] if row["name"] == "price class"]
    assert price["found"].startswith("metered: ") and "https://" in price["advice"]
    told = json.loads(wrong.stdout)
    assert (wrong.returncode, told["healthy"]) == (3, False), told
    assert [row["name"] for row in told["findings"]] == STEPS[:2] and "no/such:1" in told["findings"][-1]["found"]


def test_a_backend_that_is_not_there_is_wrong_usage():
    done = subprocess.run([*DOCTOR, "nope"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "'nope'" in json.loads(done.stdout)["message"]


LIVE = "ROLLYARD_LIVE_SANDBOX"  # the name of a backend whose account is in the environment


@pytest.mark.skipif(LIVE not in os.environ, reason=f"{LIVE} names no backend whose account may be used")
def test_a_live_account_opens_runs_takes_a_file_and_ends():
    done = subprocess.run([*DOCTOR, os.environ[LIVE]], capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    assert (done.returncode, told["healthy"]) == (0, True), told
    assert [row["name"] for row in told["findings"] if "seconds" in row] == STEPS


def test_sandboxes_are_deleted_without_an_event_loop_and_those_that_stay_are_named(name, tmp_path):
    async def serve(stop, ready):
        async with LocalBackend(root=tmp_path / "home") as local, serving(name, local) as server:
            ready.append((server.options, local))
            await stop.wait()

    async def opened(options):
        remote = await made_by_name(name, **options).__aenter__()
        boxes = [await remote.open(ry.SandboxSpec(boot_s=60)) for _ in range(3)]
        return remote, [box.id for box in boxes]

    with start_blocking_portal() as portal:
        stop, ready = portal.call(anyio.Event), []
        running = portal.start_task_soon(serve, stop, ready)
        while not ready:
            assert not running.done(), running.result()
            time.sleep(0.05)
        options, local = ready[0]
        remote, ids = asyncio.run(opened(options))
        assert len(portal.call(local.list)) == 3
        assert remote.close_now() == []
        assert portal.call(local.list) == []
        remote, ids = asyncio.run(opened(options))
        portal.call(stop.set)
        running.result(60)
        assert sorted(remote.close_now()) == sorted(ids)
        for one in ids:
            remote._owned.discard(one)


def test_without_the_sdk_the_error_says_what_to_install():
    for name, module, secret in (
        ("hf", "huggingface_hub", "token"),
        ("daytona", "daytona", "key"),
        ("prime", "prime_sandboxes", "key"),
        ("runloop", "runloop_api_client", "key"),
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
        "from rollyard.sandbox.providers import apptainer, daytona, e2b, hf, prime, runloop, ssh\n"
        "print([name for name in ('huggingface_hub', 'daytona', 'prime_sandboxes', 'runloop_api_client', 'httpx')\n"
        "       if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []


@pytest.mark.anyio
async def test_a_sandbox_that_was_to_have_no_network_and_has_one_is_ended(backend, tmp_path):
    """What the backend was told about its endpoint is looked at in each sandbox."""
    spec = ry.SandboxSpec(ttl_s=600, lifetime="ttl", network="host", allow_unsafe=True)
    async with serving("hf", backend, spec=spec) as server, made_by_name("hf", **server.options) as remote:
        with pytest.raises(ConfigError, match="network"):
            await remote.open(ry.SandboxSpec())
        assert await backend.list() == []
