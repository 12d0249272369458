"""ADD and COPY with hostile sources: nothing in an archive or a build folder makes the host read or write elsewhere."""

import io
import os
import stat
import tarfile

import pytest

from rollyard.core.errors import ConfigError
from rollyard.images import dockerfile
from rollyard.images.build_context import Context, tree_key
from rollyard.images.build_copy import CopyInstruction, assemble, copy_key
from rollyard.images.dockerfile import Heredoc, Instruction

pytestmark = pytest.mark.adversarial

FILE, DIR, SYM, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.fixture
def host(tmp_path):
    """Files of the host: beside the build, where a link could lead."""
    root = tmp_path / "host"
    (root / "folder").mkdir(parents=True)
    (root / "secret").write_text("host secret")
    (root / "folder" / "kept").write_text("as it was")
    return root


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "context").mkdir()
    return tmp_path / "context"


@pytest.fixture
def add(folder, tmp_path):
    """`add(*sources)`: the tree that `ADD sources /to/` makes on the host."""

    def run(*sources, heredocs=()):
        out = tmp_path / "tree"
        out.mkdir()
        words = (*sources, "/to/")
        item = Instruction(kind="ADD", line=1, text=" ".join(words), heredocs=tuple(heredocs))
        request = CopyInstruction(item=item, words=words, workdir="/", chown=None, chmod=None, expand=str)
        return assemble(request, Context(folder), out).root

    return run


def pack(path, *members):
    """Members are (name, type, data or link target[, mode])."""
    with tarfile.open(path, "w") as archive:
        for name, kind, extra, *mode in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, mode[0] if mode else 0o755 if kind == DIR else 0o644
            info.uid = info.gid = 4321
            if kind == FILE:
                info.size = len(extra)
            else:
                info.linkname = extra or ""
            archive.addfile(info, io.BytesIO(extra) if kind == FILE else None)


def untouched(host):
    assert sorted(path.name for path in host.rglob("*")) == ["folder", "kept", "secret"]
    assert (host / "secret").read_text() == "host secret"
    assert (host / "secret").stat().st_nlink == 1
    assert (host / "folder" / "kept").read_text() == "as it was"


def test_a_write_through_a_planted_link_stays_in_the_tree(add, folder, host):
    pack(folder / "a.tar", ("way", SYM, str(host)), ("way/secret", FILE, b"overwritten"), ("way/new", FILE, b"new"))
    add("a.tar")
    untouched(host)


def test_a_write_over_a_planted_link_replaces_the_link(add, folder, host):
    pack(folder / "a.tar", ("f", SYM, str(host / "secret")), ("f", FILE, b"overwritten"))
    assert (add("a.tar") / "f").read_text() == "overwritten"
    untouched(host)


def test_a_hard_link_through_a_planted_link_reads_no_host_file(add, folder, host):
    pack(folder / "a.tar", ("way", SYM, str(host)), ("leak", HARD, "way/secret"))
    with pytest.raises(ConfigError, match="not in the archive"):
        add("a.tar")
    untouched(host)


def test_a_hard_link_to_a_planted_link_writes_no_host_file(add, folder, host):
    """First a link to the host's file, then a hard link to that link, then data written to its name."""
    pack(
        folder / "a.tar",
        ("dir", DIR, None),
        ("dir/link", SYM, "../../../../../../../../../.." + str(host / "secret")),
        ("again", HARD, "dir/link"),
        ("again", FILE, b"overwritten"),
    )
    assert (add("a.tar") / "again").read_text() == "overwritten"
    untouched(host)


@pytest.mark.parametrize("name", ["../escaped", "a/../../escaped", "/../escaped"])
def test_a_name_that_climbs_is_refused(add, folder, tmp_path, name):
    pack(folder / "a.tar", (name, FILE, b"x"))
    with pytest.raises(ConfigError, match="climbs"):
        add("a.tar")
    assert not (tmp_path / "escaped").exists()


def test_an_absolute_name_lands_in_the_tree(add, folder, host):
    pack(folder / "a.tar", (str(host / "new"), FILE, b"x"))
    assert (add("a.tar") / str(host / "new").lstrip("/")).read_text() == "x"
    untouched(host)


def test_devices_and_pipes_are_left_out(add, folder):
    pack(
        folder / "a.tar",
        ("null", tarfile.CHRTYPE, None),
        ("disk", tarfile.BLKTYPE, None),
        ("p", tarfile.FIFOTYPE, None),
    )
    assert list(add("a.tar").iterdir()) == []


def test_nothing_gets_a_set_user_id_bit_or_another_owner_on_the_host(add, folder):
    pack(folder / "a.tar", ("f", FILE, b"#!/bin/sh\n", 0o6755), ("d", DIR, None, 0o7777))
    root = add("a.tar")
    assert {stat.S_IMODE((root / name).lstat().st_mode) for name in "fd"} == {0o755, 0o777}
    assert {(root / name).lstat().st_uid for name in "fd"} == {os.geteuid()}


def test_a_file_added_after_an_archive_is_not_written_through_its_links(add, folder, host):
    pack(folder / "a.tar", ("f", SYM, str(host / "secret")))
    (folder / "f").write_text("plain")
    assert (add("a.tar", "f") / "f").read_text() == "plain"
    untouched(host)


def test_a_folder_added_after_an_archive_is_not_written_through_its_links(add, folder, host):
    pack(folder / "a.tar", ("sub", SYM, str(host / "folder")))
    (folder / "more" / "sub").mkdir(parents=True)
    (folder / "more" / "sub" / "kept").write_text("overwritten")
    add("a.tar", "more")
    untouched(host)


def test_folders_are_not_written_through_each_others_links(add, folder, host):
    (folder / "one").mkdir()
    (folder / "one" / "sub").symlink_to(host / "folder")
    (folder / "two" / "sub").mkdir(parents=True)
    (folder / "two" / "sub" / "kept").write_text("overwritten")
    add("one", "two")
    untouched(host)


def test_a_here_document_is_not_written_through_a_planted_link(add, folder, host):
    pack(folder / "a.tar", ("END", SYM, str(host / "secret")))
    assert (add("a.tar", heredocs=[Heredoc("END", "text\n", True)]) / "END").read_text() == "text\n"
    untouched(host)


@pytest.mark.parametrize("name", ["../../named", "/named", "sub/named", "..", "."])
def test_a_here_document_has_a_name_and_not_a_path(folder, tmp_path, name):
    """Its name is that of a file on the host while the tree is assembled."""
    (folder / "Dockerfile").write_text(f'FROM host\nCOPY <<"{name}" /to/\ntext\n{name}\n')
    with pytest.raises(ConfigError):
        dockerfile.read(folder / "Dockerfile")


CHANGES = {
    "content": lambda root: (root / "a").write_text("other"),
    "mode": lambda root: (root / "a").chmod(0o755),
    "name": lambda root: (root / "a").rename(root / "b"),
    "folder's mode": lambda root: (root / "folder").chmod(0o700),
    "empty folder": lambda root: (root / "folder" / "empty").mkdir(),
    "link": lambda root: (root / "link").symlink_to("a"),
    "link to a folder": lambda root: (root / "folder" / "link").symlink_to("../kept"),
    "a file to a link": lambda root: ((root / "a").unlink(), (root / "a").symlink_to("folder/deep")),
    "ignored file": lambda root: (root / "x.log").write_text("other"),
    "ignored folder": lambda root: ((root / "ignored" / "more").mkdir(), (root / "ignored" / "more" / "f").touch()),
    "mode of an ignored folder": lambda root: (root / "ignored").chmod(0o700),
    "mode of an ignored folder that holds a file": lambda root: (root / "kept").chmod(0o700),
    "excluded file": lambda root: (root / "folder" / "x.tmp").write_text("other"),
    "time": lambda root: os.utime(root / "a", (1, 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_of_a_copy_changes_where_what_is_copied_does(folder, tmp_path, change):
    (folder / ".dockerignore").write_text("*.log\nignored\nkept\n!kept/file\n")
    for name in ("a", "x.log", "folder/deep", "folder/x.tmp", "ignored/f", "kept/file", "kept/other"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    item = Instruction(kind="COPY", line=1, text=". /to/", flags=(("exclude", "**/*.tmp"),))
    request = CopyInstruction(item=item, words=(".", "/to/"), workdir="/", chown=None, chmod=None, expand=str)

    def look(place):
        place.mkdir()
        return copy_key(request, Context(folder)), tree_key(assemble(request, Context(folder), place).root)

    before = look(tmp_path / "before")
    assert look(tmp_path / "same") == before
    CHANGES[change](folder)
    key, tree = look(tmp_path / "after")
    assert (key != before[0]) == (tree != before[1])


def test_the_key_of_a_copy_tells_its_sources_apart(folder, tmp_path):
    """An archive that is extracted, one that is copied, the name it is copied by, and a name with a line break in it."""
    pack(folder / "pack.tar", ("f", FILE, b"inside"))
    (folder / "same.tar").write_bytes((folder / "pack.tar").read_bytes())
    for name, links in (("one", {"a": "t\nfoo", "z": None}), ("two", {"a": "t", "foo\nz": None})):
        (folder / name).mkdir()
        for entry, to in links.items():
            (folder / name / entry).symlink_to(to) if to else (folder / name / entry).touch()

    def key(kind, *words):
        item = Instruction(kind=kind, line=1, text=" ".join(words))
        request = CopyInstruction(item=item, words=words, workdir="/", chown=None, chmod=None, expand=str)
        return copy_key(request, Context(folder))

    keys = [
        key("ADD", "pack.tar", "/to/"),
        key("COPY", "pack.tar", "/to/"),
        key("COPY", "same.tar", "/to/"),
        key("COPY", "pack.tar", "same.tar", "/to/"),
        key("COPY", "pack.tar", "/to"),
        key("COPY", "one", "/to/"),
        key("COPY", "two", "/to/"),
    ]
    assert len(set(keys)) == len(keys)


def test_a_pipe_in_the_build_folder_is_not_opened_for_the_key(folder):
    os.mkfifo(folder / "pipe")
    item = Instruction(kind="COPY", line=1, text=". /to/")
    request = CopyInstruction(item=item, words=(".", "/to/"), workdir="/", chown=None, chmod=None, expand=str)
    assert copy_key(request, Context(folder))
