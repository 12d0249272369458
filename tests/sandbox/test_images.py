"""The image store: directories, tars, `docker save` and OCI archives, names, snapshots, deep stacks, removal."""

import hashlib
import io
import json
import os
import stat
import tarfile
from pathlib import Path

import pytest

from rollyard.core.errors import ConfigError, UnknownName
from rollyard.images.archives import is_whiteout
from rollyard.images.oci import ImageConfig
from rollyard.images.stacks import MAX_LOWERS, MAX_OPTION_BYTES
from rollyard.images.store import ImageStore

pytestmark = pytest.mark.anyio
CONFIG = {"Env": ["PATH=/bin", "A=b=c"], "WorkingDir": "/app", "User": "1000", "Entrypoint": ["/run"], "Cmd": ["x"]}


@pytest.fixture
def store(tmp_path):
    return ImageStore(tmp_path / "store")


def layer_tar(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


LAYERS = [layer_tar({"etc/base": b"1", "etc/gone": b"2"}), layer_tar({"etc/.wh.gone": b"", "app/main": b"3"})]


def sha(data):
    return hashlib.sha256(data).hexdigest()


def write_tar(path, files):
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def image_config():
    diff_ids = [f"sha256:{sha(layer)}" for layer in LAYERS]
    return json.dumps({"config": CONFIG, "rootfs": {"type": "layers", "diff_ids": diff_ids}}).encode()


def docker_save(path, tags=("demo:1",)):
    config = image_config()
    names = [f"{sha(layer)}/layer.tar" for layer in LAYERS]
    manifest = [{"Config": f"{sha(config)}.json", "RepoTags": list(tags), "Layers": names}]
    files = dict(zip(names, LAYERS, strict=True)) | {f"{sha(config)}.json": config}
    return write_tar(path, files | {"manifest.json": json.dumps(manifest).encode()})


def oci_files(platform=None):
    import gzip

    config = image_config()
    packed = [gzip.compress(layer) for layer in LAYERS]
    manifest = json.dumps({
        "schemaVersion": 2,
        "config": {"digest": f"sha256:{sha(config)}"},
        "layers": [{"digest": f"sha256:{sha(layer)}"} for layer in packed],
    }).encode()  # fmt: skip
    entry = {"digest": f"sha256:{sha(manifest)}"} | ({"platform": platform} if platform else {})
    inner = json.dumps({"manifests": [entry, {"digest": "sha256:0", "platform": {"os": "windows"}}]}).encode()
    index = {"manifests": [{"digest": f"sha256:{sha(inner)}"}]}
    blobs = {f"blobs/sha256/{sha(data)}": data for data in [config, manifest, inner, *packed]}
    return blobs | {"index.json": json.dumps(index).encode(), "oci-layout": b'{"imageLayoutVersion":"1.0.0"}'}


def check_demo(rootfs):
    top, bottom = map(Path, rootfs.lowers)
    assert (top / "app/main").read_bytes() == b"3"
    assert is_whiteout((top / "etc/gone").lstat())
    assert (bottom / "etc/base").read_bytes() == b"1"
    assert (rootfs.env["A"], rootfs.workdir, rootfs.user) == ("b=c", "/app", "1000")


async def test_a_docker_save_archive_opens_by_its_tag(store, tmp_path):
    await store.add(str(docker_save(tmp_path / "a.tar")))
    check_demo(await store.resolve("demo:1"))


async def test_an_oci_archive_and_a_layout_directory_are_the_same_image(store, tmp_path):
    archive = write_tar(tmp_path / "oci.tar", oci_files())
    for name, data in oci_files().items():
        (tmp_path / "layout" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "layout" / name).write_bytes(data)
    one = await store.add(str(archive), names=["demo"])
    two = await store.add(str(tmp_path / "layout"))
    assert one == two
    check_demo(await store.resolve("demo"))


async def test_layers_are_shared_between_archives(store, tmp_path):
    await store.add(str(docker_save(tmp_path / "a.tar")))
    await store.add(str(write_tar(tmp_path / "b.tar", oci_files())))
    assert len([path for path in (store.root / "trees").iterdir()]) == len(LAYERS)


async def test_an_archive_for_another_machine_is_refused(store, tmp_path):
    archive = write_tar(tmp_path / "oci.tar", oci_files(platform={"os": "linux", "architecture": "s390x"}))
    with pytest.raises(ConfigError, match="exactly one is wanted"):
        await store.add(str(archive))


@pytest.mark.adversarial
async def test_a_layer_that_is_not_what_its_digest_says_is_refused(store, tmp_path):
    config = image_config()
    manifest = [{"Config": "c.json", "RepoTags": [], "Layers": ["one.tar", "two.tar"]}]
    files = {
        "one.tar": LAYERS[0],
        "two.tar": LAYERS[0],
        "c.json": config,
        "manifest.json": json.dumps(manifest).encode(),
    }
    with pytest.raises(ConfigError, match="not the"):
        await store.add(str(write_tar(tmp_path / "bad.tar", files)))
    assert store.catalog.records() == []


@pytest.mark.adversarial
async def test_a_blob_that_is_not_what_its_digest_says_is_refused(store, tmp_path):
    files = oci_files()
    name = next(name for name, data in files.items() if name.startswith("blobs") and b"schemaVersion" in data)
    files[name] += b" "
    with pytest.raises(ConfigError, match="damaged"):
        await store.add(str(write_tar(tmp_path / "bad.tar", files)))


async def test_a_plain_tar_is_a_root_file_system(store, tmp_path):
    write_tar(tmp_path / "r.tar", {"bin/sh": b"#!", "etc/x": b"y"})
    record = await store.add(str(tmp_path / "r.tar"), names=["mini"])
    rootfs = await store.resolve("mini")
    assert (Path(rootfs.lowers[0]) / "etc/x").read_bytes() == b"y"
    assert stat.S_IMODE(Path(rootfs.lowers[0]).stat().st_mode) == 0o755
    assert (await store.add(str(tmp_path / "r.tar"))) == record


async def test_a_spec_may_name_a_tar_by_path_and_it_is_unpacked_once(store, tmp_path):
    path = str(write_tar(tmp_path / "r.tar", {"etc/x": b"y"}))
    first = await store.resolve(path)
    marker = Path(first.lowers[0]).stat().st_ino
    assert (await store.resolve(path)) == first
    assert Path(first.lowers[0]).stat().st_ino == marker


async def test_a_directory_is_used_in_place_by_path_and_copied_by_add(store, tmp_path):
    (tmp_path / "rootfs/etc").mkdir(parents=True)
    (tmp_path / "rootfs/etc/x").write_text("1")
    assert (await store.resolve(str(tmp_path / "rootfs"))).lowers == (str(tmp_path / "rootfs"),)
    await store.add(str(tmp_path / "rootfs"), names=["copy"])
    (tmp_path / "rootfs/etc/x").write_text("2")
    copied = (await store.resolve("copy")).lowers[0]
    assert (Path(copied) / "etc/x").read_text() == "1"


@pytest.mark.adversarial
@pytest.mark.parametrize("path", ["/", str(Path.home())])
async def test_a_whole_machine_or_home_cannot_be_an_image(store, path):
    with pytest.raises(ConfigError, match="home directory"):
        await store.resolve(path)
    with pytest.raises(ConfigError, match="home directory"):
        await store.add(path)


async def test_an_alias_leads_to_an_image_or_to_the_host(store, tmp_path):
    await store.add(str(docker_save(tmp_path / "a.tar")), names=["mine"])
    await store.add("mine", names=["python:3.11-slim"])
    assert (await store.resolve("python:3.11-slim")) == (await store.resolve("mine"))
    await store.add("host", names=["ubuntu:24.04"])
    assert (await store.resolve("ubuntu:24.04")).trees == (await store.resolve("host")).trees


async def test_an_unknown_image_names_the_known_ones_and_the_next_step(store, tmp_path):
    await store.add(str(docker_save(tmp_path / "a.tar", tags=["python:3.11"])))
    with pytest.raises(UnknownName, match=r"did you mean 'python:3.11'.*rollyard image add") as caught:
        await store.resolve("python:3.12")
    assert caught.value.known == ("host", "python:3.11")
    with pytest.raises(ConfigError, match="no image at"):
        await store.resolve("/nonexistent/rootfs")


@pytest.mark.parametrize("name", ["", "host", "/x", "-x", "../x", "img_1"])
async def test_a_name_that_would_be_mistaken_is_refused(store, name):
    with pytest.raises(ConfigError, match="cannot name"):
        await store.add("host", names=[name])


def make_upper(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


async def test_a_snapshot_opens_as_an_image_and_does_not_follow_its_origin(store, tmp_path):
    upper = make_upper(tmp_path / "upper", {"work/a": "1"})
    usr = make_upper(tmp_path / "usr", {"bin/tool": "#!"})
    snap = await store.add_snapshot("host", {"/": upper, "/usr": usr})
    (upper / "work/a").write_text("2")
    assert snap.startswith("snap_")
    rootfs = await store.resolve(snap)
    assert (Path(rootfs.lowers[0]) / "work/a").read_text() == "1"
    over = next(tree.over for tree in rootfs.trees if tree.target == "/usr")
    assert (Path(over[0]) / "bin/tool").read_text() == "#!"
    again = await store.add_snapshot(snap, {"/": make_upper(tmp_path / "up2", {"work/b": "3"})})
    assert len((await store.resolve(again)).lowers) == len(rootfs.lowers) + 1


async def test_an_upper_for_a_tree_that_is_not_writable_is_refused(store, tmp_path):
    with pytest.raises(ConfigError, match="no writable tree"):
        await store.add_snapshot("host", {"/var/elsewhere": make_upper(tmp_path / "u", {"x": ""})})


async def test_commit_makes_an_image_with_its_own_settings(store, tmp_path):
    await store.add(str(docker_save(tmp_path / "a.tar")))
    upper = make_upper(tmp_path / "u", {"app/new": "n"})
    image = await store.commit("demo:1", {"/": upper}, config=ImageConfig(workdir="/src", env={"X": "1"}))
    rootfs = await store.resolve(image)
    assert (rootfs.workdir, rootfs.env, rootfs.user) == ("/src", {"X": "1"}, None)
    assert (Path(rootfs.lowers[0]) / "app/new").read_text() == "n"
    assert len(rootfs.lowers) == 3


async def test_a_deep_stack_of_snapshots_stays_mountable_and_complete(store, tmp_path):
    image = "host"
    for n in range(MAX_LOWERS + 12):
        files = {f"step/{n}": str(n), "last": str(n)}
        upper = make_upper(tmp_path / f"u{n}", files)
        usr = make_upper(tmp_path / f"v{n}", {f"share/{n}": str(n)})
        image = await store.add_snapshot(image, {"/": upper, "/usr": usr})
    rootfs = await store.resolve(image)
    over = next(tree.over for tree in rootfs.trees if tree.target == "/usr")
    for paths in (rootfs.lowers, over):
        assert len(paths) <= MAX_LOWERS + 1
        assert len(":".join(paths)) <= MAX_OPTION_BYTES + 200
    steps = {path.name for lower in rootfs.lowers for path in Path(lower, "step").glob("*")}
    shares = {path.name for lower in over for path in Path(lower, "share").glob("*")}
    assert steps == shares == {str(n) for n in range(MAX_LOWERS + 12)}
    newest = next(Path(lower, "last") for lower in rootfs.lowers if Path(lower, "last").exists())
    assert newest.read_text() == str(MAX_LOWERS + 11)


async def test_removing_the_last_name_removes_the_image_and_a_sweep_its_trees(store, tmp_path):
    await store.add(str(docker_save(tmp_path / "a.tar")), names=["second"])
    assert await store.remove("second") == ["second"]
    await store.resolve("demo:1")
    gone = await store.remove("demo:1")
    assert gone[0] == "demo:1" and gone[1].startswith("img_")
    assert await store.sweep() == []  # opened a moment ago: a sandbox may be using it
    assert len(await store.sweep(unused_s=-1)) == len(LAYERS)
    assert list((store.root / "trees").iterdir()) == []


async def test_a_sweep_keeps_what_a_snapshot_stands_on(store, tmp_path):
    await store.add(str(docker_save(tmp_path / "a.tar")))
    snap = await store.add_snapshot("demo:1", {"/": make_upper(tmp_path / "u", {"x": "1"})})
    await store.remove("demo:1")
    await store.sweep(unused_s=-1)
    assert len((await store.resolve(snap)).lowers) == 3


async def test_a_sweep_removes_what_a_dead_build_left(store, tmp_path):
    (store.root / "trees/.new-dead/deep").mkdir(parents=True)
    (store.root / "trees/.new-dead/deep").chmod(0o500)
    assert await store.sweep(unused_s=-1) == [".new-dead"]


async def test_removing_what_does_not_exist_is_an_error(store):
    with pytest.raises(UnknownName):
        await store.remove("nothing")


async def test_the_store_is_private_to_its_user(store, tmp_path):
    await store.add(str(docker_save(tmp_path / "a.tar")))
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in store.root.iterdir() if path.is_dir()} == {0o700}


async def test_owners_of_a_tar_are_kept_by_root_and_taken_over_by_others(store, tmp_path):
    out = tmp_path / "o.tar"
    with tarfile.open(out, "w") as archive:
        info = tarfile.TarInfo("f")
        info.uid = info.gid = 1234
        archive.addfile(info, io.BytesIO())
    rootfs = await store.resolve(str(out))
    owner = (Path(rootfs.lowers[0]) / "f").stat().st_uid
    assert owner == (1234 if os.geteuid() == 0 else os.geteuid())
