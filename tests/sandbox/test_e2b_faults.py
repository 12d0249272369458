"""What goes wrong between the real E2B SDK and a server: the right class of error, one sandbox, and no program run twice."""

from contextlib import asynccontextmanager

import anyio
import pytest

import rollyard as ry
from rollyard.core.errors import Error, SandboxError, SandboxGone, SandboxInterrupted, SandboxUnavailable
from rollyard.sandbox.providers.e2b import E2BBackend
from rollyard.sandbox.retry import OpenLimits
from tests.plane.e2b_server import list_ids, serving
from tests.sandbox.fault_proxy import fault_proxy

pytest.importorskip("e2b", reason="the e2b SDK is not installed")
pytestmark = pytest.mark.anyio
KEY = "e2b_" + "1" * 40
CREATE = "POST /v2/sandboxes$"
START = "POST /process.Process/Start"
FAST = OpenLimits(wait_initial_s=0.05, wait_max_s=0.2)


def through(url):
    return E2BBackend(key=KEY, url=url, isolation="namespace", limits=FAST)


@asynccontextmanager
async def faulty(backend):
    """(the proxy's faults, the e2b backend behind them)"""
    async with serving(backend, key=KEY) as url, fault_proxy(url) as (faults, address), through(address) as remote:
        yield faults, remote


@asynccontextmanager
async def sandbox(backend):
    async with faulty(backend) as (faults, remote), remote.open(ry.SandboxSpec()) as box:
        yield faults, box


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "refuse", "status": 429, "retry_after": "0"},
        {"kind": "refuse", "status": 429},
        {"kind": "refuse", "status": 503},
        {"kind": "lose", "status": 429, "retry_after": "0"},
        {"kind": "lose", "status": 502},
        {"kind": "lose", "status": 504},
        {"kind": "reset"},
        {"kind": "cut", "after": 20},
        {"kind": "slow", "piece": 7},
    ],
    ids=lambda fault: " ".join(str(value) for value in fault.values()),
)
@pytest.mark.ordinary("refuse 429", "lose 502", "reset")
async def test_a_create_that_fails_once_makes_one_sandbox(backend, fault):
    async with faulty(backend) as (faults, remote):
        broken = faults.add(request=CREATE, **fault)
        async with remote.open(ry.SandboxSpec(labels={"who": "me"})) as box:
            assert broken.hits == 1
            assert await list_ids(backend) == [box.id]
            assert (await box.exec("echo up", timeout=30)).stdout == b"up\n"
        assert await backend.list() == []


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"kind": "refuse", "status": 429, "json": True}, SandboxUnavailable),
        ({"kind": "refuse", "status": 503, "json": True}, SandboxUnavailable),
        ({"kind": "lose", "status": 504, "json": True}, SandboxInterrupted),
        ({"kind": "lose", "status": 504}, SandboxInterrupted),
        ({"kind": "reset"}, SandboxInterrupted),
        ({"kind": "refuse", "status": 500, "json": True}, SandboxInterrupted),
    ],
    ids=["429", "503", "504", "504 page", "reset", "500"],
)
@pytest.mark.ordinary("504 page", "reset")
async def test_a_create_that_never_succeeds_is_told_by_its_class_and_leaves_nothing(backend, fault, error):
    async with faulty(backend) as (faults, remote):
        faults.add(request=CREATE, times=1000, **fault)
        with pytest.raises(error) as caught:
            await remote.open(ry.SandboxSpec())
        assert type(caught.value) is error
        assert await backend.list() == []


@pytest.mark.slow
async def test_a_server_that_answers_nothing_is_given_up_and_leaves_nothing(backend):
    async with faulty(backend) as (faults, remote):
        faults.add("stall", CREATE, times=1000)
        with pytest.raises(Error):
            await remote.open(ry.SandboxSpec(boot_s=1))
        assert await backend.list() == []


async def test_a_server_that_knows_no_idempotency_key_keeps_one_sandbox_of_a_create_that_was_lost(backend):
    def forgetting(app):
        async def forgetful(scope, receive, send):
            if scope["type"] == "http":
                scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"idempotency-key"]
            await app(scope, receive, send)

        return forgetful

    async with (
        serving(backend, key=KEY, wrap=forgetting) as url,
        fault_proxy(url) as (faults, address),
        through(address) as remote,
    ):
        faults.add("lose", CREATE, status=504)
        async with remote.open(ry.SandboxSpec()) as box:
            assert faults.count(CREATE) == 2
            assert await list_ids(backend) == [box.id]


async def test_a_sandbox_that_never_gets_ready_is_deleted_and_the_first_error_told(backend):
    async with faulty(backend) as (faults, remote):
        faults.add("refuse", START, status=500, times=1000)
        faults.add("lose", "DELETE /", status=504)
        with pytest.raises(SandboxError, match="500|UNKNOWN|INTERNAL"):
            await remote.open(ry.SandboxSpec())
        assert await backend.list() == []


COUNTED = "echo once >> /tmp/count; sleep 0.7; printf 'out\\377'; echo err >&2; exit 3"


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "lose", "status": 504},
        {"kind": "reset"},
        {"kind": "cut", "seen": b'"start"'},
        {"kind": "cut", "seen": b'"stdout"'},
        {"kind": "slow", "piece": 5},
    ],
    ids=["answer lost", "reset after it ran", "reset while it runs", "reset while it tells", "slow"],
)
@pytest.mark.ordinary("answer lost", "reset while it tells")
async def test_a_program_whose_connection_breaks_runs_once_and_its_end_is_told(backend, fault):
    async with sandbox(backend) as (faults, box):
        broken = faults.add(request=START, **fault)
        done = await box.exec(COUNTED, timeout=60)
        assert broken.hits == 1
        assert (done.exit_code, done.stdout, done.stderr) == (3, b"out\xff", b"err\n")
        assert await box.read_text("/tmp/count") == "once\n"


@pytest.mark.parametrize("status", [429, 503, 504])
@pytest.mark.ordinary("503")
async def test_a_program_whose_start_was_refused_is_started_once_by_the_next_try(backend, status):
    async with sandbox(backend) as (faults, box):
        refused = faults.add("refuse", START, status=status)
        done = await box.exec(COUNTED, timeout=60)
        assert (refused.hits, done.exit_code, await box.read_text("/tmp/count")) == (1, 3, "once\n")


async def test_a_program_whose_answer_never_comes_is_ended_at_its_timeout(backend):
    async with sandbox(backend) as (faults, box):
        faults.add("stall", START)
        done = await box.exec("echo began; exec sleep 1234", timeout=3)
        assert (done.timed_out, done.exit_code, done.stdout) == (True, None, b"began\n")
        assert (await box.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=30)).stdout.count(b"sleep 1234") == 0


async def test_a_job_starts_once_and_loses_no_byte_however_often_connections_break(backend):
    async with sandbox(backend) as (faults, box):
        faults.add("lose", START, status=504)
        job = await box.start("echo once >> /tmp/count; for i in 1 2 3 4 5 6; do echo line $i; sleep 0.2; done; exit 4")
        faults.add("cut", START, seen=b'"start"', times=2)
        faults.add("lose", START, status=502)
        got = b"".join([data async for _, data in job.stream()])
        assert got == b"".join(b"line %d\n" % n for n in range(1, 7))
        faults.add("cut", START, seen=b'"start"', times=2)
        done = await job.wait(60)
        assert (done.exit_code, done.stdout) == (4, got)
        assert await box.read_text("/tmp/count") == "once\n"


async def test_files_are_read_and_written_whole_through_breaks(backend):
    body = bytes(range(256)) * 4000
    async with sandbox(backend) as (faults, box):
        faults.add("reset", "POST /files")
        faults.add("refuse", "POST /files", status=429)
        await box.write("/srv/deep/file", body)
        faults.add("cut", "GET /files", after=5000)
        faults.add("slow", "GET /files", piece=9000)
        assert await box.read("/srv/deep/file") == body
        faults.add("lose", START, status=504)
        assert (await box.stat("/srv/deep/file")).size == len(body)


ASK = """
import socket, sys, time
for _ in range(200):
    try:
        s = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20)
        s.sendall(b"x")
        if said := s.recv(9):
            print(said)
            break
    except OSError:
        pass
    time.sleep(0.1)
"""


async def test_a_listener_goes_on_after_the_relays_connection_was_reset(backend):
    async with sandbox(backend) as (faults, box):
        listener = await box.listen(0)

        async def answer():
            while True:
                stream = await listener.accept()
                await stream.receive()
                await stream.send(b"answer")
                await stream.send_eof()

        async with anyio.create_task_group() as group:
            group.start_soon(answer)
            for _ in range(3):
                done = await box.exec(["python3", "-c", ASK, str(listener.port)], timeout=60)
                assert done.stdout == b"b'answer'\n", done
                assert faults.drop(START) == 1  # the relay's: nothing else runs
            group.cancel_scope.cancel()


async def test_a_kill_whose_answer_is_lost_is_repeated_and_the_sandbox_is_gone(backend):
    async with faulty(backend) as (faults, remote):
        box = await remote.open(ry.SandboxSpec())
        faults.add("lose", "DELETE /", status=504, times=2)
        await box.kill()
        assert await backend.list() == []
        with pytest.raises(SandboxGone):
            await box.exec("true", timeout=30)


async def test_one_that_cannot_be_deleted_is_named_and_the_others_are_deleted(backend):
    async with faulty(backend) as (faults, remote):
        boxes = [await remote.open(ry.SandboxSpec(labels={"run": "r1"})) for _ in range(3)]
        faults.add("refuse", f"DELETE /(v2/)?sandboxes/{boxes[1].id}", status=500, json=True, times=1000)
        with pytest.raises(SandboxError, match=boxes[1].id) as caught:
            await remote.reap({"run": "r1"})
        assert boxes[0].id not in str(caught.value)
        assert await list_ids(backend) == [boxes[1].id]
        faults.faults.clear()
