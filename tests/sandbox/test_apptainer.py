"""Images of the apptainer backend, with a real Apptainer: an archive of Docker's and a SIF file are unpacked once, and bring their
environment."""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.sandbox import backend
from tests.sandbox import sshd

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("apptainer") is None, reason="no Apptainer here"),
    pytest.mark.skipif(shutil.which("busybox") is None, reason="no busybox to make an image of"),
]
PROGRAMS = "sh cat base64 mkdir chmod tail cut wc head dirname echo rm mv find grep sleep env umount rmdir".split()


def pack_image(place: Path) -> Path:
    """A small image as `docker save` writes it."""
    root, layer, archive = place / "root", io.BytesIO(), place / "image.tar"
    for name in ("bin", "usr/bin", "etc", "proc", "dev", "sys", "root", "tmp", "var/tmp"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    shutil.copy(shutil.which("busybox"), root / "bin" / "busybox")
    for name in PROGRAMS:
        (root / "bin" / name).symlink_to("busybox")
    (root / "usr/bin/env").symlink_to("../../bin/env")
    (root / "etc/marker").write_text("from the archive")
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(root, arcname=".")
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "COLOUR=blue sky"], "Cmd": ["/bin/sh"]}
    layers = {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
    about = json.dumps({"architecture": "amd64", "os": "linux", "config": config, "rootfs": layers}).encode()
    manifest = [{"Config": "config.json", "RepoTags": ["mine:1"], "Layers": [f"{digest}.tar"]}]
    files = {f"{digest}.tar": layer.getvalue(), "config.json": about, "manifest.json": json.dumps(manifest).encode()}
    with tarfile.open(archive, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return archive


async def test_an_archive_and_a_sif_file_are_unpacked_once_and_bring_their_environment():
    with sshd.machine_folder() as folder:
        place = Path(folder).parent / "images"
        place.mkdir(mode=0o755)
        archive, sif = f"docker-archive:{pack_image(place)}", place / "image.sif"
        subprocess.run(["apptainer", "-q", "build", sif, archive], check=True, capture_output=True)
        async with backend("apptainer", folder=folder) as made:
            for image in (archive, archive, str(sif)):
                async with made.open(ry.SandboxSpec(image=image, boot_s=120)) as box:
                    done = await box.exec("cat /etc/marker; echo :$COLOUR; echo x >/etc/new; cat /etc/new", timeout=60)
                    assert done.stdout == b"from the archive:blue sky\nx\n"
            unpacked = [one.name for one in Path(folder).glob("unpacked-*")]
            assert len(unpacked) == 2 and not any("." in name for name in unpacked)
            with pytest.raises(ConfigError, match=r"no-such\.sif"):
                await made.open(ry.SandboxSpec(image=f"{place}/no-such.sif"))
