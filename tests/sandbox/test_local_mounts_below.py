"""Directories of the host with something mounted below them: a driver, a library, a disk.

Each test runs in a mount namespace of its own, over places that every Debian has, so that nothing of the machine changes: a
tmpfs at a directory of `/usr`, a file over a file of `/usr/lib`, one over a file of `/etc`. As root and as another user.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.images import mount_table
from tests.sandbox.test_local_ordinary_user import SINGLE, interpreter

DIRECTORY, LIBRARY, ETC = Path("/usr/local/games"), Path("/usr/lib/os-release"), Path("/etc/issue")
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount something for a test"),
    pytest.mark.skipif(
        not all(place.exists() for place in (DIRECTORY, LIBRARY, ETC)), reason="the places to mount at are Debian's"
    ),
]

OPEN = """
import asyncio, json, sys, rollyard as ry
LOOK = '''cat /usr/local/games/driver /usr/lib/os-release /etc/issue
echo x > /usr/local/games/driver || echo refused; touch /usr/local/games/new || echo refused
echo x >> /usr/lib/os-release || echo refused; ls /usr/bin | grep -cx env; echo kept > /workspace/kept
ls /usr/local/games/deep/proc; touch /usr/local/mine && echo writable'''
async def main():
    async with ry.sandbox.backend("local") as backend:
        got = {"level": backend.level, "error": backend.trial.error}
        async with backend.open(ry.SandboxSpec()) as box:
            done = await box.exec(LOOK, timeout=20)
            got["look"] = done.stdout.decode().split()
            image = await box.snapshot()
        async with backend.open(ry.SandboxSpec(image=image)) as fork:
            done = await fork.exec("cat /workspace/kept /usr/local/games/driver; ls /usr/local", timeout=20)
            got["fork"] = done.stdout.decode().split()
            again = await fork.snapshot()
        async with backend.open(ry.SandboxSpec(image=again, disk="tmpfs")) as fork:
            got["fork of the fork"] = (await fork.read("/usr/local/games/driver")).decode()
    print(json.dumps(got))
asyncio.run(main())
"""
DOCTOR = "import sys; sys.argv[1:] = ['doctor', '--json']; from rollyard.cli.main import main; main()"
MOUNT = f"""
set -e
mount --make-rprivate /
mount -t tmpfs none {DIRECTORY}
echo driver > {DIRECTORY}/driver
mkdir -p {DIRECTORY}/deep/proc
mount -t proc none {DIRECTORY}/deep/proc
echo library > "$HOME/y.so"; mount --bind "$HOME/y.so" {LIBRARY}
echo etc > "$HOME/z"; mount --bind "$HOME/z" {ETC}
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """Not below pytest's own directory, which no other user may enter."""
    with tempfile.TemporaryDirectory(prefix="ry-mounts-") as path:
        yield Path(path)


def run(uid: int, home: Path, code: str, *, mount: str = MOUNT) -> str:
    os.chown(home, uid, uid)
    packages = [str(Path(ry.__file__).parents[1]), *(path for path in sys.path if path.endswith("site-packages"))]
    env = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONPATH": ":".join(packages)}
    who = f"setpriv --reuid={uid} --regid={uid} --clear-groups {interpreter()}" if uid else sys.executable
    script = f'{mount}\nexec {who} -c "$0"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, code],
        env=env, capture_output=True, text=True, timeout=120, cwd="/", check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr[-3000:]
    return done.stdout


USERS = pytest.mark.parametrize("uid", [0, SINGLE], ids=["root", "another user"])


@USERS
def test_what_is_mounted_below_is_shown_read_only_and_sandboxes_open_run_and_fork(home, uid):
    got = json.loads(run(uid, home, OPEN))
    assert (got["level"] in ("full", "no_cgroups"), got["error"]) == (True, None)
    shown, writable = ["driver", "library", "etc", "refused", "refused", "refused", "1"], ["writable"]
    assert got["look"] == (shown if uid else [*shown, *writable])
    assert got["fork"][:2] == ["kept", "driver"] and ("mine" in got["fork"]) == (uid == 0)
    assert got["fork of the fork"] == "driver\n"


@USERS
def test_doctor_names_the_mounts_and_finds_the_backend_working(home, uid):
    rows = {row["name"]: row for row in json.loads(run(uid, home, DOCTOR))["findings"]}
    assert rows["local"]["state"] == "ok" and str(DIRECTORY) in rows["mounts"]["found"]
    assert ("as a whole" in rows["mounts"]["found"]) == (uid != 0)


@USERS
def test_dozens_of_bound_files_are_shown_too(home, uid):
    source = home / "from"
    source.write_text("bound\n")
    places = [path for path in sorted(Path("/usr/share/common-licenses").iterdir()) if not path.is_symlink()]
    terminfo = [path for path in sorted(Path("/usr/share/zoneinfo/Europe").glob("*")) if not path.is_symlink()]
    places += terminfo[:40]
    mount = "mount --make-rprivate /\n" + "".join(f"mount --bind {source} {place}\n" for place in places)
    code = f"""
import asyncio, rollyard as ry
async def main():
    async with ry.sandbox.backend("local") as backend, backend.open(ry.SandboxSpec()) as box:
        print((await box.exec({["cat", *map(str, places)]!r}, timeout=20)).stdout.decode())
asyncio.run(main())
"""
    assert run(uid, home, code, mount=mount).split() == ["bound"] * len(places)


def test_more_mounts_than_a_message_carries_leave_usr_read_only(home):
    """Root takes them one by one, up to a bound; beyond it the tree is shown as a whole."""
    source = home / "from"
    source.write_text("bound\n")
    places = [
        path for path in sorted(Path("/usr/share/zoneinfo").rglob("*")) if path.is_file() and not path.is_symlink()
    ]
    mount = "mount --make-rprivate /\n" + "".join(f"mount --bind {source} {place}\n" for place in places[:120])
    code = f"""
import asyncio, rollyard as ry
async def main():
    async with ry.sandbox.backend("local") as backend, backend.open(ry.SandboxSpec()) as box:
        print(backend.level, (await box.exec("cat {places[119]}; touch /usr/new || echo refused", timeout=20)).stdout)
asyncio.run(main())
"""
    assert run(0, home, code, mount=mount).endswith(" b'bound\\nrefused\\n'\n")


OPEN_IMAGE = """
import asyncio, os, rollyard as ry
from rollyard.core.errors import SandboxError
async def main():
    async with ry.sandbox.backend("local") as backend:
        try:
            async with backend.open(ry.SandboxSpec(image=os.environ["HOME"] + "/image", boot_s=2)):
                print("opened")
        except SandboxError as error:
            print(error)
asyncio.run(main())
"""


@USERS
def test_an_image_with_something_mounted_in_it_opens_for_root_and_names_it_for_others(home, uid):
    """Inside a user namespace a lower of an overlay can have no mounts: here one is in the way, and the error says which."""
    (home / "image/proc").mkdir(parents=True)
    said = run(uid, home, OPEN_IMAGE, mount='mount --make-rprivate /\nmount -t tmpfs none "$HOME/image/proc"')
    assert said == "opened\n" if uid == 0 else f"mounted below it: {home}/image/proc" in said


def test_an_image_that_changes_usr_is_refused_where_usr_can_only_be_bound(home):
    change = """
import asyncio, rollyard as ry
async def main():
    async with ry.sandbox.backend("local") as backend, backend.open(ry.SandboxSpec()) as box:
        await box.exec("touch /usr/changed", timeout=20)
        print(await box.snapshot())
asyncio.run(main())
"""
    image = run(0, home, change, mount="mount --make-rprivate /").strip()
    places = [
        path for path in sorted(Path("/usr/share/zoneinfo").rglob("*")) if path.is_file() and not path.is_symlink()
    ]
    many = "mount --make-rprivate /\n" + "".join(f"mount --bind /etc/issue {place}\n" for place in places[:120])
    said = run(0, home, OPEN_IMAGE.replace('os.environ["HOME"] + "/image"', repr(image)), mount=many)
    assert "/usr, which this image changes (mounted below it: /usr/share/zoneinfo/" in said and "and 117 more" in said


@USERS
def test_the_trial_is_made_again_when_mounts_change(home, uid):
    code = """
import json, pathlib, rollyard as ry
from rollyard.core.home import data_home
made = ry.sandbox.backend("local")
print(made.level, made.trial.error)
for place in data_home().glob("trial-*.json"):
    saved = json.loads(place.read_bytes())
    place.write_text(json.dumps({**saved, "trial": {**saved["trial"], "error": "remembered"}}))
"""
    plain = "mount --make-rprivate /"
    assert run(uid, home, code, mount=plain).endswith(" None\n")
    assert run(uid, home, code, mount=plain).endswith(" remembered\n")
    assert run(uid, home, code).endswith(" None\n")


def test_a_file_over_one_of_etc_is_copied_again_when_it_changes(home):
    """Below a directory of the list too, whose own time does not change when something is mounted in it."""
    code = """
import asyncio, rollyard as ry
async def main():
    async with ry.sandbox.backend("local") as backend, backend.open(ry.SandboxSpec()) as box:
        print((await box.read("/etc/skel/.profile")).decode() == "z\\n")
asyncio.run(main())
"""
    plain = "mount --make-rprivate /"
    assert run(0, home, code, mount=plain) == "False\n"
    bound = f'{plain}\necho z > "$HOME/z"; chmod 644 "$HOME/z"; mount --bind "$HOME/z" /etc/skel/.profile'
    assert run(0, home, code, mount=bound) == "True\n"
    assert run(0, home, code, mount=plain) == "False\n"


def test_the_table_knows_what_is_visible_below_a_directory():
    rows = mount_table.read(
        b"1 0 8:1 / / rw - ext4 /dev/a rw\n"
        b"2 1 0:5 / /usr/a\\040b rw shared:1 - tmpfs none rw\n"
        b"3 2 0:6 / /usr/a\\040b/in rw - proc none rw\n"
        b"4 1 0:7 / /usrx rw - tmpfs none rw\n"
        b"5 9 0:8 / /usr/hidden rw - tmpfs none rw\n"
    )
    assert [row.point for row in rows][1:3] == ["/usr/a b", "/usr/a b/in"]
    assert [row.view for row in rows] == [False, False, True, False, False]
    assert mount_table.below(rows, "/usr/nothing") == []
