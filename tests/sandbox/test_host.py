"""The host image is an allow-list: programs work, and nothing private is in it."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.core.errors import ConfigError
from rollyard.images.host import host_prefixes, host_rootfs


def test_skeleton_is_made_once_and_then_found(tmp_path):
    first = host_rootfs(tmp_path)
    second = host_rootfs(tmp_path)
    assert first == second
    assert len(list((tmp_path / "host").glob("[!.]*"))) == 1


def test_every_tree_has_an_empty_directory_to_be_mounted_on(tmp_path):
    rootfs = host_rootfs(tmp_path)
    for tree in rootfs.trees:
        place = Path(rootfs.lowers[0] + tree.target)
        assert place.is_dir() and not list(place.iterdir()), tree.target
        assert Path(tree.source).is_dir()


def test_usr_is_writable_and_interpreters_elsewhere_are_not(tmp_path):
    trees = {tree.target: tree for tree in host_rootfs(tmp_path).trees}
    assert trees["/usr"].writable
    assert not any(
        tree.writable for target, tree in trees.items() if not target.startswith(("/usr", "/bin", "/lib", "/sbin"))
    )


def test_the_running_interpreter_is_on_the_search_path(tmp_path):
    rootfs = host_rootfs(tmp_path)
    if not sys.base_prefix.startswith("/usr"):
        assert any(sys.base_prefix == tree.target for tree in rootfs.trees)
        assert rootfs.env["PATH"].split(":")[0] == f"{sys.base_prefix}/bin"


@pytest.mark.adversarial
def test_no_secret_of_this_machine_is_in_the_skeleton(tmp_path):
    root = Path(host_rootfs(tmp_path).lowers[0])
    assert not (root / "etc/shadow").exists()
    assert not (root / "etc/ssl/private").exists()
    assert list((root / "home").iterdir()) == [root / "home/agent"]
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert "PRIVATE KEY" not in path.read_text(errors="replace")
    assert Path.home().name not in (root / "etc/passwd").read_text() or Path.home() == Path("/root")


def test_skeleton_is_readable_by_any_user_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        root = Path(host_rootfs(tmp_path).lowers[0])
    finally:
        os.umask(before)
    for path in root.rglob("*"):
        if not path.is_symlink() and path.relative_to(root).parts[0] != "root":
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode & 0o044 == 0o044, path
            assert not path.is_dir() or mode & 0o011 == 0o011, path


def test_a_home_or_the_working_directory_is_never_a_prefix():
    homes = {str(Path.home()), str(Path.cwd()), "/", "/home", "/opt"}
    assert not homes & set(host_prefixes())


def test_prefixes_named_by_the_user_are_shown_and_wrong_ones_are_refused(tmp_path):
    code = "from rollyard.images.host import host_prefixes; print(*host_prefixes(), sep='\\n')"
    env = dict(os.environ, ROLLYARD_HOST_PREFIXES=str(tmp_path))
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) in out.split()
    env["ROLLYARD_HOST_PREFIXES"] = "not/absolute"
    failed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ConfigError.__name__ in failed.stderr
