"""What goes wrong between the real SDKs of hf, daytona and prime and their servers: the right class of error, one sandbox, and no
program run twice."""

from contextlib import asynccontextmanager

import pytest

import rollyard as ry
from rollyard.core.errors import SandboxError, SandboxInterrupted, SandboxUnavailable
from rollyard.sandbox import backend as made_by_name
from rollyard.sandbox.retry import OpenLimits
from tests.sandbox import sdks
from tests.sandbox.fault_proxy import fault_proxy
from tests.sandbox.remote_servers import serving

pytestmark = pytest.mark.anyio
CREATE = {
    "hf": "POST /api/jobs/tester$",
    "daytona": "POST /api/sandbox$",
    "prime": "POST /api/v1/sandbox$",
    "runloop": "POST /v1/devboxes$",
}
RUN = {
    "hf": "POST .*/v1/exec",
    "daytona": "POST .*/process/execute",
    "prime": "POST .*CommandSession/Start",
    "runloop": "POST .*/execute",
}
PUT = {
    "hf": "PUT .*/files/write",
    "daytona": "POST .*/files/bulk-upload",
    "prime": "POST .*/upload",
    "runloop": "POST .*/upload_file",
}
GET = {
    "hf": "GET .*/files/read",
    "daytona": "POST .*/files/bulk-download",
    "prime": "GET .*/download",
    "runloop": "POST .*/download_file",
}
FAST = OpenLimits(wait_initial_s=0.05, wait_max_s=0.2)
SPEC = ry.SandboxSpec(boot_s=90)


def names():
    """hf always; the others with `make test-slow`, since their SDKs are not among what is installed."""
    return ["hf", *(pytest.param(name, marks=pytest.mark.slow) for name in sdks.PINNED)]


@pytest.fixture(params=names())
def name(request):
    return request.param


@asynccontextmanager
async def faulty(name, backend):
    """(the proxy's faults, the backend behind them)"""
    async with serving(name, backend, front=fault_proxy) as server:
        async with made_by_name(name, limits=FAST, **server.options) as remote:
            yield server.faults, remote


def faults_of(*quick, slow=()):
    """A few always; the rest with `make test-slow`."""
    some = [(fault, []) for fault in quick] + [(fault, [pytest.mark.slow]) for fault in slow]
    return [pytest.param(fault, id=" ".join(map(str, fault.values())), marks=marks) for fault, marks in some]


@pytest.mark.parametrize(
    "fault",
    faults_of(
        {"kind": "refuse", "status": 429, "retry_after": "0"},
        {"kind": "lose", "status": 504},
        {"kind": "reset"},
        slow=[
            {"kind": "refuse", "status": 503},
            {"kind": "lose", "status": 503},
            {"kind": "cut", "after": 20},
            {"kind": "slow", "piece": 7},
        ],
    ),
)
async def test_a_create_that_fails_once_makes_one_sandbox(name, backend, fault):
    async with faulty(name, backend) as (faults, remote):
        broken = faults.add(request=CREATE[name], **fault)
        async with remote.open(SPEC) as box:
            assert broken.hits == 1
            assert len(await backend.list()) == 1
            assert [info.id for info in await remote.list()] == [box.id]
            assert (await box.exec("echo up", timeout=60)).stdout == b"up\n"
        assert await backend.list() == []


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        pytest.param({"kind": "refuse", "status": 503, "json": True}, SandboxUnavailable, id="503"),
        pytest.param({"kind": "lose", "status": 504}, SandboxInterrupted, id="504", marks=pytest.mark.slow),
        pytest.param({"kind": "reset"}, SandboxInterrupted, id="reset", marks=pytest.mark.slow),
    ],
)
async def test_a_create_that_never_succeeds_is_told_by_its_class_and_leaves_nothing(name, backend, fault, error):
    async with faulty(name, backend) as (faults, remote):
        faults.add(request=CREATE[name], times=1000, **fault)
        with pytest.raises(SandboxError) as caught:
            await remote.open(SPEC)
        assert isinstance(caught.value, error), repr(caught.value)
        assert await remote.list() == []
        assert await backend.list() == []


@pytest.mark.parametrize(
    "fault",
    faults_of(
        {"kind": "reset"},
        slow=[{"kind": "lose", "status": 502}, {"kind": "cut", "after": 30}, {"kind": "slow", "piece": 64}],
    ),
)
async def test_a_program_runs_once_whatever_becomes_of_its_answer(name, backend, fault):
    async with faulty(name, backend) as (faults, remote), remote.open(SPEC) as box:
        broken = faults.add(request=RUN[name], **fault)
        done = await box.exec("echo once >> /tmp/count; cat /tmp/count; exit 3", timeout=60)
        assert (broken.hits, done.exit_code, done.stdout) == (1, 3, b"once\n")


async def test_a_job_runs_once_and_loses_no_byte_over_connections_that_break(name, backend):
    async with faulty(name, backend) as (faults, remote), remote.open(SPEC) as box:
        faults.add("reset", RUN[name])
        job = await box.start("for i in 1 2 3 4 5 6; do echo $i; sleep 0.3; done; exit 5")
        faults.add("reset", RUN[name], times=2)
        said = b"".join([chunk async for _, chunk in job.stream()])
        assert (said, (await job.wait(60)).exit_code) == (b"1\n2\n3\n4\n5\n6\n", 5)


async def test_files_survive_a_connection_that_breaks(name, backend):
    data = bytes(range(256)) * 4000
    async with faulty(name, backend) as (faults, remote), remote.open(SPEC) as box:
        lost = faults.add("reset", PUT[name])
        await box.write("/tmp/file", data)
        again = faults.add("reset", GET[name])
        assert await box.read("/tmp/file") == data
        assert (lost.hits, again.hits) == (1, 1)


async def test_the_gate_is_reached_over_connections_that_break(name, backend):
    async with faulty(name, backend) as (faults, remote), remote.open(SPEC) as box:
        listener = await box.listen(0)
        faults.add("reset", RUN[name], times=3)
        ask = (
            f"import socket; s = socket.create_connection(('127.0.0.1', {listener.port}), 30); s.sendall(b'ping'); "
            "s.shutdown(1); print(s.makefile().read())"
        )
        job = await box.start(["python3", "-c", ask])
        stream = await listener.accept()
        assert await stream.receive() == b"ping"
        await stream.send(b"pong" * 10_000)
        await stream.send_eof()
        assert (await job.wait(60)).stdout == b"pong" * 10_000 + b"\n"
