"""Frozen uppers: copied without following what a sandbox planted, and merged to what overlayfs itself would show."""

import json
import os
import random
import stat
import subprocess
import sys

import pytest

from rollyard.images.archives import OPAQUE, is_whiteout, make_whiteout
from rollyard.images.snapshots import copy_upper, merge

LIST = """
import ctypes, hashlib, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
point, options = sys.argv[1], sys.argv[2]
uid, gid = os.getuid(), os.getgid()
if libc.unshare(0x10000000 | 0x00020000) != 0: sys.exit(77)
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write(f"0 {uid} 1"); open("/proc/self/gid_map", "w").write(f"0 {gid} 1")
if libc.mount(b"overlay", point.encode(), b"overlay", 1, options.encode()) != 0:
    print(os.strerror(ctypes.get_errno()), file=sys.stderr); sys.exit(78)
seen = {}
for place, dirs, files in os.walk(point):
    for name in dirs + files:
        path = os.path.join(place, name); key = os.path.relpath(path, point)
        if not os.path.lexists(path): continue  # a removal mark in a directory that only one layer has is listed, not found
        if os.path.islink(path): seen[key] = "-> " + os.readlink(path)
        elif os.path.isdir(path): seen[key] = "dir"
        else: seen[key] = open(path).read()
print(json.dumps(seen))
"""


def shown(tmp_path, stack):
    """What overlayfs shows for these lowers, topmost first. It wants two at least, so an empty one goes below."""
    point, empty = tmp_path / "point", tmp_path / "empty"
    point.mkdir(exist_ok=True)
    empty.mkdir(exist_ok=True)
    options = "lowerdir=" + ":".join(str(path) for path in [*stack, empty]) + ",userxattr"
    done = subprocess.run([sys.executable, "-c", LIST, str(point), options], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("user namespaces are not allowed on this machine")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def random_layer(root, rng):
    """Files, links, directories, removals and opaque directories, on few names so that layers meet."""
    root.mkdir()
    for _ in range(rng.randint(3, 12)):
        place = root
        for _ in range(rng.randint(0, 2)):
            step = place / rng.choice("abc")
            if step.is_symlink() or (os.path.lexists(step) and not step.is_dir()):
                break
            step.mkdir(exist_ok=True)
            place = step
        name = place / rng.choice("abcd")
        if os.path.lexists(name):
            continue
        match rng.randint(0, 4):
            case 0:
                make_whiteout(name)
            case 1:
                name.symlink_to(rng.choice(["a", "/b", "nowhere"]))
            case 2:
                name.mkdir()
                os.setxattr(name, OPAQUE, b"y")
            case _:
                name.write_text(str(rng.random()))


@pytest.mark.parametrize("seed", range(12))
def test_a_merged_stack_shows_what_overlayfs_shows(tmp_path, seed):
    rng = random.Random(seed)
    stack = [tmp_path / f"layer{n}" for n in range(4)]
    for layer in stack:
        random_layer(layer, rng)
    merge(stack, tmp_path / "flat", bottom=True)
    assert shown(tmp_path, [tmp_path / "flat"]) == shown(tmp_path, stack)
    merge(stack[:3], tmp_path / "upper", bottom=False)
    assert shown(tmp_path, [tmp_path / "upper", stack[3]]) == shown(tmp_path, stack)


def test_merging_shares_files_and_changes_no_layer(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/f").write_text("x")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/f").write_text("y")
    merge([tmp_path / "b", tmp_path / "a"], tmp_path / "m", bottom=True)
    assert (tmp_path / "m/f").stat().st_ino == (tmp_path / "b/f").stat().st_ino
    assert (tmp_path / "a/f").read_text() == "x"


def test_copy_keeps_modes_times_hard_links_whiteouts_and_opaque_marks(tmp_path):
    upper = tmp_path / "upper"
    (upper / "d").mkdir(parents=True)
    (upper / "d/f").write_bytes(b"\0\xff" * 1000)
    (upper / "d/f").chmod(0o4751)
    os.utime(upper / "d/f", ns=(1, 2_000_000_000))
    (upper / "d/same").hardlink_to(upper / "d/f")
    os.setxattr(upper / "d", OPAQUE, b"y")
    make_whiteout(upper / "gone")
    (upper / "link").symlink_to("/etc/passwd")
    copied = copy_upper(upper, tmp_path / "copy")
    copy = tmp_path / "copy"
    assert copied == 2000
    assert (copy / "d/f").read_bytes() == b"\0\xff" * 1000
    assert stat.S_IMODE((copy / "d/f").stat().st_mode) == 0o4751
    assert (copy / "d/f").stat().st_mtime_ns == 2_000_000_000
    assert (copy / "d/f").stat().st_ino == (copy / "d/same").stat().st_ino
    assert os.getxattr(copy / "d", OPAQUE) == b"y"
    assert is_whiteout((copy / "gone").lstat())
    assert os.readlink(copy / "link") == "/etc/passwd"


@pytest.mark.skipif(os.geteuid() != 0, reason="owners can only be set by root")
def test_copy_lowers_owners_by_the_shift(tmp_path):
    (tmp_path / "upper").mkdir()
    (tmp_path / "upper/f").write_text("")
    os.chown(tmp_path / "upper/f", 101000, 101000)
    os.chown(tmp_path / "upper", 100000, 100000)
    copy_upper(tmp_path / "upper", tmp_path / "copy", uid_shift=100000)
    assert (tmp_path / "copy/f").stat().st_uid == 1000
    assert (tmp_path / "copy").stat().st_uid == 0


@pytest.mark.adversarial
def test_pipes_and_sockets_do_not_hang_a_copy(tmp_path):
    (tmp_path / "upper").mkdir()
    os.mkfifo(tmp_path / "upper/pipe")
    (tmp_path / "upper/f").write_text("x")
    copy_upper(tmp_path / "upper", tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["f"]


@pytest.mark.adversarial
def test_a_link_to_a_host_directory_is_copied_as_a_link(tmp_path):
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/key").write_text("host secret")
    (tmp_path / "upper").mkdir()
    (tmp_path / "upper/d").symlink_to(tmp_path / "secrets")
    copy_upper(tmp_path / "upper", tmp_path / "copy")
    assert (tmp_path / "copy/d").is_symlink()
