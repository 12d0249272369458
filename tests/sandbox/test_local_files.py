"""Files of a local sandbox from the host: exact bytes, typed errors, and no path that leads outside."""

from __future__ import annotations

import os

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, PathError

pytestmark = pytest.mark.anyio


async def test_bytes_text_parents_and_overwriting(box):
    await box.write("/new/deep/file", bytes(range(256)))
    assert await box.read("/new/deep/file") == bytes(range(256))
    await box.write("/new/deep/file", "é")
    assert await box.read_text("/new/deep/file") == "é"
    assert (await box.stat("/new/deep/file")).size == 2


async def test_relative_paths_start_at_the_working_directory(box):
    await box.write("here.txt", "x")
    assert (await box.exec("pwd; ls", timeout=10)).stdout == b"/workspace\nhere.txt\n"


async def test_modes_owners_and_odd_names(box):
    name = "/tmp/ a'b\"\n-é"
    await box.write(name, "#!/bin/sh\necho ran\n", mode=0o700, user="agent")
    assert (await box.exec([name], user="agent", timeout=10)).stdout == b"ran\n"
    assert [entry.path for entry in await box.list_dir("/tmp")] == [name]
    assert (await box.stat(name)).mode == 0o700


async def test_large_files_go_both_ways(box):
    data = os.urandom(2**20) * 20
    await box.write("/tmp/big", data)
    assert await box.read("/tmp/big") == data
    with pytest.raises(PathError) as error:
        await box.read("/tmp/big", max_bytes=1000)
    assert error.value.errno_name == "EFBIG"


async def test_what_cannot_be_read_or_written_is_a_typed_error(box):
    async def name_of(call) -> str:
        with pytest.raises(PathError) as error:
            await call
        assert error.value.hint
        return error.value.errno_name

    await box.write("/tmp/binary", b"\xff\xfe")
    assert await name_of(box.read("/missing")) == "ENOENT"
    assert await name_of(box.read("/tmp")) == "EISDIR"
    assert await name_of(box.read_text("/tmp/binary")) == "EILSEQ"
    assert await name_of(box.stat("/missing")) == "ENOENT"
    assert await name_of(box.list_dir("/missing")) == "ENOENT"
    assert await name_of(box.remove("/missing")) == "ENOENT"
    assert await name_of(box.write("/tmp/binary/below", b"")) == "ENOTDIR"
    assert await name_of(box.read("")) == "EINVAL"


async def test_a_full_disk_raises(backend):
    spec = ry.SandboxSpec(disk="tmpfs", resources=ry.Resources(disk_mb=8))
    async with backend.open(spec) as box:
        with pytest.raises(PathError) as error:
            await box.write("/tmp/big", bytes(16 * 2**20))
        assert error.value.errno_name == "ENOSPC"
        assert (await box.exec("head -c 16M /dev/zero > /usr/big", timeout=20)).exit_code == 1


async def test_directories_go_both_ways_with_links_modes_and_empty_ones(box, tmp_path):
    source = tmp_path / "source"
    (source / "sub/empty").mkdir(parents=True)
    (source / "sub/tool").write_bytes(b"\x00\x01")
    (source / "sub/tool").chmod(0o755)
    (source / "link").symlink_to("/etc/passwd")
    await box.upload_dir(str(source), "/in", user="agent")
    listing = await box.exec("stat -c '%A %U %n' /in/sub/tool; readlink /in/link; ls -d /in/sub/empty", timeout=10)
    assert listing.stdout == b"-rwxr-xr-x agent /in/sub/tool\n/etc/passwd\n/in/sub/empty\n"
    await box.download_dir("/in", str(tmp_path / "back"))
    assert (tmp_path / "back/sub/tool").read_bytes() == b"\x00\x01"
    assert os.access(tmp_path / "back/sub/tool", os.X_OK) and (tmp_path / "back/sub/empty").is_dir()
    assert os.readlink(tmp_path / "back/link") == "/etc/passwd"


async def test_a_directory_transfer_that_cannot_be_done_says_why(box, tmp_path):
    with pytest.raises(ConfigError):
        await box.upload_dir(str(tmp_path / "missing"), "/in")
    with pytest.raises(PathError) as missing:
        await box.download_dir("/missing", str(tmp_path / "out"))
    await box.write("/data/big", bytes(100_000))
    with pytest.raises(PathError) as large:
        await box.download_dir("/data", str(tmp_path / "out"), max_bytes=1000)
    assert (missing.value.errno_name, large.value.errno_name) == ("ENOENT", "EFBIG")


async def test_ten_thousand_files_are_listed_downloaded_and_removed(box, tmp_path):
    await box.exec("mkdir /many && cd /many && seq 10000 | xargs touch", timeout=60)
    assert len(await box.list_dir("/many")) == 10_000
    await box.download_dir("/many", str(tmp_path / "many"))
    assert len(list((tmp_path / "many").iterdir())) == 10_000
    await box.remove("/many")
    assert not await box.exists("/many")


async def test_small_directories_are_moved_and_removed_without_a_process_inside(box, tmp_path):
    few = tmp_path / "few" / "a"
    few.mkdir(parents=True)
    (few / "b").write_bytes(b"x" * 70_000)
    counter = await box.start("while read -r line; do sh -c 'echo $$'; done", stdin=True)
    pids = counter.stream()
    await counter.write(b"\n")
    _, first = await anext(pids)
    await box.upload_dir(str(few.parent), "/few")
    assert await box.download_dir("/few", str(tmp_path / "back")) == 0
    await box.remove("/few/a/b")
    await box.remove("/few")
    await counter.write(b"\n")
    _, second = await anext(pids)
    assert int(second) == int(first) + 1
    assert (tmp_path / "back" / "a" / "b").read_bytes() == b"x" * 70_000
    assert not await box.exists("/few")


@pytest.mark.adversarial
async def test_planted_links_never_lead_the_host_outside(box, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    await box.exec(["ln", "-s", str(victim), "/workspace/link"], timeout=10)
    await box.exec(["ln", "-s", str(tmp_path), "/workspace/dir"], timeout=10)
    with pytest.raises(PathError):
        await box.write("/workspace/link", "nowhere")
    await box.mkdir(str(tmp_path))
    await box.write("/workspace/link", "inside")
    await box.write("/workspace/dir/victim", "inside too")
    assert await box.read(str(victim)) == b"inside too" and victim.read_text() == "untouched"
    await box.download_dir("/workspace", str(tmp_path / "out"))
    assert (tmp_path / "out/link").is_symlink() and victim.read_text() == "untouched"


@pytest.mark.adversarial
async def test_a_download_does_not_write_through_a_link_it_just_made(box, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    await box.exec(["ln", "-s", str(outside), "/workspace/a"], timeout=10)
    await box.download_dir("/workspace", str(tmp_path / "out"))
    await box.exec("rm a; mkdir a; echo x > a/file", timeout=10)
    await box.download_dir("/workspace", str(tmp_path / "out"))
    assert list(outside.iterdir()) == [] and (tmp_path / "out/a/file").read_text() == "x\n"


@pytest.mark.adversarial
async def test_the_host_is_never_handed_a_device_a_pipe_or_a_file_of_proc(box):
    await box.exec("mkfifo pipe; ln -s /proc/self/mem mem; ln -s /proc/1/environ env; ln -s /dev/zero zero", timeout=10)
    for name in ("pipe", "mem", "env", "zero"):
        with pytest.raises(PathError):
            await box.read(name)
        with pytest.raises(PathError):
            await box.write(name, b"x")
    assert await box.alive()
