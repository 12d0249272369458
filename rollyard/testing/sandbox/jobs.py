"""Background programs: found by id, streamed from any offset, ended as a tree, never run twice."""

from __future__ import annotations

import time

import anyio

from rollyard.core.errors import Error
from rollyard.testing.sandbox.fixture import (
    SandboxFixture,
    all_beat,
    eventually,
    hearts,
    none_beats,
    out,
    raises,
    scratch,
)
from rollyard.testing.suite import case, check


@case("B1", "returns the exit code and output of a background program")
async def wait(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        job = await box.start("echo out; echo err >&2; exit 9")
        done = await job.wait(30)
        check((done.exit_code, done.stdout, done.stderr) == (9, b"out\n", b"err\n"), f"got {done}")
        check(await job.poll() == 9 and (await job.wait(5)).exit_code == 9, "asking again gives another answer")


@case("B2", "polls None while it runs, then the code")
async def poll(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        job = await box.start(f"while [ ! -e {tmp}/go ]; do sleep 0.05; done; exit 4")
        check(await job.poll() is None, "a running program polls as ended")
        await box.write(f"{tmp}/go", b"")

        async def ended() -> bool:
            return await job.poll() is not None

        await eventually(ended, within=20, why="poll is None after the end")
        check(await job.poll() == 4, f"poll gave {await job.poll()}")


@case("B3", "raises TimeoutError from wait and leaves the program running")
async def wait_timeout(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        job = await box.start(f"sleep 1.5; echo survived > {tmp}/proof; exit 0")
        await raises(TimeoutError, job.wait(0.3), "wait(0.3) of a longer program")
        check(await job.poll() is None, "a wait that ran out killed the program")
        check((await job.wait(30)).exit_code == 0, "the program did not end well")
        check(await out(box, f"cat {tmp}/proof") == "survived", "the program did not reach its end")


@case("B4", "streams chunks while the program runs, in order")
async def stream_live(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        job = await box.start("for i in 1 2 3; do echo line$i; sleep 0.4; done")
        seen: list[tuple[float, bytes]] = []
        async for _, chunk in job.stream():
            seen.append((time.monotonic(), chunk))
        check(b"".join(chunk for _, chunk in seen) == b"line1\nline2\nline3\n", f"streamed {seen}")
        check(seen[-1][0] - seen[0][0] > 0.3, "all chunks came at the end: this is no stream")


@case("B5", "resumes a stream at any offset without a gap or a repeat")
async def stream_resumes(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        job = await box.start("for i in $(seq 1 200); do echo $i; done; sleep 0.3; echo end")
        first, offset = b"", 0
        async for after, chunk in job.stream():
            first, offset = chunk, after
            break
        rest = b"".join([chunk async for _, chunk in job.stream(offset)])
        wanted = b"".join(b"%d\n" % n for n in range(1, 201)) + b"end\n"
        check(first + rest == wanted, f"{len(first)} + {len(rest)} bytes are not the {len(wanted)} that were written")
        whole = b"".join([chunk async for _, chunk in job.stream(0)])
        check(whole == wanted, "a stream from the start after the end is not complete")


@case("B6", "streams stderr by itself")
async def stream_stderr(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        job = await box.start("echo out; echo err >&2")
        check(
            b"".join([chunk async for _, chunk in job.stream(stderr=True)]) == b"err\n",
            "stderr is not what was written",
        )


@case("B7", "shows the tail of the output")
async def tail(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        job = await box.start("seq 1 1000; echo oops >&2")
        await job.wait(30)
        check((await job.tail(9)) == b"999\n1000\n"[-9:], f"tail(9) is {await job.tail(9)!r}")
        check(await job.tail(100, stderr=True) == b"oops\n", "the tail of stderr is wrong")


@case("B8", "ends the whole tree with kill, and a second kill is nothing", needs=("tree_kill",))
async def kill_tree(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        file = f"{await scratch(box)}/beats"
        job = await box.start(hearts(file))
        await eventually(lambda: all_beat(box, file), within=10, why="the three programs did not all start")
        await job.kill()
        await eventually(lambda: none_beats(box, file), within=10, why="programs survived kill")
        done = await job.wait(10)
        check(done.exit_code != 0, f"a killed job came back as {done}")
        await job.kill()


@case("B9", "keeps the exit code for a later client, found by id")
async def found_by_id(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        job = await box.start("echo kept; exit 6", job_id="my-job")
        await job.wait(30)
        again = await box.job("my-job")
        check(again.id == job.id and (await again.wait(10)).exit_code == 6, "the job is not found by its id")
        check((await again.tail()) == b"kept\n", "its output is not found by its id")
        await raises(Error, box.job("no-such-job"), "an unknown job id")


@case("B10", "starts a program once, however often its id is given")
async def at_most_once(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        for _ in range(3):
            job = await box.start(f"echo x >> {tmp}/count", job_id="once")
            await job.wait(30)
        check(await out(box, f"wc -l < {tmp}/count") == "1", "one id started the program more than once")


@case("B11", "does not stall a program whose output nobody reads", timeout=120)
async def undrained(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        job = await box.start(f"yes 0123456789abcdef | head -c 50000000; echo done > {tmp}/done")
        done = await job.wait(90)
        check(done.exit_code == 0, f"came back as {done.exit_code}")
        check(await box.exists(f"{tmp}/done"), "the program did not reach its end")


@case("B12", "reports a program that was killed from inside, and does not hang")
async def killed_inside(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        job = await box.start("kill -9 $$")
        done = await job.wait(20)
        check(done.exit_code != 0 and (done.signal == 9 or done.lost), f"came back as {done}")


@case("B13", "runs jobs side by side")
async def side_by_side(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        one = await box.start(f"while [ ! -e {tmp}/b ]; do sleep 0.05; done; touch {tmp}/a; exit 1")
        two = await box.start(f"touch {tmp}/b; while [ ! -e {tmp}/a ]; do sleep 0.05; done; exit 2")
        codes = ((await one.wait(30)).exit_code, (await two.wait(30)).exit_code)
        check(codes == (1, 2), f"two jobs that wait for each other ended with {codes}")


@case("B14", "takes input while it runs, and sees its end", needs=("stdin",))
async def interactive(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        job = await box.start("while read line; do echo got $line; done; echo eof", stdin=True)
        await job.write(b"one\n")

        async def answered() -> bool:
            return b"got one" in await job.tail()

        await eventually(answered, within=20, why="a line written to stdin was not answered")
        await job.write(b"two\n")
        await job.close_stdin()
        done = await job.wait(20)
        check(done.stdout == b"got one\ngot two\neof\n", f"got {done.stdout!r}")


@case("B15", "ends a job with an error when its sandbox is killed")
async def sandbox_killed(fixture: SandboxFixture) -> None:
    box = await fixture.open()
    job = await box.start("sleep 600")
    await box.kill()
    with anyio.fail_after(20):
        try:
            done = await job.wait(15)
        except Error:
            return
    check(done.lost and done.exit_code is None, f"a job of a killed sandbox came back as {done}")


@case("B16", "keeps a program that runs longer than a minute", slow=True, timeout=150)
async def longer_than_a_minute(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        job = await box.start("sleep 75; exit 3")
        check((await job.wait(120)).exit_code == 3, "a program of 75 s did not end by itself")


@case("B17", "counts the CPU time of a job's tree, or says None")
async def cpu(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        job = await box.start("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; sleep 5")
        await anyio.sleep(1)
        used = await job.cpu_s()
        check(used is None or 0 < used < 10, f"cpu_s is {used}")
        await job.kill()
