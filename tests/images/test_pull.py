"""Images pulled from Debian's `docker-registry`, to which `skopeo` pushed them: formats, layers, accounts, mirrors, TLS, and
downloads that break."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollyard.core.errors import ConfigError, ImageNotPulled, SandboxUnavailable
from rollyard.images.archives import is_whiteout
from rollyard.images.manifests import parse_platform
from rollyard.images.pull import DOWNLOADS
from rollyard.images.registries import read_registries
from rollyard.images.registry_client import ATTEMPTS
from rollyard.images.store import ImageStore
from tests.images.conftest import LARGE
from tests.images.registry import (
    PASSWORD,
    USER,
    AnsweringServer,
    Layout,
    docker_config,
    make_certificate,
    push,
    running_registry,
    tar_of,
    token_server,
)
from tests.sandbox.fault_proxy import fault_proxy
from tests.waiting import settle, until

pytestmark = pytest.mark.anyio
ROLLYARD = str(Path(sys.executable).with_name("rollyard"))
BLOB = r"GET /v2/acme/large/blobs/"


@pytest.fixture
def store(tmp_path):
    return ImageStore(tmp_path / "store")


async def pull(store, reference, **options):
    return await store.pull(reference, read_registries([reference.partition("/")[0]]), **options)


async def start_pull(reference, home, **variables):
    return await asyncio.create_subprocess_exec(
        ROLLYARD, "image", "pull", reference, "--json", env={**os.environ, "ROLLYARD_HOME": str(home), **variables},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


async def test_an_image_of_either_format_opens_with_its_layers_settings_and_removals(registry, store):
    done = await pull(store, f"{registry.host}/acme/child:1")
    rootfs = await store.resolve(f"{registry.host}/acme/child:1")
    upper, lower = map(Path, rootfs.lowers)
    assert (upper / "etc/marker").read_bytes() == b"of the child\n" and is_whiteout((upper / "etc/gone").lstat())
    assert (lower / "bin/sh").is_symlink() and (lower / "etc/gone").is_file()
    assert (rootfs.env["FROM_IMAGE"], rootfs.workdir, rootfs.cmd) == ("yes", "/app", ("sleep", "600"))
    assert (done.layers, done.fetched_layers) == (2, 2)
    again = await pull(store, f"{registry.host}/acme/base:docker")  # a Docker manifest of the child's lower layer
    assert (again.layers, again.fetched_layers, again.fetched_bytes) == (1, 0, 0)
    assert list((store.root / "downloads").iterdir()) == []


async def test_a_layer_packed_with_zstd_is_unpacked(registry, store, tmp_path):
    if shutil.which("zstd") is None:
        pytest.skip("zstd is not installed: apt-get install zstd")
    layout = Layout(tmp_path / "layout")
    layout.image([tar_of({"file": b"1"})], packing="zstd")
    registry.push(layout.folder, "acme/packed:1")
    done = await pull(store, f"{registry.host}/acme/packed:1")
    (layer,) = json.loads(registry.blob(done.digest).read_bytes())["layers"]
    (tree,) = (await store.resolve(done.record.id)).lowers
    assert layer["mediaType"].endswith("tar+zstd") and (Path(tree) / "file").read_bytes() == b"1"


async def test_a_digest_names_an_image_for_good(registry, store):
    tagged = await pull(store, f"{registry.host}/acme/base:1")
    fixed = f"{registry.host}/acme/base:whatever@{tagged.digest}"
    assert (await pull(store, fixed)).record.id == tagged.record.id
    assert (await store.find(f"{registry.host}/acme/base@{tagged.digest}")).id == tagged.record.id


async def test_an_index_is_answered_with_the_platform_that_is_wanted(registry, store, tmp_path):
    layout = Layout(tmp_path / "index")
    entries = [
        layout.image([tar_of({"arch": name.encode()})], architecture=name) for name in ("arm64", "amd64", "riscv64")
    ]
    layout.index(entries)
    registry.push(layout.folder, "acme/many:1", "--multi-arch", "all")
    reference = f"{registry.host}/acme/many:1"
    for name in ("amd64", "arm64"):
        done = await pull(store, reference, names=[name], platform=parse_platform(f"linux/{name}"))
        (tree,) = (await store.resolve(name)).lowers
        assert (Path(tree) / "arch").read_text() == name == done.platform.removeprefix("linux/")
    with pytest.raises(ImageNotPulled, match="not there for linux/s390x.*amd64, linux/arm64, linux/riscv64"):
        await pull(store, reference, platform=parse_platform("linux/s390x"))
    with pytest.raises(ImageNotPulled, match="is for linux/amd64, not for linux/arm64"):
        await pull(store, f"{registry.host}/acme/base:1", platform=parse_platform("linux/arm64"))


async def test_what_is_not_there_is_told_by_its_name(registry, store):
    with pytest.raises(ImageNotPulled, match=f"{registry.host} has no image {registry.host}/acme/none:7") as told:
        await pull(store, f"{registry.host}/acme/none:7")
    assert told.value.status == 404
    assert store.catalog.names() == {}


async def test_an_account_is_asked_for_and_stays_unseen(tmp_path, store, monkeypatch):
    with running_registry(auth="basic") as registry:
        layout = Layout(tmp_path / "layout")
        layout.image([tar_of({"file": b"private"})])
        registry.push(layout.folder, "acme/private:1", "--dest-creds", f"{USER}:{PASSWORD}")
        reference = f"{registry.host}/acme/private:1"
        for auths in ({}, {"other.example": (USER, PASSWORD)}, {registry.host: (USER, "not-the-password")}):
            docker_config(tmp_path / "docker", auths)
            with pytest.raises(ImageNotPulled, match=f"refuses {reference}: 401.*docker login {registry.host}") as told:
                await pull(store, reference)
            assert "password" not in f"{told.value!r} {told.value} {told.value.__cause__!r}"
        login = ["skopeo", "login", "--tls-verify=false", "--username", USER, "--password-stdin", registry.host]
        file = tmp_path / "docker/config.json"  # as another program writes it
        file.unlink()
        subprocess.run([*login, "--authfile", str(file)], input=PASSWORD.encode(), check=True, capture_output=True)
        assert (await pull(store, reference)).fetched_layers == 1
        said = file.read_text()
        file.unlink()
        monkeypatch.setenv("DOCKER_AUTH_CONFIG", said)
        assert (await pull(store, reference)).fetched_layers == 0
        monkeypatch.delenv("DOCKER_AUTH_CONFIG")
        helper = tmp_path / "bin/docker-credential-of-tests"
        helper.parent.mkdir()
        answer = json.dumps({"Username": USER, "Secret": PASSWORD})
        helper.write_text(f"#!/bin/sh\n[ \"$(cat)\" = {registry.host} ] && [ $1 = get ] && echo '{answer}'\n")
        helper.chmod(0o755)
        file.write_text(json.dumps({"credHelpers": {registry.host: "of-tests"}}))
        with pytest.raises(ConfigError, match="docker-credential-of-tests, which is not installed"):
            await pull(store, reference)
        monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
        assert (await pull(store, reference)).digest.startswith("sha256:")


async def test_a_token_is_got_from_the_server_that_the_registry_names(tmp_path, store):
    (tmp_path / "signer").mkdir()
    with token_server(tmp_path / "signer") as tokens:
        auth = {
            "realm": f"http://{tokens.host}/token", "service": "tests", "issuer": "tests",
            "rootcertbundle": str(tmp_path / "signer/cert.pem"),
        }  # fmt: skip
        with running_registry(auth={"token": auth}) as registry:
            layout = Layout(tmp_path / "layout")
            layout.image([tar_of({"file": b"1"}), tar_of({"file": b"2"})])
            registry.push(layout.folder, "acme/private:1", "--dest-creds", f"{USER}:{PASSWORD}")
            tokens.seen.clear()
            reference = f"{registry.host}/acme/private:1"
            docker_config(tmp_path / "docker", {registry.host: (USER, PASSWORD)})
            with pytest.raises(ImageNotPulled, match=f"{tokens.host}, to which {registry.host} leads, is not asked"):
                await pull(store, reference)  # a server that the user did not name, and that is not public
            assert tokens.seen == []
            both = read_registries([registry.host, tokens.host])
            assert (await store.pull(reference, both)).fetched_layers == 2
            assert [path.partition("?")[2] for path, _ in tokens.seen] == [
                "service=tests&scope=repository%3Aacme%2Fprivate%3Apull"
            ]
            docker_config(tmp_path / "docker", {})
            with pytest.raises(ImageNotPulled, match="401.*who are you"):
                await store.pull(reference, both)


async def test_mirrors_are_asked_before_the_registry(registry, store, tmp_path):
    file = tmp_path / "settings/rollyard/registries.toml"
    file.parent.mkdir(parents=True)
    gone, mirror = "http://127.0.0.1:9", f"http://{registry.host}"
    file.write_text(f'pull = ["docker.io"]\n[mirrors]\n"docker.io" = ["{gone}", "{mirror}"]\n')
    done = await store.pull("hub:1", read_registries())
    assert done.fetched_layers == 1 and done.record.source == f"docker.io/library/hub@{done.digest}"
    assert (await store.find("docker.io/library/hub:1")).id == (await store.find("hub:1")).id
    file.write_text(f'[mirrors]\n"{registry.host}" = "http://127.0.0.1:9"\n')
    assert (await pull(store, f"{registry.host}/acme/base:1")).endpoint == mirror
    with pytest.raises(SandboxUnavailable, match=r"127.0.0.1:7 cannot be reached.*before that: 127.0.0.1:9 cannot"):
        await store.pull("127.0.0.1:7/acme/base:1", read_registries(["127.0.0.1:7"], mirrors={"127.0.0.1:7": [gone]}))
    file.write_text("pull = 'docker.io'\n")
    with pytest.raises(ConfigError, match=r"registries.toml: .*pull"):
        read_registries()


async def test_tls_is_checked(tmp_path):
    with running_registry(tls=make_certificate(tmp_path)) as registry:
        layout = Layout(tmp_path / "layout")
        layout.image([tar_of({"file": b"1"})])
        push(layout.folder, f"{registry.host}/acme/secret:1")
        reference = f"https://localhost:{registry.host.partition(':')[2]}/acme/secret:1"
        refused = await start_pull(reference, tmp_path / "home")
        said = (await refused.communicate())[0].decode()
        assert refused.returncode == 2 and "its certificate is not trusted" in said, said
        trusted = await start_pull(reference, tmp_path / "home", SSL_CERT_FILE=str(tmp_path / "cert.pem"))
        out, said = await trusted.communicate()
        assert trusted.returncode == 0, said
        assert json.loads(out)["fetched_layers"] == 1


async def test_a_broken_download_goes_on_where_it_broke(registry, store):
    size = len(LARGE["blob"])
    async with fault_proxy(f"http://{registry.host}") as (faults, address):
        for _ in range(2):
            faults.add("cut", BLOB, after=1 << 20)
        faults.add("refuse", BLOB)
        faults.add("refuse", r"GET /v2/acme/large/manifests/", status=429, retry_after="0")
        done = await pull(store, f"{address.removeprefix('http://')}/acme/large:1")
    assert (done.fetched_layers, [fault.hits for fault in faults.faults]) == (2, [1, 1, 1, 1])
    (_, lower) = (await store.resolve(done.record.id)).lowers
    assert (Path(lower) / "blob").read_bytes() == LARGE["blob"]
    ranges = [int(found[1]) for head in faults.heads if (found := re.search(r"(?i)\r\nrange: bytes=(\d+)-", head))]
    assert ranges and all(0 < start < size for start in ranges)


async def test_a_server_that_stays_away_is_asked_a_few_times(registry, store, tmp_path):
    known = await pull(ImageStore(tmp_path / "other"), f"{registry.host}/acme/large:1")
    layer = json.loads(registry.blob(known.digest).read_bytes())["layers"][0]["digest"]
    async with fault_proxy(f"http://{registry.host}") as (faults, address):
        away = faults.add("refuse", f".*/blobs/{layer}", times=1000)
        with pytest.raises(SandboxUnavailable, match="answered 503"):
            await pull(store, f"{address.removeprefix('http://')}/acme/large:1")
        assert away.hits == ATTEMPTS
        away.request, away.hits = ".*/manifests/", 0
        with pytest.raises(SandboxUnavailable, match="answered 503"):
            await pull(store, f"{address.removeprefix('http://')}/acme/large:1")
        assert away.hits == ATTEMPTS


async def test_bytes_that_are_not_what_they_are_named_are_not_used(tmp_path, store):
    with running_registry() as registry:
        layout = Layout(tmp_path / "layout")
        entry = layout.image([tar_of(LARGE)])
        registry.push(layout.folder, "acme/bad:1")
        manifest = registry.blob(entry["digest"])
        document = json.loads(manifest.read_bytes())
        for what, digest in (
            ("layer", document["layers"][0]["digest"]),
            ("configuration", document["config"]["digest"]),
        ):
            file = registry.blob(digest)
            kept = file.read_bytes()
            file.write_bytes(kept[:-20] + bytes(20))
            with pytest.raises(ImageNotPulled, match=f"a {what} has the digest sha256:.* not {digest[:19]}"):
                await pull(store, f"{registry.host}/acme/bad:1")
            file.write_bytes(kept)
            assert store.catalog.records() == [] and not list((store.root / "downloads").glob("*"))
        manifest.write_bytes(manifest.read_bytes().replace(b'"schemaVersion"', b' "schemaVersion"'))
        with pytest.raises((ImageNotPulled, SandboxUnavailable)):
            await pull(store, f"{registry.host}/acme/bad:1@{entry['digest']}")


async def test_processes_that_want_the_same_image_fetch_each_layer_once(registry, tmp_path):
    async with fault_proxy(f"http://{registry.host}") as (faults, address):
        reference = f"{address.removeprefix('http://')}/acme/large:1"
        faults.add("slow", BLOB, piece=1 << 14, times=100)
        pulls = [await start_pull(reference, tmp_path / "home") for _ in range(3)]
        said = [await one.communicate() for one in pulls]
    assert [one.returncode for one in pulls] == [0, 0, 0], said
    results = [json.loads(out) for out, _ in said]
    config = json.loads(registry.blob(results[0]["digest"]).read_bytes())["config"]["digest"]
    asked = [line.rpartition("/")[2] for line in faults.requests if re.match(BLOB, line)]
    layers = [digest for digest in asked if digest != config]
    assert sorted(layers) == sorted(set(layers)) and len(layers) == 2
    assert sum(one["fetched_layers"] for one in results) == 2


async def test_a_pull_that_was_killed_is_gone_on_with(registry, tmp_path):
    async with fault_proxy(f"http://{registry.host}") as (faults, address):
        reference = f"{address.removeprefix('http://')}/acme/large:1"
        held = faults.add("hold", BLOB, after=1 << 20, times=100)
        first = await start_pull(reference, tmp_path / "home")
        downloads = tmp_path / "home/downloads"
        await until(lambda: any(part.stat().st_size >= 1 << 19 for part in downloads.glob("*")), within=120)
        first.send_signal(signal.SIGKILL)
        await first.wait()
        held.times = 0
        faults.heads.clear()
        second = await start_pull(reference, tmp_path / "home")
        out, said = await second.communicate()
        assert second.returncode == 0, said
        assert any(re.search(r"(?i)\r\nrange: bytes=[1-9]", head) for head in faults.heads)
    image = json.loads(out)["record"]["id"]
    (_, lower) = (await ImageStore(tmp_path / "home").resolve(image)).lowers
    assert (Path(lower) / "blob").read_bytes() == LARGE["blob"]


async def test_what_was_fetched_of_a_layer_and_left_is_swept(store):
    (store.root / "downloads").mkdir()
    old, new = store.root / "downloads/old", store.root / "downloads/new"
    for part in (old, new):
        part.write_bytes(b"part")
    os.utime(old, (time.time() - 100, time.time() - 100))
    assert await store.sweep(unused_s=60) == ["old"]
    assert new.exists() and not old.exists()


async def test_pulls_of_one_machine_share_a_few_downloads(store, tmp_path):
    """Two images of three layers each, at once."""
    layout = Layout(tmp_path / "layout")
    manifests = {}
    for name in ("one", "two"):
        entry = layout.image([tar_of({f"{name}{n}": b"1"}) for n in range(3)])
        manifests[name] = (layout.folder / "blobs/sha256" / entry["digest"].removeprefix("sha256:")).read_bytes()
    layers = {layer["digest"] for data in manifests.values() for layer in json.loads(data)["layers"]}
    go, lock, active, most = threading.Event(), threading.Lock(), set(), [0]

    def answer(path, headers):
        repository, _, last = path.removeprefix("/v2/acme/").partition("/")
        if last.startswith("manifests/"):
            return 200, {}, manifests[repository]
        digest = last.removeprefix("blobs/")
        if digest in layers:
            with lock:
                active.add(digest)
                most[0] = max(most[0], len(active))
            go.wait(60)
            with lock:
                active.discard(digest)
        return 200, {}, (layout.folder / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes()

    with AnsweringServer(answer) as server:
        async with asyncio.TaskGroup() as group:
            for name in manifests:
                group.create_task(pull(store, f"{server.host}/acme/{name}:1"))
            await until(lambda: len(active) >= DOWNLOADS)
            await settle()
            go.set()
    assert most == [DOWNLOADS] and len(store.catalog.records()) == 2
