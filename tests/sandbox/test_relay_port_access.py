"""A relay over a sandbox's lifetime, with real programs as its inner end: ended, broken, and started again on the same ports."""

import asyncio
import sys
from pathlib import Path

import anyio
import pytest

import rollyard.inside as package
from rollyard.core.errors import GateUnreachable, PathError, SandboxGone, SandboxInterrupted
from rollyard.sandbox.relay import HostRelay, RelayAccess

pytestmark = pytest.mark.anyio
INSIDE = [sys.executable, str(Path(package.__file__).with_name("relay.py"))]


class Inside:
    """Starts the program each time it is asked to; `argv` may be changed in between."""

    def __init__(self, *argv):
        self.argv = argv or tuple(INSIDE)
        self.processes = []

    async def __call__(self, stack):
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self.argv, stdin=pipe, stdout=pipe, stderr=pipe)
        self.processes.append(process)
        stack.push_async_callback(self.end, process)

        async def output():
            while data := await process.stdout.read(65536):
                yield data

        async def write(data):
            process.stdin.write(data)
            await process.stdin.drain()

        return HostRelay(output(), write, log=process.stderr.read)

    async def end(self, process):
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def access():
    inside = Inside()
    made = RelayAccess(inside, "sbx_1")
    yield made, inside
    await made.aclose()


async def answered(port):
    """What a client gets that goes on asking, as agents do."""
    with anyio.fail_after(60):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                said = await reader.read()
                writer.close()
                if said:
                    return said
            except OSError:
                pass
            await asyncio.sleep(0.05)


async def serve(listener):
    while True:
        stream = await listener.accept()
        await stream.send(b"hello")
        await stream.send_eof()


async def test_listeners_stay_on_their_ports_when_the_program_is_killed(access):
    made, inside = access
    first, second = await made.listen(0), await made.listen(0)
    tasks = [asyncio.create_task(serve(one)) for one in (first, second)]
    for _ in range(3):
        assert await answered(first.port) == await answered(second.port) == b"hello"
        inside.processes[-1].kill()
    assert await answered(first.port) == b"hello"
    assert len(inside.processes) == 4
    for task in tasks:
        task.cancel()


async def test_the_end_of_every_program_leaves_the_listeners(access):
    made, inside = access
    listener = await made.listen(0)
    async with made.renewing():
        inside.processes[-1].kill()
    task = asyncio.create_task(serve(listener))
    assert await answered(listener.port) == b"hello"
    task.cancel()


async def test_a_relay_that_cannot_be_started_again_ends_its_listeners_with_its_words(access):
    made, inside = access
    listener = await made.listen(0)
    inside.argv = (sys.executable, "-c", "import sys; sys.exit('the sandbox is broken')")
    inside.processes[-1].kill()
    with pytest.raises(SandboxGone), anyio.fail_after(60):
        await listener.accept()
    with pytest.raises(GateUnreachable, match="the sandbox is broken"):
        await made.listen(0)


async def test_one_that_ends_as_soon_as_it_is_up_is_not_started_for_ever(access):
    made, inside = access
    listener = await made.listen(0)

    async def killing():
        seen = 0
        while True:
            if len(inside.processes) > seen:
                seen = len(inside.processes)
                inside.processes[-1].kill()
            await asyncio.sleep(0.01)

    task = asyncio.create_task(killing())
    with pytest.raises(SandboxGone), anyio.fail_after(60):
        await listener.accept()
    task.cancel()
    assert len(inside.processes) < 12


async def test_a_closed_way_starts_nothing_again(access):
    made, inside = access
    listener = await made.listen(0)
    await made.aclose()
    with pytest.raises(SandboxGone):
        await listener.accept()
    assert len(inside.processes) == 1


async def test_a_port_that_is_taken_and_one_where_nobody_listens_are_typed(access):
    made, _ = access
    listener = await made.listen(0)
    with pytest.raises(PathError, match="EADDRINUSE"):
        await made.listen(listener.port)
    await listener.aclose()
    with pytest.raises(SandboxInterrupted, match="start the server first"):
        await made.dial(1)
