"""The relay between real processes: many streams over one pipe, in both programs and all three ways (K9): bytes, lines, and a
pair of files for backends without stdin."""

import asyncio
import hashlib
import os
import shutil
import signal
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollyard.inside as package
from rollyard.core.errors import GateUnreachable, SandboxGone, SandboxInterrupted
from rollyard.core.sandbox import Exit
from rollyard.sandbox.relay import HostRelay, protocol
from rollyard.sandbox.relay.filepair import HostFilePair

INSIDE = Path(package.__file__).parent
PROGRAMS = {"python": [sys.executable, str(INSIDE / "relay.py")]}
if shutil.which("node"):
    PROGRAMS["node"] = ["node", str(INSIDE / "relay.js")]

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[f"{name}-{mode}" for name in PROGRAMS for mode in ("bytes", "lines", "files")])
def program(request):
    name, mode = request.param.split("-")
    return [*PROGRAMS[name], *([] if mode == "bytes" else [mode])]


class Inside:
    """The program at the end of a pair of files: found by the directory it was given."""

    def __init__(self, place):
        self.returncode, self._place = None, place

    def running(self):
        pids = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if self._mine(path)]
        return [int(pid) for pid in pids]

    def _mine(self, path):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            return False
        return f"files:{self._place}".encode() in words and words[0] != b"sh"

    def kill(self):
        for pid in self.running():
            os.kill(pid, signal.SIGKILL)


async def shell(script, *args, timeout):
    """A script on this machine, as a backend would run it in a sandbox."""
    argv = ["/bin/sh", "-c", script, "rollyard", *args]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe)
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout)
    finally:
        if process.returncode is None:
            process.kill()
    return Exit(exit_code=process.returncode, stdout=out, stderr=err)


async def put(path, data):
    await asyncio.to_thread(Path(path).write_bytes, data)


@asynccontextmanager
async def over_files(argv):
    with tempfile.TemporaryDirectory() as scratch:
        pair, inside = HostFilePair(shell, put, f"{scratch}/r"), Inside(f"{scratch}/r")
        try:
            await pair.start(argv)
            async with HostRelay(pair.output(), pair.write, log=pair.log) as relay:
                yield relay, inside
        finally:
            await pair.aclose()
            inside.kill()


@asynccontextmanager
async def relayed(argv):
    if argv[-1] == "files":
        async with over_files(argv[:-1]) as both:
            yield both
        return
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )

    async def output():
        while data := await process.stdout.read(65536):
            yield data

    async def write(data):
        process.stdin.write(data)
        await process.stdin.drain()

    try:
        async with HostRelay(output(), write, lines="lines" in argv, log=process.stderr.read) as relay:
            yield relay, process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def echo(stream):
    while data := await stream.receive():
        await stream.send(data)
    await stream.send_eof()


async def accept_and_echo(listener):
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(echo(await listener.accept()))


async def talk(port, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send():
        writer.write(body)
        await writer.drain()
        writer.write_eof()

    sending = asyncio.create_task(send())
    got = await reader.read()
    await sending
    writer.close()
    return got


async def test_64_streams_at_once_each_get_their_own_bytes_back(program):
    async with relayed(program) as (relay, _):
        listener = await relay.listen()
        server = asyncio.create_task(accept_and_echo(listener))
        bodies = [bytes([n]) * (1000 * n + 1) for n in range(64)]
        assert await asyncio.gather(*(talk(listener.port, body) for body in bodies)) == bodies
        server.cancel()


async def test_a_16_mb_body_passes_both_ways_after_a_half_close(program):
    body = hashlib.shake_256(b"x").digest(16 * 2**20)
    async with relayed(program) as (relay, _):
        listener = await relay.listen()

        async def whole():
            stream = await listener.accept()
            parts = []
            while data := await stream.receive():
                parts.append(data)
            await stream.send(b"".join(parts))
            await stream.send_eof()

        server = asyncio.create_task(whole())
        assert hashlib.sha256(await talk(listener.port, body)).digest() == hashlib.sha256(body).digest()
        await server


async def test_a_reader_that_stalls_does_not_stall_the_others(program):
    async with relayed(program) as (relay, _):
        listener = await relay.listen()
        stuck = asyncio.create_task(talk(listener.port, b"s" * (4 * protocol.CREDIT)))
        stalled = await listener.accept()
        server = asyncio.create_task(accept_and_echo(listener))
        assert await talk(listener.port, b"hello") == b"hello"
        server.cancel()
        finishing = asyncio.create_task(echo(stalled))
        assert len(await stuck) == 4 * protocol.CREDIT
        await finishing


async def test_the_host_dials_in_and_a_closed_port_is_refused(program):
    server = await asyncio.start_server(lambda r, w: w.write(b"hi") or w.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with relayed(program) as (relay, _):
        stream = await relay.dial(port)
        assert await stream.receive() == b"hi"
        assert await stream.receive() == b""
        server.close()
        await server.wait_closed()
        with pytest.raises(ConnectionRefusedError):
            await relay.dial(port)


async def test_a_port_that_is_taken_is_an_error_and_the_relay_lives_on(program):
    async with relayed(program) as (relay, _):
        first = await relay.listen()
        with pytest.raises(ConnectionRefusedError):
            await relay.listen(first.port)
        assert (await relay.listen()).port != first.port


async def test_a_connection_to_a_listener_that_was_closed_ends_and_does_not_hang(program):
    async with relayed(program) as (relay, _):
        listener, other = await relay.listen(), await relay.listen()
        await listener.aclose()
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        server = asyncio.create_task(accept_and_echo(other))
        assert await talk(other.port, b"hello") == b"hello"
        server.cancel()


async def test_killed_mid_stream_ends_every_stream_and_waiter_with_an_error(program):
    async with relayed(program) as (relay, process):
        listener = await relay.listen()
        client = asyncio.create_task(talk(listener.port, b"x" * 100))
        stream = await listener.accept()
        assert await stream.receive() == b"x" * 100
        process.kill()
        with pytest.raises(SandboxGone):
            await listener.accept()
        assert await stream.receive() == b""
        with pytest.raises(BrokenPipeError):
            await stream.send(b"y")
        await asyncio.wait([client])


async def test_a_program_that_is_no_relay_fails_with_its_own_words():
    with pytest.raises(GateUnreachable, match="no such thing"):
        async with relayed([sys.executable, "-c", "import sys; sys.exit('no such thing')"]):
            pass


async def test_it_ends_when_the_host_is_gone(program):
    if program[-1] == "files":
        async with relayed(program) as (_, inside):
            assert inside.running()
        assert not inside.running()
        return
    async with relayed(program) as (_, process):
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_what_is_appended_lands_once_although_its_answer_was_lost(tmp_path):
    """Every second append is run twice, as by a backend that asks again."""
    count = 0

    async def twice(script, *args, timeout):
        nonlocal count
        if "base64 -d" in script:
            count += 1
            if count % 2:
                await shell(script, *args, timeout=timeout)
        return await shell(script, *args, timeout=timeout)

    pair = HostFilePair(twice, put, f"{tmp_path}/r")
    await pair.start(PROGRAMS["python"])
    body = os.urandom(300_000)
    async with HostRelay(pair.output(), pair.write, log=pair.log) as relay:
        listener = await relay.listen()
        server = asyncio.create_task(accept_and_echo(listener))
        for _ in range(3):
            assert await talk(listener.port, body) == body
        server.cancel()
    await pair.aclose()
    assert count > 3


@pytest.mark.parametrize("name", ["python", pytest.param("node", marks=pytest.mark.slow)])
async def test_what_both_sides_have_taken_lies_on_no_disk(tmp_path, name):
    (tmp_path / "whole").write_bytes(bytes(2**20))
    if not (await shell('fallocate -p -o 0 -l 4096 "$1"', f"{tmp_path}/whole", timeout=10)).ok:
        pytest.skip("no `fallocate` (util-linux) on this machine, or no holes in files here")
    body, rounds = hashlib.shake_256(b"y").digest(16 * 2**20), 4
    pair = HostFilePair(shell, put, f"{tmp_path}/r")
    await pair.start(PROGRAMS[name])
    async with HostRelay(pair.output(), pair.write, log=pair.log) as relay:
        listener = await relay.listen()
        server = asyncio.create_task(accept_and_echo(listener))
        for _ in range(rounds):
            assert await talk(listener.port, body) == body
        for part in ("in", "out"):
            file = (tmp_path / "r" / part).stat()
            assert file.st_size > rounds * len(body) and file.st_blocks * 512 < 2.5 * len(body), part
        server.cancel()
    await pair.aclose()


async def test_a_program_that_was_killed_with_what_watched_it_is_found_out(tmp_path):
    """Nothing is left to ring: the next look finds that nobody is there."""

    async def patient(script, *args, timeout):
        while True:
            try:
                return await shell(script, *args, timeout=timeout)
            except TimeoutError:
                continue

    pair = HostFilePair(patient, put, f"{tmp_path}/r", poll_s=1.0)
    await pair.start(PROGRAMS["python"])
    async with HostRelay(pair.output(), pair.write, log=pair.log) as relay:
        listener = await relay.listen()
        os.killpg(int(Path(tmp_path, "r/pid").read_text()), signal.SIGKILL)
        with pytest.raises(SandboxGone):
            await asyncio.wait_for(listener.accept(), 30)
    await pair.aclose()


async def test_a_way_that_breaks_is_told_to_the_writer(tmp_path):
    async def broken(script, *args, timeout):
        if "base64 -d" in script:
            raise SandboxInterrupted("the line is cut")
        return await shell(script, *args, timeout=timeout)

    pair = HostFilePair(broken, put, f"{tmp_path}/r")
    await pair.start(PROGRAMS["python"])
    await pair.write(b"x")
    with pytest.raises(SandboxInterrupted, match="cut"):
        while True:
            await pair.write(b"x")
            await asyncio.sleep(0.01)
    await pair.aclose()


@given(
    st.lists(st.tuples(st.sampled_from(sorted(protocol.KINDS)), st.integers(0, 2**32 - 1), st.binary(max_size=50))),
    st.lists(st.integers(1, 20), min_size=1),
    st.booleans(),
)
def test_frames_survive_any_split(sent, sizes, lines):
    data = b"".join(protocol.pack(*frame, lines=lines) for frame in sent)
    reader, got, at, turn = protocol.FrameReader(lines=lines), [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        got += list(reader.feed(data[at : at + size]))
        at, turn = at + size, turn + 1
    assert got == sent
