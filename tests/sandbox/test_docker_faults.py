"""What goes wrong between the docker backend and an engine: the right class of error, one container, no program run twice."""

import asyncio
import io
import logging
import os
import sys
import traceback
from contextlib import asynccontextmanager

import anyio
import pytest

import rollyard as ry
from rollyard.core.errors import Error, SandboxError, SandboxInterrupted, SandboxUnavailable
from rollyard.sandbox import backend
from rollyard.sandbox.docker.engine import DockerEngine
from rollyard.sandbox.retry import OpenLimits
from tests.sandbox.fault_proxy import fault_proxy

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.slow]
CREATE = r"POST /v[\d.]+/containers/create"
BEGIN = r"POST /v[\d.]+/containers/\w+/start"
EXEC = r"POST /v[\d.]+/containers/\w+/exec"
RUN = r"POST /v[\d.]+/exec/\w+/start"
DELETE = r"DELETE /v[\d.]+/containers/"
ARCHIVE = r"(GET|PUT) /v[\d.]+/containers/\w+/archive"
FAST = OpenLimits(wait_initial_s=0.05, wait_max_s=0.2)
COUNTED = "echo once >> /tmp/count; sleep 0.7; echo out; exit 3"


@asynccontextmanager
async def faulty(engine, tmp_path, **options):
    """(faults, the backend behind them, the backend without them)"""
    kind, host = engine
    place = tmp_path / "s"
    async with (
        fault_proxy(host, place) as (faults, address),
        backend(kind, host=address, same_host=True, limits=FAST, **options) as through,
        backend(kind, host=host) as straight,
    ):
        label = {"faults": str(tmp_path)}
        try:
            yield faults, through, straight, ry.SandboxSpec(labels=label, boot_s=60)
        finally:
            faults.faults.clear()
            await straight.reap(label)


@pytest.mark.parametrize("request_", [CREATE, BEGIN], ids=["create", "start"])
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "refuse", "status": 429, "retry_after": "0"},
        {"kind": "refuse", "status": 503},
        {"kind": "lose", "status": 504},
        {"kind": "reset"},
        {"kind": "slow", "piece": 3},
    ],
    ids=["429", "503", "504 after success", "reset", "slow"],
)
async def test_an_open_that_fails_once_makes_one_container(engine, tmp_path, request_, fault):
    async with faulty(engine, tmp_path) as (faults, through, straight, spec):
        broken = faults.add(request=request_, **fault)
        async with through.open(spec) as box:
            assert broken.hits == 1
            assert [info.id for info in await straight.list(spec.labels)] == [box.id]
            assert (await box.exec("echo up", timeout=60)).stdout == b"up\n"
        assert await straight.list(spec.labels) == []


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"kind": "refuse", "status": 503}, SandboxUnavailable),
        ({"kind": "lose", "status": 504}, SandboxInterrupted),
        ({"kind": "reset"}, SandboxInterrupted),
        ({"kind": "refuse", "status": 500}, SandboxError),
    ],
    ids=["503", "504", "reset", "500"],
)
async def test_an_open_that_never_succeeds_is_told_by_its_class_and_leaves_nothing(engine, tmp_path, fault, error):
    async with faulty(engine, tmp_path) as (faults, through, straight, spec):
        faults.add(request=CREATE, times=1000, **fault)
        with pytest.raises(error) as caught:
            await through.open(spec)
        assert type(caught.value) is error
        assert await straight.list(spec.labels) == []


@pytest.mark.parametrize(
    ("request_", "fault", "runs"),
    [
        (EXEC, {"kind": "refuse", "status": 504}, 0),
        (EXEC, {"kind": "lose", "status": 504}, 0),
        (RUN, {"kind": "refuse", "status": 502}, 0),
        (RUN, {"kind": "lose", "status": 504}, 1),
        (RUN, {"kind": "cut", "after": 3}, 1),
    ],
    ids=["refused", "made and lost", "not started", "ran and lost", "reset while it tells"],
)
async def test_a_program_whose_connection_breaks_is_an_error_and_never_runs_twice(
    engine, tmp_path, request_, fault, runs
):
    async with faulty(engine, tmp_path) as (faults, through, straight, spec), through.open(spec) as box:
        await box.exec("echo warm", timeout=60)
        broken = faults.add(request=request_, **fault)
        with pytest.raises(SandboxInterrupted):
            await box.exec(COUNTED, timeout=60)
        assert broken.hits == 1
        done = await box.exec("cat /tmp/count 2>/dev/null | wc -l; ps ax | grep -c '[s]leep 0.7'", timeout=60)
        assert done.stdout.split()[0] == str(runs).encode()


async def test_a_connection_cut_between_two_outputs_is_not_taken_for_the_end(engine, tmp_path):
    async with faulty(engine, tmp_path) as (faults, through, _, spec), through.open(spec) as box:

        async def dropping():
            while not faults.drop(RUN):
                await anyio.sleep(0.1)

        async with anyio.create_task_group() as group:
            group.start_soon(dropping)
            with pytest.raises(SandboxInterrupted):
                await box.exec("sleep 30; echo late; exit 4", timeout=60)
        done = await box.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=60)
        assert b"sleep 30" not in done.stdout.replace(b"sleep 30; echo", b"")


async def test_a_job_starts_once_and_loses_no_byte_however_often_connections_break(engine, tmp_path):
    async with faulty(engine, tmp_path) as (faults, through, straight, spec), through.open(spec) as box:
        faults.add("lose", RUN, status=504)
        job = await box.start("echo once >> /tmp/count; for i in 1 2 3 4 5 6; do echo line $i; sleep 0.2; done; exit 4")
        faults.add("cut", RUN, after=4, times=2)
        faults.add("lose", EXEC, status=502)
        got = b"".join([data async for _, data in job.stream()])
        assert got == b"".join(b"line %d\n" % n for n in range(1, 7))
        faults.add("refuse", RUN, status=503)
        done = await job.wait(60)
        assert (done.exit_code, done.stdout) == (4, got)
        assert await box.read_text("/tmp/count") == "once\n"


async def test_files_are_read_and_written_whole_through_breaks(engine, tmp_path):
    body = bytes(range(256)) * 4000
    async with faulty(engine, tmp_path) as (faults, through, straight, spec), through.open(spec) as box:
        faults.add("reset", ARCHIVE)
        await box.write("/srv/deep/file", body)
        faults.add("cut", ARCHIVE, after=5000)
        faults.add("slow", ARCHIVE, piece=9000)
        assert await box.read("/srv/deep/file") == body


async def test_a_kill_whose_answer_is_lost_is_repeated_and_the_container_is_gone(engine, tmp_path):
    async with faulty(engine, tmp_path) as (faults, through, straight, spec):
        box = await through.open(spec)
        faults.add("lose", DELETE, status=504)
        await box.kill()
        assert await straight.list(spec.labels) == []


async def test_one_that_cannot_be_deleted_is_named_and_the_others_are_deleted(engine, tmp_path):
    async with faulty(engine, tmp_path) as (faults, through, straight, spec):
        boxes = [await through.open(spec) for _ in range(3)]
        faults.add("refuse", DELETE + boxes[1].container, status=500, times=1000)
        with pytest.raises(SandboxError, match=boxes[1].id) as caught:
            await through.reap(spec.labels)
        assert boxes[0].id not in str(caught.value)
        assert [info.id for info in await straight.list(spec.labels)] == [boxes[1].id]


LATE = """
import asyncio, sys, rollyard as ry
backend = ry.sandbox.backend(sys.argv[1], host=sys.argv[2])
async def main():
    await backend.__aenter__()
    for _ in range(3):
        print((await backend.open(ry.SandboxSpec(labels={"faults": sys.argv[3]}))).id, flush=True)
asyncio.run(main())
raise ValueError("a crash")
"""


async def test_what_could_not_be_deleted_at_exit_is_named(engine, tmp_path):
    """The keeper ends a container whose opener is gone; that the host could not delete them is told all the same."""
    async with faulty(engine, tmp_path) as (faults, _, straight, spec):
        faults.add("refuse", r"DELETE /containers/", status=500, times=1000)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LATE, engine[0], f"unix://{tmp_path}/s", spec.labels["faults"],
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        out, _ = await asyncio.wait_for(child.communicate(), 120)
        made, _, told = out.decode().partition("Traceback")
        assert len(made.split()) == 3 and all(name in told for name in made.split()), out.decode()
        with anyio.fail_after(60):
            while await straight.list(spec.labels):
                await anyio.sleep(0.2)


async def test_an_address_and_an_environment_stay_out_of_every_error_log_and_command_line(engine, tmp_path):
    """Two canaries: the password in the engine's address and a value of the spec's environment."""
    kind, host = engine
    texts, said = [], io.StringIO()
    lines = logging.StreamHandler(said)
    logging.getLogger("rollyard").addHandler(lines)

    async def failing(call):
        with pytest.raises(Error) as caught:
            await call
        texts.append("".join(traceback.format_exception(caught.value)) + repr(caught.value))

    try:
        async with faulty(engine, tmp_path) as (faults, through, straight, spec):
            port = await asyncio.start_server(lambda r, w: joined(r, w, host.removeprefix("unix://")), "127.0.0.1", 0)
            address = f"tcp://user:canary-address@127.0.0.1:{port.sockets[0].getsockname()[1]}"
            async with backend(kind, host=address, limits=FAST) as remote:
                await failing(remote.open(ry.SandboxSpec(image="none:of-these")))
                port.close()
                await port.wait_closed()
            await failing(backend(kind, host=address, limits=FAST).__aenter__())
            spec = ry.SandboxSpec(labels=spec.labels, env={"TOKEN": "canary-env"}, boot_s=60)
            for status in (400, 500, 503):
                faults.add("refuse", CREATE, status=status, times=1000)
                await failing(through.open(spec))
                faults.faults.clear()
            async with through.open(spec) as box, DockerEngine(host) as wire:
                for request, fault in (
                    (EXEC, {"kind": "refuse", "status": 500}),
                    (RUN, {"kind": "refuse", "status": 500}),
                    (RUN, {"kind": "lose", "status": 504}),
                ):
                    faults.add(request=request, **fault)
                    await failing(box.exec("true", timeout=60))
                await failing(box.exec("true", cwd="/no/such/place", timeout=60))
                await failing(box.exec("true", user="nobody-by-this-name", timeout=60))
                await failing(box.read("/no/such/file"))
                texts.append(str(await wire.call("GET", f"containers/{box.container}/json")))
                texts.append(
                    (await box.exec("tr '\\0' ' ' </proc/1/cmdline; cat /proc/[0-9]*/cmdline", timeout=60)).text
                )
            await failing(box.exec("true", timeout=60))
            texts.append(os.popen("ps axww").read())
    finally:
        logging.getLogger("rollyard").removeHandler(lines)
    assert len(texts) > 10 and said.getvalue()
    assert not [text for text in [*texts, said.getvalue()] if "canary-" in text]


async def joined(reader, writer, path):
    """One TCP connection to the engine's socket, as a tunnel would carry it."""
    up_reader, up_writer = await asyncio.open_unix_connection(path)

    async def copy(source, target):
        while data := await source.read(2**16):
            target.write(data)
            await target.drain()
        target.close()

    await asyncio.gather(copy(reader, up_writer), copy(up_reader, writer), return_exceptions=True)
