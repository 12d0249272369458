"""Unpacking: what is in a tar stays in its directory, and comes out as it went in."""

import bz2
import gzip
import io
import lzma
import os
import random
import stat
import tarfile
import zlib

import pytest

from rollyard.core.errors import ConfigError
from rollyard.images.archives import OPAQUE, is_whiteout, list_members, open_archive, unpack
from tests.memory import trace_memory


def tar_of(*members, mode="w"):
    """Members are (name, type, extra): `data` for files, the target for links."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, kind, extra in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o640
            info.mtime = 1_000_000
            if kind == tarfile.REGTYPE:
                info.size = len(extra)
                archive.addfile(info, io.BytesIO(extra))
            else:
                info.linkname = extra or ""
                archive.addfile(info)
    out.seek(0)
    return out


FILE, DIR, SYM, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_files_modes_times_and_links_come_out_in_any_compression(root, mode):
    data = bytes(range(256)) * 40
    done = unpack(
        tar_of(("a", DIR, None), ("a/f", FILE, data), ("a/hard", HARD, "a/f"), ("l", SYM, "/a/f"), mode=mode), root
    )
    assert (root / "a/f").read_bytes() == data
    assert stat.S_IMODE((root / "a/f").stat().st_mode) == 0o640
    assert (root / "a/f").stat().st_mtime == 1_000_000
    assert (root / "a/f").stat().st_ino == (root / "a/hard").stat().st_ino
    assert os.readlink(root / "l") == "/a/f"
    assert (done.members, done.bytes, done.left_out) == (4, len(data), 0)


def test_the_digest_is_of_the_uncompressed_stream(tmp_path):
    member = ("f", FILE, b"x" * 5000)
    digests = set()
    for mode in ("w", "w:gz", "w:xz"):
        (tmp_path / mode.replace(":", "")).mkdir()
        digests.add(unpack(tar_of(member, mode=mode), tmp_path / mode.replace(":", "")).digest)
    assert len(digests) == 1


@pytest.mark.adversarial
@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/../evil"])
def test_a_name_that_climbs_is_refused(root, name):
    with pytest.raises(ConfigError, match="climbs"):
        unpack(tar_of((name, FILE, b"x")), root)
    assert not (root.parent / "evil").exists()


@pytest.mark.adversarial
@pytest.mark.parametrize("target", ["/tmp", "..", "../../../../../tmp", "/"])
def test_a_planted_link_leads_nowhere_outside(root, target):
    unpack(tar_of(("link", SYM, target), ("link/rollyard-evil", FILE, b"x")), root)
    inside = [path for path in root.rglob("rollyard-evil")]
    assert len(inside) == 1
    assert not os.path.exists("/tmp/rollyard-evil")
    assert not (root.parent / "rollyard-evil").exists()


@pytest.mark.adversarial
def test_an_absolute_name_lands_inside(root):
    unpack(tar_of(("/etc/rollyard-evil", FILE, b"x")), root)
    assert (root / "etc/rollyard-evil").read_bytes() == b"x"
    assert not os.path.exists("/etc/rollyard-evil")


@pytest.mark.adversarial
def test_a_hard_link_to_a_host_file_is_refused_or_inside(root):
    with pytest.raises(ConfigError, match="hard link"):
        unpack(tar_of(("shadow", HARD, "/etc/shadow")), root)


@pytest.mark.adversarial
def test_a_hard_link_through_a_planted_link_stays_inside(root, tmp_path):
    (tmp_path / "secret").write_text("host secret")
    with pytest.raises(ConfigError, match="hard link"):
        unpack(tar_of(("d", SYM, str(tmp_path)), ("copy", HARD, "d/secret")), root)


@pytest.mark.adversarial
def test_a_file_over_a_planted_link_replaces_the_link(root, tmp_path):
    (tmp_path / "victim").write_text("safe")
    unpack(tar_of(("f", SYM, str(tmp_path / "victim")), ("f", FILE, b"evil")), root)
    assert (tmp_path / "victim").read_text() == "safe"
    assert (root / "f").read_bytes() == b"evil"


@pytest.mark.adversarial
def test_links_that_never_end_are_refused(root):
    with pytest.raises(ConfigError, match="never end"):
        unpack(tar_of(("a", SYM, "b"), ("b", SYM, "a"), ("a/x", FILE, b"")), root)


@pytest.mark.adversarial
def test_devices_and_pipes_are_left_out(root):
    done = unpack(
        tar_of(("sda", tarfile.BLKTYPE, None), ("tty", tarfile.CHRTYPE, None), ("p", tarfile.FIFOTYPE, None)), root
    )
    assert done.left_out == 3
    assert list(root.iterdir()) == []


def test_whiteouts_of_oci_become_those_of_overlayfs(root):
    unpack(
        tar_of(("d", DIR, None), ("d/.wh.gone", FILE, b""), ("o", DIR, None), ("o/.wh..wh..opq", FILE, b"")),
        root,
        whiteouts=True,
    )
    assert is_whiteout((root / "d/gone").lstat())
    assert os.getxattr(root / "o", OPAQUE) == b"y"
    assert list((root / "o").iterdir()) == []


def test_a_plain_tar_keeps_files_that_look_like_whiteouts(root):
    unpack(tar_of((".wh.name", FILE, b"kept")), root)
    assert (root / ".wh.name").read_bytes() == b"kept"


def test_a_read_only_directory_is_filled_before_it_is_closed(root):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("ro")
        info.type, info.mode = tarfile.DIRTYPE, 0o555
        archive.addfile(info)
        inner = tarfile.TarInfo("ro/f")
        archive.addfile(inner, io.BytesIO())
    out.seek(0)
    unpack(out, root)
    assert (root / "ro/f").exists()
    assert stat.S_IMODE((root / "ro").stat().st_mode) == 0o555
    (root / "ro").chmod(0o755)


@pytest.mark.parametrize(
    "data", [b"", b"not a tar at all" * 100, b"\x1f\x8b" + b"junk" * 200, zlib.compress(b"x" * 100)]
)
def test_what_is_no_tar_gets_a_typed_error(root, data):
    with pytest.raises(ConfigError, match="not a tar"):
        unpack(io.BytesIO(data), root)


def test_a_cut_off_archive_gets_a_typed_error(root):
    whole = tar_of(("f", FILE, b"x" * 100_000), mode="w:gz").getvalue()
    with pytest.raises(ConfigError):
        unpack(io.BytesIO(whole[: len(whole) // 2]), root)


@pytest.mark.adversarial
def test_members_without_end_are_refused_and_none_are_kept(root):
    archive = tar_of(*((f"d{n % 10}/{n}", SYM, "x") for n in range(10_000)))
    held = [peak_of(lambda place=root / name: unpack_again(archive, place)) for name in "abc"]
    assert min(held) < 4 << 20
    archive.seek(0)
    with pytest.raises(ConfigError, match="more than 5,000 members"):
        unpack(archive, root, max_members=5000)
    archive.seek(0)
    with open_archive(archive) as opened, pytest.raises(ConfigError, match="more than 100 members"):
        list_members(opened, 100)


def unpack_again(archive, place):
    place.mkdir()
    archive.seek(0)
    unpack(archive, place)


def peak_of(work):
    """Threads that tests before it left behind are counted too: of several measurements the smallest says what the work took."""
    with trace_memory() as traced:
        work()
        return traced()[1]


@pytest.mark.adversarial
@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE, b"V"])
def test_a_header_that_unpacks_without_end_is_refused(root, kind):
    info = tarfile.TarInfo("long")
    info.type, info.size = kind, 64 << 20
    bomb = io.BytesIO(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(info.size)))
    held = peak_of(lambda: unpack_refused(bomb, root))
    assert held < 8 << 20


def unpack_refused(stream, root):
    with pytest.raises(ConfigError, match="a header of"):
        unpack(stream, root)


@pytest.mark.adversarial
@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_damage_below_a_compression_is_an_error_with_a_name(root, pack):
    whole = pack(tar_of(("f", FILE, random.Random(1).randbytes(20_000).hex().encode())).getvalue())
    for bad in (whole[:2], whole[:30], whole[:-100], whole[:1000] + b"\0" * 200 + whole[1200:]):
        with pytest.raises(ConfigError):
            unpack(io.BytesIO(bad), root)
    for bad in (whole[:2], whole[:30]):
        with pytest.raises(ConfigError), open_archive(io.BytesIO(bad)) as opened:
            list_members(opened)
