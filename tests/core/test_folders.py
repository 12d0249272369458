"""Walks over trees that are deeper than a recursion, a path or the descriptors of a process allow."""

import os
import resource
import stat
import subprocess
import sys

import pytest

from rollyard.core import folders
from rollyard.core.scratch import scratch

SHAPES = [("d", 1500), ("n" * 255, 60)]  # deeper than Python recurses; a path longer than the kernel takes
pytestmark = pytest.mark.adversarial


@pytest.fixture(autouse=True)
def deep_trees_are_removed(tmp_path):
    """pytest clears old folders by recursion, which trees of this depth end."""
    yield
    folders.remove(tmp_path)


def nest(place, name, depth):
    """`depth` directories inside each other, each with a file and a link that leads out."""
    at = os.open(place, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=at)
        inner = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        os.symlink("/", "link", dir_fd=at)
    os.close(at)


@pytest.mark.parametrize(("name", "depth"), SHAPES)
def test_a_deep_tree_is_walked_and_removed_with_few_descriptors(tmp_path, name, depth):
    (tmp_path / "tree").mkdir()
    nest(tmp_path / "tree", name, depth)
    before, (soft, hard) = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
    try:
        seen = [(len(folder.names), folder.others) for folder in folders.walk(tmp_path / "tree")]
        folders.remove(tmp_path / "tree")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert seen == [(0, []), *((level, ["file", "link"]) for level in range(1, depth + 1))]
    assert not (tmp_path / "tree").exists() and len(os.listdir("/proc/self/fd")) == before


def test_entries_come_after_their_directory_and_links_are_not_followed(tmp_path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "c" / "file").touch()
    (tmp_path / "a").symlink_to("b")
    assert list(folders.entries(tmp_path)) == ["a", "b", "b/c", "b/c/file"]


def test_a_walk_goes_on_by_names_when_a_directory_was_moved_under_it(tmp_path):
    for name in ("a/deep/deeper", "b"):
        (tmp_path / "tree" / name).mkdir(parents=True)
    seen = []
    for folder in folders.walk(tmp_path / "tree"):
        seen.append(folder.path)
        if folder.path == "a/deep":
            (tmp_path / "tree/a/deep").rename(tmp_path / "elsewhere")
    assert seen == ["", "a", "a/deep", "a/deep/deeper", "b"]


def test_what_cannot_be_removed_is_stepped_over_and_told(tmp_path):
    (tmp_path / "closed" / "in").mkdir(parents=True)
    (tmp_path / "closed" / "in" / "file").touch()
    (tmp_path / "closed").chmod(0)
    (tmp_path / "tree").mkdir()
    folders.remove(tmp_path / "closed")
    assert not (tmp_path / "closed").exists()
    if os.geteuid() == 0:  # a mount is something that not even root can remove
        code = (
            "import os, sys; from rollyard.core import folders; tree = sys.argv[1]\n"
            "for name in ('a', 'kept', 'z'): os.makedirs(f'{tree}/{name}/in')\n"
            "assert os.system(f'mount -t tmpfs none {tree}/kept/in') == 0\n"
            "try: folders.remove(tree)\n"
            "except OSError as error: print(error.strerror, os.listdir(tree))"
        )
        argv = ["unshare", "--mount", sys.executable, "-c", code, str(tmp_path / "tree")]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        assert done.stdout == "Device or resource busy ['kept']\n"


def test_a_link_is_removed_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("kept")
    folders.remove(tmp_path / "link")
    folders.remove(tmp_path / "never was")
    assert (tmp_path / "kept").is_dir() and not (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(("name", "depth"), SHAPES)
def test_scratch_directories_go_whatever_was_put_into_them(name, depth):
    with scratch("deep") as place:
        nest(place, name, depth)
        assert stat.S_ISDIR(place.stat().st_mode)
    assert not place.exists()
