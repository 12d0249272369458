"""Programs in a local sandbox: exec, jobs, their output and their ends."""

from __future__ import annotations

import asyncio
import gc

import pytest

import rollyard as ry
from rollyard.core.errors import PathError, SandboxGone
from tests.waiting import settle, until

pytestmark = pytest.mark.anyio


async def test_a_non_zero_exit_is_a_value_and_streams_are_separate(box):
    done = await box.exec(["sh", "-c", "echo hi; echo no >&2; exit 3"], timeout=10)
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"hi\n", b"no\n")


async def test_a_string_is_a_shell_line_and_a_sequence_is_not(box):
    assert (await box.exec("echo $((1+1))", timeout=10)).stdout == b"2\n"
    assert (await box.exec(["echo", "$((1+1))"], timeout=10)).stdout == b"$((1+1))\n"


async def test_a_timeout_kills_every_descendant_and_keeps_the_sandbox(box):
    script = "(setsid sh -c 'sleep 500 & sleep 501' &) ; sh -c 'sleep 502 & disown' ; sleep 503"
    done = await box.exec(["bash", "-c", script], timeout=0.5)
    assert done.timed_out and done.exit_code is None
    left = await box.exec("ps -eo args | grep -c '[s]leep 50'", timeout=10)
    assert left.stdout == b"0\n"


async def test_a_grandchild_that_holds_stdout_does_not_hang_exec_and_lives_on(box):
    done = await box.exec("sleep 400 & echo started", timeout=30)
    assert done.stdout == b"started\n" and done.duration_s < 20
    assert (await box.exec("pgrep -x sleep | wc -l", timeout=10)).stdout == b"1\n"


async def test_output_is_capped_and_says_so(box):
    done = await box.exec("yes | head -c 3000000", timeout=30, max_output=1000)
    assert len(done.stdout) == 1000 and done.truncated and done.exit_code == 0


async def test_bytes_env_and_stdin_arrive_as_they_are(box):
    odd = "a\nb'\"$(touch /tmp/owned)` é"
    done = await box.exec(["sh", "-c", 'printf %s "$ODD"; cat'], env={"ODD": odd}, stdin=bytes(range(256)), timeout=10)
    assert done.stdout == odd.encode() + bytes(range(256))
    assert not await box.exists("/tmp/owned")


async def test_large_stdin_and_environment_arrive(box):
    data = b"x" * 3_000_000
    done = await box.exec(
        ["sh", "-c", 'wc -c; printf %s "$BIG" | wc -c'], env={"BIG": "y" * 100_000}, stdin=data, timeout=30
    )
    assert done.stdout.split() == [b"3000000", b"100000"]


async def test_stderr_can_be_reopened_by_name(box):
    done = await box.exec("echo x > /dev/stderr; echo y > /dev/stdout", timeout=10)
    assert (done.stdout, done.stderr, done.exit_code) == (b"y\n", b"x\n", 0)
    done = await box.exec("echo x > /dev/stderr", user="agent", timeout=10)
    assert (done.stderr, done.exit_code) == (b"x\n", 0)


async def test_a_missing_program_or_directory_is_a_typed_error(box):
    with pytest.raises(PathError) as program:
        await box.exec(["no-such-program"], timeout=10)
    with pytest.raises(PathError) as cwd:
        await box.exec(["true"], cwd="/missing", timeout=10)
    assert program.value.errno_name == cwd.value.errno_name == "ENOENT"


async def test_a_job_streams_from_any_offset_and_reports_its_end(box):
    job = await box.start(["sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.05; done; exit 4"])
    assert await job.poll() is None
    parts = [(offset, chunk) async for offset, chunk in job.stream()]
    assert b"".join(chunk for _, chunk in parts) == b"1\n2\n3\n" and parts[-1][0] == 6
    assert b"".join([chunk async for _, chunk in job.stream(2)]) == b"2\n3\n"
    assert (await job.wait(5)).exit_code == 4 and await job.poll() == 4
    assert await job.tail(2) == b"3\n"


async def test_a_reader_that_was_left_before_its_sandbox_ended_is_no_error(backend):
    """What a stream waits for fails with the sandbox. A reader that is left in its middle, in a circle of references as
    an error's frames make them, is collected together with that."""
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    async with backend.open(ry.SandboxSpec()) as box:
        job = await box.start(["sh", "-c", "echo hi; sleep 300"])
        circle = {"reader": job.stream()}
        circle["itself"] = circle
        assert await anext(circle["reader"]) == (3, b"hi\n")
    await settle()  # what the reader waits for learns of the end
    del circle, job
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


async def test_waiting_too_briefly_raises_and_leaves_the_job_running(box):
    job = await box.start(["sleep", "300"])
    with pytest.raises(TimeoutError):
        await job.wait(0.1)
    assert await job.poll() is None
    await job.kill()
    assert (await job.wait(5)).signal == 9
    await job.kill()


async def test_a_job_takes_stdin_while_it_runs(box):
    job = await box.start(["cat"], stdin=True)
    await job.write(b"one ")
    await job.write(b"two")
    await job.close_stdin()
    assert (await job.wait(5)).stdout == b"one two"


async def test_a_job_id_starts_at_most_one_program(box):
    for _ in range(2):
        job = await box.start("echo ran >> /tmp/count", job_id="only-once")
        await job.wait(5)
    assert await box.read("/tmp/count") == b"ran\n"


async def asleep(box, count):
    return (await box.exec("pgrep -x sleep | wc -l", timeout=10)).stdout == b"%d\n" % count


async def test_killing_a_job_kills_what_it_daemonised(box):
    job = await box.start(["bash", "-c", "(setsid sleep 600 &); sleep 601"])
    await until(lambda: asleep(box, 2))
    await job.kill()
    assert (await box.exec("pgrep -x sleep | wc -l", timeout=10)).stdout == b"0\n"


async def test_kill_processes_ends_all_programs_and_keeps_files(box):
    job = await box.start(["sleep", "700"])
    await box.exec("setsid sleep 701 >/dev/null 2>&1 & echo kept > /tmp/file", timeout=10)
    await box.kill_processes()
    assert (await box.exec("pgrep -x sleep | wc -l", timeout=10)).stdout == b"0\n"
    assert await box.read("/tmp/file") == b"kept\n"
    assert (await job.wait(5)).exit_code is None


async def test_a_cancelled_exec_leaves_no_program_behind(box):
    running = asyncio.ensure_future(box.exec("sleep 800 & setsid sleep 801", timeout=60))
    await until(lambda: asleep(box, 2))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until(lambda: asleep(box, 0))


async def test_signals_that_the_launcher_ignores_reach_programs(box):
    done = await box.exec("kill -TERM $$; echo survived", timeout=10)
    assert (done.signal, done.stdout) == (15, b"")
    done = await box.exec("kill -INT $$; echo survived", timeout=10, user="agent" if box.capabilities.users else None)
    assert (done.signal, done.stdout) == (2, b"")


async def test_cpu_seconds_are_those_of_the_whole_tree(box):
    job = await box.start("sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done'; sleep 300")
    async with asyncio.timeout(20):
        while (used := await job.cpu_s()) == 0:
            await asyncio.sleep(0.1)
    assert used is not None and used > 0
    await job.kill()


async def test_programs_run_as_other_users(box):
    assert (await box.exec("id -un; echo $HOME", user="agent", timeout=10)).stdout == b"agent\n/home/agent\n"
    assert (await box.exec("id -u", user="4321", timeout=10)).stdout == b"4321\n"


async def test_use_after_kill_says_that_it_is_gone(backend):
    box = await backend.open(ry.SandboxSpec())
    assert await box.alive()
    assert (await box.kill(), await box.kill(), await box.alive()) == (True, False, False)
    with pytest.raises(SandboxGone):
        await box.exec(["true"], timeout=10)
