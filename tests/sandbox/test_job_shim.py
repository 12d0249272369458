"""Durable jobs by shell script alone, on a plain `/bin/sh`: once, reattached, streamed, killed whole (S7, S8)."""

import asyncio
import os
import signal
import time

import anyio
import pytest

from rollyard.core.errors import SandboxInterrupted, UnknownName, Unsupported
from rollyard.core.program import Program
from rollyard.core.sandbox import Exit
from rollyard.sandbox import job_shim

pytestmark = pytest.mark.anyio


async def run(cmd, *, env=None, cwd=None, user=None, timeout):
    process = await asyncio.create_subprocess_exec(
        *cmd,
        env={"PATH": os.environ["PATH"], **(env or {})},
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), timeout)
    return Exit(exit_code=process.returncode, stdout=out, stderr=err)


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "jobs")


def pids_of(job_id):
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if f"{job_shim.MARK}={job_id}".encode() in file.read():
                        found.append(int(name))
            except OSError:
                pass
    return found


@pytest.mark.parametrize("exact", [True, False])
async def test_a_job_gives_its_code_and_both_streams_byte_for_byte(root, exact):
    cmd = ["sh", "-c", r"printf '\000\377a\r\n'; echo err >&2; exit 7"]
    job = await job_shim.launch(run, Program.of(cmd), root=root, exact=exact)
    done = await job.wait(10)
    assert (done.exit_code, done.stdout, done.stderr) == (7, b"\x00\xffa\r\n", b"err\n")
    assert await job.poll() == 7


async def test_a_launch_that_is_repeated_runs_the_program_once(root, tmp_path):
    count = tmp_path / "count"
    for _ in range(3):
        job = await job_shim.launch(run, Program.of(f"echo x >> {count}", job_id="job_same"), root=root)
    await job.wait(10)
    assert count.read_text() == "x\n"


async def test_waiting_past_a_timeout_leaves_the_job_alive_and_another_finds_it(root):
    job = await job_shim.launch(run, Program.of("sleep 0.6; echo late"), root=root)
    with pytest.raises(TimeoutError):
        await job.wait(0.05)
    assert await job.poll() is None
    again = await job_shim.find(run, job.id, root=root)
    assert (await again.wait(10)).stdout == b"late\n"


async def test_streams_are_live_ordered_and_resumable_by_offset(root):
    job = await job_shim.launch(run, Program.of("for i in 1 2 3; do echo $i; sleep 0.1; done"), root=root)
    chunks = [chunk async for chunk in job.stream()]
    assert b"".join(data for _, data in chunks) == b"1\n2\n3\n"
    assert len(chunks) > 1
    assert b"".join([data async for _, data in job.stream(chunks[0][0])]) == b"1\n2\n3\n"[chunks[0][0] :]


async def test_kill_takes_setsid_and_double_forked_descendants(root):
    job = await job_shim.launch(run, Program.of("setsid sleep 300 & (sleep 300 & sleep 300 &) ; wait"), root=root)
    while len(pids_of(job.id)) < 4:
        await anyio.sleep(0.02)
    await job.kill()
    assert pids_of(job.id) == []
    assert (await job.wait(10)).exit_code is None
    await job.kill()


async def test_a_wrapper_that_was_killed_is_reported_lost_and_never_hangs(root):
    job = await job_shim.launch(run, Program.of("sleep 300"), root=root)
    with open(f"{root}/{job.id}/pid") as file:
        os.kill(int(file.read().split()[0]), signal.SIGKILL)
    done = await job.wait(10)
    assert (done.exit_code, done.lost) == (None, True)
    await job.kill()


async def test_awkward_words_reach_the_program_unchanged_and_run_nothing(root, tmp_path):
    words = ["a b", "$(touch pwned)", "`id`", "quote'\"", "new\nline", "-n", "*"]
    job = await job_shim.launch(
        run, Program.of(["printf", "%s\\0", *words], env={"ODD": "x'\"\n$(id)"}, cwd=str(tmp_path)), root=root
    )
    assert (await job.wait(10)).stdout == "".join(f"{word}\0" for word in words).encode()
    assert not (tmp_path / "pwned").exists()


async def test_cpu_time_of_the_tree_grows_while_it_works(root):
    job = await job_shim.launch(run, Program.of("while :; do :; done"), root=root)
    limit = time.monotonic() + 20
    while (await job.cpu_s() or 0) < 0.1 and time.monotonic() < limit:
        await anyio.sleep(0.05)
    assert await job.cpu_s() >= 0.1
    await job.kill()


async def test_an_unknown_job_and_a_write_to_stdin_are_typed_errors(root):
    with pytest.raises(UnknownName):
        await job_shim.find(run, "job_none", root=root)
    with pytest.raises(UnknownName):
        await job_shim.find(run, "../../etc", root=root)
    job = await job_shim.launch(run, Program.of("true"), root=root)
    with pytest.raises(Unsupported):
        await job.write(b"x")
    await job.wait(10)


async def test_a_connection_that_breaks_after_the_launch_or_during_a_look_neither_starts_nor_loses_the_program(
    root, tmp_path
):
    broken = []

    async def breaking(cmd, **options):
        """Every command runs; the answer to every second one is lost."""
        done = await run(cmd, **options)
        broken.append(len(broken) % 2 == 0)
        if broken[-1]:
            raise SandboxInterrupted("the connection was reset")
        return done

    job = await job_shim.launch(
        breaking, Program.of(f"echo once >> {tmp_path}/count; sleep 0.3; printf 'all of it'; exit 3"), root=root
    )
    done = await job.wait(30)
    assert (done.exit_code, done.stdout, (tmp_path / "count").read_text()) == (3, b"all of it", "once\n")
    assert sum(broken) >= 3


@pytest.mark.parametrize("one_call_s", [None, 30.0])
async def test_a_program_is_run_to_its_end_once_although_answers_are_lost(tmp_path, one_call_s):
    lost, count = [], tmp_path / "count"

    async def losing(cmd, **options):
        done = await run(cmd, **options)
        if len(lost) < 2:
            lost.append(done)
            raise SandboxInterrupted("the answer was lost")
        return done

    argv = ["sh", "-c", f"echo once >>{count}; printf 'out\\377'; echo err >&2; cat; exit 3"]
    options = {"env": {}, "cwd": "/", "most": 2, "root": str(tmp_path), "one_call_s": one_call_s}
    done = await job_shim.finish(losing, argv, "job_x", **options)
    assert (done.exit_code, done.stdout, done.stderr, done.truncated) == (3, b"ou", b"er", True)
    assert (len(lost), count.read_text()) == (2, "once\n")


@pytest.mark.parametrize("one_call_s", [None, 30.0])
async def test_a_program_whose_shells_were_all_killed_is_told_as_lost(tmp_path, one_call_s):
    async def cut_off(cmd, **options):
        done = await run(cmd, **options)
        if done.exit_code < 0:
            raise SandboxInterrupted("the answer did not come through whole")
        return done

    argv = ["sh", "-c", f"grep -l {job_shim.MARK}=job_y /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 | xargs kill -9"]
    options = {"env": {}, "cwd": "/", "most": 100, "root": str(tmp_path), "one_call_s": one_call_s}
    done = await job_shim.finish(cut_off, argv, "job_y", **options)
    assert (done.exit_code, done.lost) == (None, True)
