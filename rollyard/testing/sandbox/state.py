"""State and parts: pause, snapshot, layers, mounts."""

from __future__ import annotations

import itertools
from pathlib import Path

import anyio

from rollyard.core.errors import Error, SandboxError
from rollyard.core.protocols import Job
from rollyard.core.sandbox import Mount
from rollyard.testing.sandbox.fixture import SandboxFixture, out, raises, sh
from rollyard.testing.suite import Skip, case, check

_PAUSE_S = 3
_LOOKS = 300
_LINE = len("1800000000\n")


async def _wait_for(job: Job, size: int) -> None:
    """Until it has said more than this, or it is late."""
    for _ in range(_LOOKS):
        if len(await job.tail(1 << 20)) > size:
            return
        await anyio.sleep(0.1)


@case("S1", "stops programs while paused and goes on with the same ones", needs=("pause",))
async def pause(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        job = await box.start("while :; do date +%s; sleep 0.1; done")
        await _wait_for(job, 0)
        await box.pause()
        await anyio.sleep(_PAUSE_S)  # nothing is asked of it meanwhile: not all of them answer
        await box.resume()
        before = len(await job.tail(1 << 20))
        await _wait_for(job, before + 2 * _LINE)
        ticks = [int(line) for line in (await job.tail(1 << 20)).split()]
        check(len(ticks) * _LINE > before, "a resumed program did not go on")
        gap = max(later - tick for tick, later in itertools.pairwise(ticks))
        check(gap >= _PAUSE_S - 1, f"a paused program went on: its ticks are at most {gap} s apart")
        await job.kill()


@case("S2", "opens from a snapshot with its files, and apart from it", needs=("snapshot",))
async def snapshot(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        await out(box, "mkdir -p /srv/state; echo one > /srv/state/f; rm -f /etc/issue")
        tool = False  # where nothing isolates /usr is the host's own, and without root it may be fixed
        if box.info.isolation != "none":
            tool = (await sh(box, "echo tool > /usr/local/bin/made")).exit_code == 0
        frozen = await box.snapshot()
        await out(box, "echo two > /srv/state/f")
        async with fixture.open(image=frozen) as copy:
            check(await out(copy, "cat /srv/state/f") == "one", "a file is not that of the snapshot")
            check(await copy.exists("/usr/local/bin/made") == tool, "a file under /usr is not that of the snapshot")
            check(not await copy.exists("/etc/issue"), "a removed file is back")
            await out(copy, "echo three > /srv/state/f")
        check(await out(box, "cat /srv/state/f") == "two", "a copy changed its origin")


@case("S3", "opens many from one snapshot that share nothing", needs=("snapshot",))
async def forks(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        await box.write("/srv/base", "base")
        frozen = await box.snapshot()
    async with fixture.open(image=frozen) as one, fixture.open(image=frozen) as two:
        await one.write("/srv/base", "one")
        check(await two.read_text("/srv/base") == "base", "a sibling sees the change")
    async with fixture.open(image=frozen) as three:
        check(await three.read_text("/srv/base") == "base", "the snapshot itself was changed")


@case("S4", "takes a snapshot of what came from a snapshot", needs=("snapshot",))
async def chain(fixture: SandboxFixture) -> None:
    image = fixture.spec.image
    for n in range(4):
        async with fixture.open(image=image) as box:
            await box.write(f"/srv/step{n}", str(n))
            image = await box.snapshot()
    async with fixture.open(image=image) as box:
        check(await out(box, "cat /srv/step*") == "0123", "a step is missing")


@case("S5", "shows a layer's programs, and one sandbox cannot change them for others", needs=("layers",), timeout=600)
async def layers(fixture: SandboxFixture) -> None:
    if fixture.layer is None:
        raise Skip("no layer was given to try")
    try:
        layer, program = await fixture.layer()
    except SandboxError as error:
        raise Skip(f"no layer could be built: {error}") from error
    async with fixture.open(layers=(layer,)) as box:
        done = await box.exec([program, "--version"], timeout=60)
        check(done.exit_code == 0, f"{program} ended with {done.exit_code}: {done.text[-300:]}")
        await sh(box, f"rm -f {program}")
    async with fixture.open(layers=(layer,)) as box:
        check(await box.exists(program), "one sandbox removed a layer's file for all")


@case("S6", "shows an allowed host directory, read-only unless asked", needs=("mounts",))
async def mounts(fixture: SandboxFixture) -> None:
    if fixture.mount is None:
        raise Skip("no host directory was given to mount")
    Path(fixture.mount, "from-host").write_text("seen")
    async with fixture.open(mounts=(Mount(local_dir="/mnt/data", remote_dir=fixture.mount),)) as box:
        check(await out(box, "cat /mnt/data/from-host") == "seen", "the host's file is not there")
        check((await sh(box, "echo x > /mnt/data/new")).exit_code != 0, "a read-only mount was written to")
    writable = Mount(local_dir="/mnt/data", remote_dir=fixture.mount, writable=True)
    async with fixture.open(mounts=(writable,)) as box:
        await out(box, "echo back > /mnt/data/from-sandbox")
    check(Path(fixture.mount, "from-sandbox").read_text() == "back\n", "a write did not reach the host")


@case("S7", "refuses a host directory that is not allowed")
async def mount_refused(fixture: SandboxFixture) -> None:
    async def attempt() -> None:
        async with fixture.open(mounts=(Mount(local_dir="/mnt/etc", remote_dir="/etc"),)):
            pass

    await raises(Error, attempt(), "a mount of the host's /etc")
