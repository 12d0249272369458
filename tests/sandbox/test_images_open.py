"""Images, layers and snapshots as a sandbox sees them: opened by the local backend, run, frozen, opened again."""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile

import pytest

from rollyard.core.errors import UnknownName
from rollyard.core.sandbox import SandboxSpec
from rollyard.images.layers import layer_prefix
from rollyard.images.oci import ImageConfig
from rollyard.sandbox import backend

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("layers")]
BUSYBOX = next((path for path in ("/bin/busybox", "/usr/bin/busybox") if os.path.exists(path)), None)
needs_busybox = pytest.mark.skipif(BUSYBOX is None, reason="no busybox here (apt-get install busybox-static)")


@pytest.fixture
async def local(tmp_path):
    async with backend("local", root=tmp_path / "home") as opened:
        yield opened


@pytest.fixture
async def shared():
    """A backend on the store that lasts from run to run: its layers are built once."""
    async with backend("local") as opened:
        yield opened


@pytest.fixture(scope="session")
def busybox_image(tmp_path_factory):
    """A `docker save` archive of two layers: a tiny system, then one that removes a file and adds a user."""
    place = tmp_path_factory.mktemp("busybox")
    base = io.BytesIO()
    with tarfile.open(fileobj=base, mode="w") as archive:
        for directory in ("bin", "etc", "proc", "dev", "tmp", "sys", "home", "app", "usr", "root", "run", "var"):
            info = tarfile.TarInfo(directory)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if directory == "tmp" else 0o755
            archive.addfile(info)
        archive.add(os.path.realpath(BUSYBOX), "bin/busybox")
        for name in ("sh", "cat", "ls", "id", "echo", "stat", "sleep", "pwd", "rm", "env", "touch", "true"):
            info = tarfile.TarInfo(f"bin/{name}")
            info.type, info.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(info)
        add(archive, "etc/gone", b"lower")
        add(archive, "etc/passwd", b"root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/home:/bin/sh\n")
    top = io.BytesIO()
    with tarfile.open(fileobj=top, mode="w") as archive:
        add(archive, "etc/.wh.gone", b"")
        add(archive, "app/mine", b"1000's", uid=1000)
    layers = [base.getvalue(), top.getvalue()]
    config = json.dumps({
        "config": {"Env": ["PATH=/bin", "FROM=image"], "WorkingDir": "/app", "User": ""},
        "rootfs": {"diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]},
    }).encode()  # fmt: skip
    names = ["one/layer.tar", "two/layer.tar"]
    manifest = json.dumps([{"Config": "c.json", "RepoTags": ["busybox:test"], "Layers": names}]).encode()
    with tarfile.open(place / "save.tar", "w") as archive:
        for name, data in [
            *zip(names, map(gzip.compress, layers), strict=True),
            ("c.json", config),
            ("manifest.json", manifest),
        ]:
            add(archive, name, data)
    return place / "save.tar"


def add(archive, name, data, uid=0, mode=0o644):
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.uid, info.gid = len(data), mode, uid, uid
    archive.addfile(info, io.BytesIO(data))


async def out(box, script, **options):
    done = await box.exec(["sh", "-c", script], timeout=30, **options)
    assert done.exit_code == 0, done.text
    return done.stdout.decode().strip()


@needs_busybox
async def test_a_docker_save_archive_opens_with_its_settings_and_removals(local, busybox_image):
    async with local.open(SandboxSpec(image=str(busybox_image))) as box:
        assert await out(box, "pwd; echo $FROM; cat mine") == "/app\nimage\n1000's"
        assert not await box.exists("/etc/gone")
        assert await out(box, "ls /usr") == ""  # nothing of this machine
    async with local.open(SandboxSpec(image="busybox:test")) as box:
        assert await out(box, "id -u") == "0"


@needs_busybox
@pytest.mark.skipif(os.geteuid() != 0, reason="owners in an image need root on the host")
async def test_owners_in_an_image_are_what_the_archive_says(local, busybox_image):
    async with local.open(SandboxSpec(image=str(busybox_image))) as box:
        assert await out(box, "stat -c %u mine; stat -c %u /bin/busybox") == "1000\n0"
        assert await out(box, "echo more >> mine; cat mine", user="app")


@needs_busybox
async def test_a_directory_image_opens_and_is_not_written_to(local, tmp_path):
    root = tmp_path / "rootfs"
    for name in ("bin", "proc", "dev", "tmp", "etc"):
        (root / name).mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "bin/busybox")
    (root / "bin/sh").symlink_to("busybox")
    async with local.open(SandboxSpec(image=str(root))) as box:
        assert await out(box, "echo inside > /etc/new; busybox cat /etc/new", env={"PATH": "/bin"}) == "inside"
    assert not (root / "etc/new").exists()


@needs_busybox
async def test_a_layer_runs_in_an_image_that_has_glibc_and_nothing_else(shared, tmp_path):
    """Its Python, Node and the libraries of both come along: here there is no libssl, libffi, libz or libstdc++."""
    root = tmp_path / "rootfs"
    for name in ("bin", "proc", "dev", "tmp", "etc", "opt", "lib64"):
        (root / name).mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "bin/busybox")
    (root / "bin/sh").symlink_to("busybox")
    for path in glibc_files():
        (root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, root / path.lstrip("/"))
        (root / path.lstrip("/")).chmod(0o755)
    pip = await shared.images.layer(pip=["packaging==24.2"])
    npm = await shared.images.layer(npm=["semver@7.6.3"])
    async with shared.open(SandboxSpec(image=str(root), layers=(pip, npm))) as box:
        code = "import ssl, ctypes, sqlite3, zlib, packaging; print(packaging.__version__)"
        done = await box.exec([f"{layer_prefix(pip)}/bin/python3", "-c", code], timeout=60)
        assert done.stdout == b"24.2\n", done.text
        done = await box.exec([f"{layer_prefix(npm)}/bin/semver", "1.2.3"], timeout=60)
        assert done.stdout == b"1.2.3\n", done.text


def glibc_files():
    """The loader and glibc's own libraries, as this machine's Python finds them."""
    out = subprocess.run(["ldd", os.path.realpath(sys.executable)], capture_output=True, text=True, check=True).stdout
    loader = re.search(r"(/\S*ld-linux\S*) ", out)[1]
    directory = os.path.dirname(re.search(r"libc\.so\.6 => (\S+)", out)[1])
    names = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1", "libresolv.so.2")
    return [loader, *(f"{directory}/{name}" for name in names if os.path.exists(f"{directory}/{name}"))]


async def test_fifty_snapshots_deep_still_opens_with_every_step(local):
    image = "host"
    for n in range(52):
        async with local.open(SandboxSpec(image=image)) as box:
            await box.write(f"/srv/steps/{n}", str(n))
            if n:
                await box.remove(f"/srv/steps/{n - 1}")
            image = await box.snapshot()
    async with local.open(SandboxSpec(image=image)) as box:
        assert await out(box, "ls /srv/steps") == "51"


async def test_what_a_build_left_in_a_sandbox_becomes_an_image_with_its_own_settings(local, tmp_path):
    async with local.open(SandboxSpec()) as box:
        await box.write("/app/built", "yes")
        snap = await box.snapshot()
    (tmp_path / "empty").mkdir()
    image = await local.images.commit(
        snap, {"/": tmp_path / "empty"}, config=ImageConfig(workdir="/app", env={"BUILT": "1"})
    )
    async with local.open(SandboxSpec(image=image)) as box:
        assert await out(box, "pwd; echo $BUILT; cat built") == "/app\n1\nyes"


async def test_an_image_that_was_removed_does_not_open(local, tmp_path):
    async with local.open(SandboxSpec()) as box:
        snap = await box.snapshot()
    await local.images.remove(snap)
    with pytest.raises(UnknownName):
        async with local.open(SandboxSpec(image=snap)):
            pass


@pytest.mark.adversarial
async def test_a_sandbox_cannot_change_a_layer_or_the_host_for_others(shared):
    layer = await shared.images.layer(npm=["semver@7.6.3"])
    program = f"{layer_prefix(layer)}/bin/semver"
    async with shared.open(SandboxSpec(layers=(layer,))) as box:
        await box.exec(
            ["sh", "-c", f"rm -rf {layer_prefix(layer)}; rm -f /usr/bin/env; echo x > /etc/passwd"], timeout=30
        )
    assert await shared.images.layers.verify(layer) == []
    assert os.path.exists("/usr/bin/env")
    async with shared.open(SandboxSpec(layers=(layer,))) as box:
        assert (await box.exec([program, "1.2.3"], timeout=30)).stdout == b"1.2.3\n"


@pytest.mark.slow
@pytest.mark.agent
async def test_codex_starts_from_its_layer_as_root_and_as_a_user(shared):
    layer = await shared.images.layer(npm=["@openai/codex@0.166.0"])
    async with shared.open(SandboxSpec(layers=(layer,))) as box:
        for user in (None, "agent") if shared.capabilities.users else (None,):
            done = await box.exec([f"{layer_prefix(layer)}/bin/codex", "--version"], user=user, timeout=60)
            assert b"0.166.0" in done.stdout, done.text
