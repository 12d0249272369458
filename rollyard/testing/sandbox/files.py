"""Files: what is written is read back, what fails says why, and no path leads out of the sandbox."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import anyio

from rollyard.core.errors import Error, PathError
from rollyard.core.sandbox import Resources
from rollyard.testing.sandbox.fixture import SandboxFixture, out, raises, scratch, sh
from rollyard.testing.suite import Skip, case, check

ODD_NAMES = ("a b", "quote'\"", "new\nline", "-dash", "ünï日", "$(x)", "*", "back\\slash", ".hidden", "tab\t")


@case("F1", "keeps text with any characters")
async def text(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        words = "ünï 日本 \U0001f600\r\n\ttab\n\n"
        await box.write(f"{tmp}/t", words)
        check(await box.read_text(f"{tmp}/t") == words, "text is not what was written")
        check(await box.read(f"{tmp}/t") == words.encode(), "bytes are not the text in UTF-8")


@case("F2", "keeps every byte", needs=("bytes_exact",))
async def every_byte(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        for data in (b"", bytes(range(256)), b"\0" * 5000, b"no newline"):
            await box.write(f"{tmp}/b", data)
            check(await box.read(f"{tmp}/b") == data, f"{len(data)} bytes are not what was written")


@case("F3", "makes missing parents")
async def parents(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        await box.write(f"{tmp}/one/two/three/f", "x")
        check(await out(box, f"cat {tmp}/one/two/three/f") == "x", "parents were not made")
        await box.mkdir(f"{tmp}/x/y/z")
        await box.mkdir(f"{tmp}/x/y/z")
        check((await box.stat(f"{tmp}/x/y/z")).kind == "dir", "mkdir did not make a directory")


@case("F4", "leaves nothing of a longer file it overwrites")
async def overwrite(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        await box.write(f"{tmp}/f", "long " * 1000)
        await box.write(f"{tmp}/f", "short")
        check(await box.read(f"{tmp}/f") == b"short", "the old end is still there")


@case("F5", "names a missing path in a typed error")
async def missing(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        for call in (box.read, box.stat, box.list_dir, box.read_text, box.remove):
            error = await raises(PathError, call(f"{tmp}/not/there"), f"{call.__name__} of a missing path")
            named = f"{tmp}/not/there" in str(error) and "ENOENT" in str(error)
            check(named, f"{call.__name__}: the error does not say what is missing: {error}")


@case("F6", "answers exists for files, directories, links and dangling links")
async def exists(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        await out(box, f"mkdir {tmp}/d; echo x > {tmp}/f; ln -s {tmp}/f {tmp}/l; ln -s /nowhere {tmp}/dangling")
        seen = {name: await box.exists(f"{tmp}/{name}") for name in ("d", "f", "l", "dangling", "nothing")}
        check(seen == {"d": True, "f": True, "l": True, "dangling": False, "nothing": False}, f"exists gave {seen}")


@case("F7", "carries 64 MiB in and out", timeout=180)
async def large(fixture: SandboxFixture) -> None:
    data = os.urandom(1 << 20) * 64
    async with fixture.open() as box:
        tmp = await scratch(box)
        await box.write(f"{tmp}/large", data)
        check(await out(box, f"wc -c < {tmp}/large") == str(len(data)), "the size inside is wrong")
        check(await box.read(f"{tmp}/large", max_bytes=len(data)) == data, "64 MiB did not come back as they went in")


@case("F8", "takes odd names")
async def odd_names(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        for name in ODD_NAMES:
            await box.write(f"{tmp}/odd/{name}", name)
            check(await box.read_text(f"{tmp}/odd/{name}") == name, f"{name!r} cannot be read back")
        listed = {Path(stat.path).name for stat in await box.list_dir(f"{tmp}/odd")}
        check(listed == set(ODD_NAMES), f"list_dir shows {sorted(listed)}")
        for name in ODD_NAMES:
            await box.remove(f"{tmp}/odd/{name}")
        check(await box.list_dir(f"{tmp}/odd") == [], "some could not be removed")


@case("F9", "sets and shows the mode, and what it writes can run")
async def mode(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        await box.write(f"{tmp}/run", "#!/bin/sh\necho ran\n", mode=0o755)
        check((await box.stat(f"{tmp}/run")).mode & 0o777 == 0o755, "the mode is not what was asked for")
        check(await out(box, f"{tmp}/run") == "ran", "an executable file does not run")
        await box.write(f"{tmp}/secret", "x", mode=0o600)
        check(await out(box, f"stat -c %a {tmp}/secret") == "600", "mode 600 is not kept")


@case("F10", "carries a directory in and out: empty directories, links, modes, odd names")
async def directories(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        with tempfile.TemporaryDirectory() as host:
            source, target = Path(host, "in"), Path(host, "out")
            (source / "empty").mkdir(parents=True)
            (source / "sub").mkdir()
            (source / "sub/f'\n x").write_bytes(b"\0\xff")
            (source / "run.sh").write_text("#!/bin/sh\necho hi\n")
            (source / "run.sh").chmod(0o755)
            (source / "link").symlink_to("run.sh")
            await box.upload_dir(str(source), f"{tmp}/up")
            check(await out(box, f"{tmp}/up/link") == "hi", "the uploaded program does not run through its link")
            check(await out(box, f"ls -A {tmp}/up/empty | wc -l") == "0", "the empty directory is missing")
            await box.download_dir(f"{tmp}/up", str(target))
            check((target / "sub/f'\n x").read_bytes() == b"\0\xff", "a file did not come back")
            check((target / "empty").is_dir(), "the empty directory did not come back")
            check((target / "link").is_symlink() and os.access(target / "run.sh", os.X_OK), "link or mode is lost")


@case("F11", "refuses to read more than asked for")
async def read_limit(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        await box.write(f"{tmp}/f", b"x" * 5000)
        check(len(await box.read(f"{tmp}/f", max_bytes=5000)) == 5000, "exactly max_bytes cannot be read")
        await raises(Error, box.read(f"{tmp}/f", max_bytes=4999), "a file larger than max_bytes")


@case("F12", "follows planted links inside, never to the host")
async def no_escape(fixture: SandboxFixture) -> None:
    if fixture.can.isolation == "none":
        raise Skip("isolation 'none' promises nothing about the host's files")
    async with fixture.open() as box:
        tmp = await scratch(box)
        with tempfile.TemporaryDirectory() as host:
            victim = Path(host, "victim")
            victim.write_text("host")
            await out(
                box, f"ln -s {victim} {tmp}/l; ln -s {host} {tmp}/d; ln -s ../../../../../../../..{victim} {tmp}/r"
            )
            for path in (f"{tmp}/l", f"{tmp}/d/victim", f"{tmp}/r", f"/../../../../..{victim}"):
                try:
                    await box.write(path, "changed")
                    await box.read(path)
                except Error:
                    continue
            check(victim.read_text() == "host", "a host file was overwritten through a link")
            await out(box, f"mkdir -p {tmp}/tree; ln -s {host} {tmp}/tree/evil")
            target = Path(host, "down")
            await box.download_dir(f"{tmp}/tree", str(target))
            check(not (target / "evil/victim").exists() or (target / "evil").is_symlink(), "download followed a link")
            (Path(host) / "up").mkdir()
            (Path(host) / "up/f").write_text("inside")
            try:
                await box.upload_dir(str(Path(host) / "up"), f"{tmp}/d/sub")
            except Error:
                return
            check(not Path(host, "sub").exists(), "upload through a link reached the host")


@case("F13", "fails a write to a full disk with ENOSPC and lives on", needs=("disk_limit",), timeout=120)
async def disk_full(fixture: SandboxFixture) -> None:
    async with fixture.open(disk="tmpfs", resources=Resources(disk_mb=32)) as box:
        tmp = await scratch(box)
        filled = await sh(box, "head -c 200000000 /dev/zero > /fill; stat -c %s /fill", timeout=60)
        check(filled.exit_code == 0 and int(filled.stdout) < 64 << 20, f"200 MB fit into 32: {filled.text[-200:]}")
        error = await raises(PathError, box.write("/more", b"x" * (8 << 20)), "a write to a full disk")
        check("ENOSPC" in str(error), f"the error does not say ENOSPC: {error}")
        await out(box, "rm -f /fill /more")
        await box.write(f"{tmp}/after", "ok")


@case("F14", "lists a directory with kinds and sizes")
async def list_dir(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        await out(box, f"mkdir -p {tmp}/t/sub; printf 12345 > {tmp}/t/f; ln -s f {tmp}/t/l")
        seen = {Path(stat.path).name: (stat.kind, stat.target) for stat in await box.list_dir(f"{tmp}/t")}
        check(seen == {"sub": ("dir", None), "f": ("file", None), "l": ("symlink", "f")}, f"list_dir shows {seen}")
        check((await box.stat(f"{tmp}/t/f")).size == 5, "the size is wrong")


@case("F15", "removes files and whole directories, and links without what they point to")
async def remove(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        await out(
            box, f"mkdir -p {tmp}/t/sub/deep {tmp}/keep; touch {tmp}/t/sub/f {tmp}/keep/f; ln -s {tmp}/keep {tmp}/t/l"
        )
        await box.remove(f"{tmp}/t")
        check(not await box.exists(f"{tmp}/t"), "the directory is still there")
        check(await box.exists(f"{tmp}/keep/f"), "removing a link removed what it points to")


@case("F16", "refuses to read a binary file as text, by name")
async def binary_as_text(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        await box.write(f"{tmp}/b", b"\xff\xfe\x00\x80")
        await raises((Error, UnicodeDecodeError), box.read_text(f"{tmp}/b"), "read_text of bytes that are no text")


@case("F17", "gives files to the user asked for", needs=("users",))
async def owner(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        await box.write(f"{tmp}/mine", "x", user="1000")
        check(await out(box, f"stat -c %u {tmp}/mine") == "1000", "the owner is not the user asked for")
        check(await out(box, f"cat {tmp}/mine", user="1000") == "x", "its owner cannot read it")


@case("F18", "writes many files at once without mixing them")
async def concurrent(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        async with anyio.create_task_group() as group:
            for n in range(20):
                group.start_soon(box.write, f"{tmp}/many/{n}", f"content {n}")
        seen = await out(box, f"cat {tmp}/many/* | sort | uniq | wc -l")
        listed = await box.list_dir(f"{tmp}/many")
        check(
            len(listed) == 20 and all([await box.read_text(s.path) for s in listed]),
            f"{len(listed)} files, {seen} lines",
        )
