"""Opening, finding, ending: what a backend owes from the first byte to the last."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping

import anyio
import msgspec

from rollyard.core.errors import Error, SandboxError, SandboxGone
from rollyard.core.protocols import Sandbox
from rollyard.core.sandbox import SandboxSpec
from rollyard.testing.sandbox.fixture import (
    ATTACH,
    CHILD,
    SandboxFixture,
    all_beat,
    eventually,
    hearts,
    none_beats,
    out,
    raises,
    scratch,
    sh,
)
from rollyard.testing.suite import case, check


@case("C1", "opens a sandbox that is alive until it is killed")
async def open_and_kill(fixture: SandboxFixture) -> None:
    box = await fixture.open()
    try:
        check(await box.alive(), "a fresh sandbox says that it is not alive")
        check((await sh(box, "true")).exit_code == 0, "`true` did not succeed")
    finally:
        killed = await box.kill()
    check(killed is True, f"kill() of a live sandbox returned {killed!r}")
    check(not await box.alive(), "a killed sandbox says that it is alive")


@case("C2", "kills once: the second kill is False and no error")
async def kill_twice(fixture: SandboxFixture) -> None:
    box = await fixture.open()
    seen = [await box.kill(), await box.kill(), await box.kill()]
    check(seen == [True, False, False], f"three kills returned {seen}")


@case("C3", "raises SandboxGone for every use after kill")
async def use_after_kill(fixture: SandboxFixture) -> None:
    box = await fixture.open()
    await box.kill()
    await raises(SandboxGone, sh(box, "true"), "exec after kill")
    await raises(SandboxGone, box.read("/etc/hostname"), "read after kill")
    await raises(SandboxGone, box.write("/any/x", b""), "write after kill")
    await raises(SandboxGone, box.start(["true"]), "start after kill")


@case("C4", "ends a sandbox when its TTL is over", needs=("ttl",))
async def ttl(fixture: SandboxFixture) -> None:
    box = await fixture.open(ttl_s=1.0)
    try:
        await eventually(lambda: _is_dead(box), within=20, why="alive after its TTL")
        await raises(SandboxError, sh(box, "true"), "exec after the TTL")
    finally:
        await box.kill()


@case("C5", "ends an idle sandbox, and not one that is used", needs=("idle_ttl",))
async def idle_ttl(fixture: SandboxFixture) -> None:
    box = await fixture.open(idle_ttl_s=1.5)
    try:
        for _ in range(4):
            await anyio.sleep(0.5)
            check((await sh(box, "true")).exit_code == 0, "ended while it was being used")
        await anyio.sleep(5)  # asking meanwhile could count as use
        check(not await box.alive(), "alive long after its idle TTL")
    finally:
        await box.kill()


@case("C6", "lives longer when it is extended", needs=("ttl", "extend"))
async def extend(fixture: SandboxFixture) -> None:
    async with fixture.open(ttl_s=2.0) as box:
        await box.extend(120)
        await anyio.sleep(3.5)
        check(await box.alive(), "died at its first TTL although it was extended")


@case("C7", "finds sandboxes by label, and none that are gone", needs=("list",))
async def list_by_label(fixture: SandboxFixture) -> None:
    spec = fixture.make_spec()
    async with fixture.backend.open(spec) as box, fixture.open():
        found = await fixture.backend.list(spec.labels)
        check([info.id for info in found] == [box.id], f"list by label found {[info.id for info in found]}")
        check(dict(found[0].labels) == dict(spec.labels), f"labels came back as {found[0].labels}")
    await eventually(lambda: _lists_none(fixture, spec.labels), within=10, why="listed after it was killed")


@case("C8", "lets a second process attach and find its jobs", needs=("attach",))
async def attach_elsewhere(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        await box.write(f"{tmp}/mark", "seen")
        job = await box.start("exit 5")
        async with fixture.child(ATTACH, id=box.id, job=job.id, mark=f"{tmp}/mark") as process:
            assert process.stdout is not None
            said = await asyncio.wait_for(process.stdout.read(), 45)
        check(b'"mark": "seen"' in said and b'"code": 5' in said, f"the second process saw {said!r}")
        check(await box.alive(), "detaching a second process killed the sandbox")


@case("C9", "refuses to attach to what does not exist", needs=("attach",))
async def attach_unknown(fixture: SandboxFixture) -> None:
    error = await raises(Error, fixture.backend.attach("sbx_0000000000000000000000000"), "attach to an unknown id")
    check("sbx_0000000000000000000000000" in str(error), f"the error does not name the id: {error}")


@case("C10", "leaves nothing when opening is cancelled", needs=("list",))
async def cancelled_open(fixture: SandboxFixture) -> None:
    spec = fixture.make_spec()
    for delay in (0.0, 0.001, 0.005, 0.02):
        opening = asyncio.ensure_future(_open(fixture, spec))
        await anyio.sleep(delay)
        opening.cancel()
        try:
            await (await opening).kill()
        except asyncio.CancelledError:
            continue
    await eventually(lambda: _lists_none(fixture, spec.labels), within=20, why="a cancelled open left a sandbox")


@case("C11", "leaves nothing when its process gets Ctrl-C", needs=("list",))
async def interrupted_process(fixture: SandboxFixture) -> None:
    spec = fixture.make_spec()
    async with fixture.child(CHILD, spec=msgspec.to_builtins(spec), stay=True) as process:
        assert process.stdout is not None
        check(await asyncio.wait_for(process.stdout.readline(), 45), "the other process opened no sandbox")
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), 30)
    await eventually(lambda: _lists_none(fixture, spec.labels), within=20, why="a sandbox outlived Ctrl-C")


@case("C12", "leaves nothing for long after its process is killed", needs=("list",))
async def killed_process(fixture: SandboxFixture) -> None:
    spec = fixture.make_spec()
    async with fixture.child(CHILD, spec=msgspec.to_builtins(spec), stay=True) as process:
        assert process.stdout is not None
        check(await asyncio.wait_for(process.stdout.readline(), 45), "the other process opened no sandbox")
        process.kill()
        await process.wait()
        await fixture.backend.reap(spec.labels)
    await eventually(lambda: _lists_none(fixture, spec.labels), within=20, why="a sandbox outlived SIGKILL and reap")


@case("C13", "keeps a lifetime='ttl' sandbox when its opener ends", needs=("lifetime_ttl", "attach", "list"))
async def lifetime_ttl(fixture: SandboxFixture) -> None:
    spec = fixture.make_spec(lifetime="ttl", ttl_s=120.0)
    async with fixture.child(CHILD, spec=msgspec.to_builtins(spec), stay=False) as process:
        assert process.stdout is not None
        sandbox_id = (await asyncio.wait_for(process.stdout.readline(), 45)).decode().strip()
        await asyncio.wait_for(process.wait(), 30)
    box = await fixture.backend.attach(sandbox_id)
    try:
        check(await out(box, "echo on") == "on", "the sandbox does not answer after its opener ended")
    finally:
        check(await box.kill() is True, "killing it from here did nothing")
    await eventually(lambda: _lists_none(fixture, spec.labels), within=10, why="listed after it was killed")


@case("C14", "reaps by label and age, and nothing else", needs=("list",))
async def reap(fixture: SandboxFixture) -> None:
    mine, other = fixture.make_spec(), fixture.make_spec()
    async with fixture.backend.open(other) as bystander:
        box = await fixture.backend.open(mine)
        check(box.id not in await fixture.backend.reap(mine.labels, older_than=3600), "a young sandbox was reaped")
        check(await box.alive(), "a young sandbox was killed")
        reaped = await fixture.backend.reap(mine.labels)
        check(box.id in reaped and bystander.id not in reaped, f"reap by label returned {reaped}")
        check(not await box.alive(), "a reaped sandbox is alive")
        check(await bystander.alive(), "reap killed a sandbox with other labels")
        await box.kill()


@case("C15", "opens many at once that share nothing", timeout=180)
async def parallel(fixture: SandboxFixture) -> None:
    count = min(fixture.parallel, fixture.can.max_concurrent or fixture.parallel)
    ids: dict[str, str] = {}

    async def one(n: int) -> None:
        async with fixture.open(env={"NUMBER": str(n)}) as box:
            tmp = await scratch(box)
            await box.write(f"{tmp}/number", str(n))
            await anyio.sleep(0.05)
            ids[box.id] = await out(box, f'echo "$NUMBER $(cat {tmp}/number) $(ls {tmp} | wc -l)"')

    async with anyio.create_task_group() as group:
        for n in range(count):
            group.start_soon(one, n)
    wanted = {f"{n} {n} 1" for n in range(count)}
    check(len(ids) == count and set(ids.values()) == wanted, f"{count} sandboxes saw {sorted(ids.values())}")


@case("C16", "kills the sandbox when its `async with` is left, also by an error")
async def left_by_error(fixture: SandboxFixture) -> None:
    kept: list[Sandbox] = []
    try:
        async with fixture.open() as box:
            kept.append(box)
            raise KeyError("from the body")
    except KeyError:
        pass
    check(not await kept[0].alive(), "alive after its block was left")


@case("C17", "says what it is: id, image, isolation, labels, times")
async def info(fixture: SandboxFixture) -> None:
    spec = fixture.make_spec()
    before = time.time()
    async with fixture.backend.open(spec) as box:
        got = box.info
        check(got.id == box.id and got.id, f"info.id is {got.id!r}, the sandbox's is {box.id!r}")
        check(got.isolation == fixture.can.isolation, f"isolation is {got.isolation}, promised {fixture.can.isolation}")
        check(dict(got.labels) == dict(spec.labels), f"labels came back as {got.labels}")
        check(before - 60 <= got.created_at <= time.time() + 60, f"created_at is {got.created_at}")


@case("C18", "ends every program and keeps the files with kill_processes")
async def kill_processes(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        await box.write(f"{tmp}/kept", "yes")
        job = await box.start(hearts(f"{tmp}/beats"))
        await eventually(lambda: all_beat(box, f"{tmp}/beats"), within=10, why="the three programs did not all start")
        await box.kill_processes()
        check((await job.wait(20)).exit_code != 0, "the job ended well although it was killed")
        await eventually(lambda: none_beats(box, f"{tmp}/beats"), within=10, why="programs survived kill_processes")
        check(await box.read_text(f"{tmp}/kept") == "yes", "a file is gone")


async def _open(fixture: SandboxFixture, spec: SandboxSpec) -> Sandbox:
    return await fixture.backend.open(spec)


async def _is_dead(box: Sandbox) -> bool:
    return not await box.alive()


async def _lists_none(fixture: SandboxFixture, labels: Mapping[str, str]) -> bool:
    return await fixture.backend.list(labels) == []
