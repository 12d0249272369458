"""Registries, images and tasks that mean harm: what they name is not dialled, not read, not sent a password, not unpacked.

The answers of `AnsweringServer` are those of Debian's `docker-registry`, but for what each test says."""

import gzip
import hashlib
import json
import os

import pytest

from rollyard.core.errors import ConfigError, ImageNotPulled, UnknownName
from rollyard.core.limits import Deadline
from rollyard.core.task import Site
from rollyard.images import pull as pulling
from rollyard.images.reference import canonical_name, parse_reference
from rollyard.images.registries import parse_registry, read_registries
from rollyard.images.store import ImageStore
from rollyard.runs.rollout.provision import Provision
from rollyard.sandbox import backend
from tests.images.registry import AnsweringServer, Layout, docker_config, sha256, tar_of

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@pytest.fixture
def store(tmp_path):
    return ImageStore(tmp_path / "store")


class Image:
    """One image as a registry answers for it."""

    def __init__(self, tar, *, diff_id=None, layer=None):
        self.blobs = {}
        packed = gzip.compress(tar, 1)
        config = {
            "architecture": "amd64",
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [diff_id or sha256(tar)]},
        }
        layer = {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", **self.add(packed), **(layer or {})}
        config = {"mediaType": "application/vnd.oci.image.config.v1+json", **self.add(json.dumps(config).encode())}
        document = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer]}
        self.manifest = json.dumps(document).encode()

    def add(self, data):
        self.blobs[sha256(data)] = data
        return {"digest": sha256(data), "size": len(data)}

    def answer(self, path, headers):
        if "/manifests/" in path:
            return 200, {"Content-Type": MANIFEST}, self.manifest
        found = self.blobs.get(path.rpartition("/")[2])
        return (200, {}, found) if found is not None else (404, {}, b"")


async def pull(store, server, *others):
    reference = f"{server.host}/acme/app:1"
    return await store.pull(reference, read_registries([server.host, *others]))


INSIDE = [
    "http://127.0.0.9:1/latest",
    "https://127.0.0.9/x",
    "https://[::1]/x",
    "http://127.0.0.1:22/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:1/",
]


@pytest.mark.parametrize("inside", INSIDE)
async def test_a_registry_leads_to_no_address_inside(store, inside):
    image = Image(tar_of({"file": b"1"}))

    def redirect(path, headers):
        return (307, {"Location": inside}, b"") if "/blobs/" in path else image.answer(path, headers)

    def challenge(path, headers):
        return 401, {"WWW-Authenticate": f'Bearer realm="{inside}",service="s"'}, b""

    for answer in (redirect, challenge):
        with AnsweringServer(answer) as server:
            with pytest.raises(ImageNotPulled, match="is not asked"):
                await pull(store, server)


async def test_a_password_goes_to_the_server_it_is_for_and_nowhere_else(store, tmp_path):
    image = Image(tar_of({"file": b"1"}))
    with AnsweringServer(image.answer, "127.0.0.2") as other:

        def answer(path, headers):
            if headers.get("Authorization") is None:
                return 401, {"WWW-Authenticate": 'Basic realm="tests"'}, b""
            if "/blobs/" in path:
                return 307, {"Location": f"http://{other.host}{path}"}, b""
            return image.answer(path, headers)

        with AnsweringServer(answer) as server:
            docker_config(tmp_path / "docker", {server.host: ("user", "secret"), other.host: ("user", "other")})
            await pull(store, server, other.host)
            assert any("authorization" in headers for _, headers in server.seen)
    assert other.seen and not any("authorization" in headers for _, headers in other.seen)


@pytest.mark.parametrize("name", ["127.1", "0x7f.0.0.1", "2130706433", "127.0.0.1.", "[::ffff:127.0.0.1]"])
async def test_no_other_spelling_of_an_address_gets_past(store, name):
    with AnsweringServer(Image(tar_of({})).answer) as server:
        reference = f"{name}:{server.host.partition(':')[2]}/acme/app:1"
        with pytest.raises(ConfigError, match="is not asked|is not pulled|names no image"):
            await store.pull(reference, read_registries(["http://*"]))
        assert server.seen == []


async def test_a_task_dials_no_registry_that_the_user_did_not_name(tmp_path):
    with AnsweringServer(Image(tar_of({"file": b"1"})).answer) as server:
        folder = tmp_path / "build"
        folder.mkdir()
        (folder / "Dockerfile").write_text(f"FROM {server.host}/acme/app:1\n")
        async with backend("local", root=tmp_path / "home") as local:
            provision, deadline = Provision.of(local), Deadline.after(60, "boot")
            for pull_from in ((), ("docker.io",), (server.host.replace("127.0.0.1", "127.0.0.2"),), ("*",)):
                site = Site(image=f"{server.host}/acme/app:1", pull=pull_from)
                await provision.image(site, local, deadline)
                with pytest.raises(
                    UnknownName, match=rf"rollyard image pull {server.host}/acme/app:1.*--pull {server.host}"
                ):
                    await provision.images.resolve(site.image)
                with pytest.raises(ConfigError, match="no image named"):
                    await provision.image(Site(build=str(folder), pull=pull_from), local, deadline)
        assert server.seen == []


@pytest.mark.parametrize("diff_id", ["sha256:../../../../../../etc", "sha256:..", "../x", "sha256:" + "g" * 64, ""])
async def test_a_layer_is_named_by_a_digest_and_by_no_path(store, tmp_path, diff_id):
    with AnsweringServer(Image(tar_of({"file": b"1"}), diff_id=diff_id or "sha256:").answer) as server:
        with pytest.raises(ConfigError, match="only sha256 digests are known"):
            await pull(store, server)
    layout = Layout(tmp_path / "layout")
    layout.image([tar_of({"file": b"1"})], diff_ids=[diff_id or "sha256:"])
    with pytest.raises(ConfigError, match="only sha256 digests are known"):
        await store.add(str(layout.folder))


async def test_what_is_larger_than_it_says_or_than_may_be_is_not_unpacked(store, monkeypatch):
    image = Image(tar_of({"zeros": bytes(8 << 20)}))
    with AnsweringServer(image.answer) as server:
        monkeypatch.setattr(pulling, "MAX_LAYER_BYTES", 1 << 20)
        with pytest.raises(ImageNotPulled, match="more than 1,048,576 bytes when it is unpacked"):
            await pull(store, server)
        monkeypatch.setattr(pulling, "MAX_IMAGE_BYTES", 100)
        with pytest.raises(ImageNotPulled, match="bytes of layers, more than 100"):
            await pull(store, server)
    monkeypatch.undo()
    assert not list((store.root / "trees").iterdir()) and not list((store.root / "downloads").iterdir())
    grown = Image(tar_of({"file": os.urandom(1000)}), layer={"size": 10})
    with AnsweringServer(grown.answer) as server:
        with pytest.raises(ImageNotPulled, match="sent more than the 10 bytes"):
            await pull(store, server)
    with AnsweringServer(lambda path, headers: (200, {}, b"[" * (9 << 20))) as server:
        with pytest.raises(ImageNotPulled, match="sent more than"):
            await pull(store, server)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"}, "foreign layer"),
        ({"urls": ["http://127.0.0.1:9/"]}, "foreign layer"),
        ({"mediaType": "application/vnd.oci.image.layer.v1.tar+encrypted"}, "of a kind that is not known"),
        ({"digest": "sha512:" + "0" * 128}, "only sha256"),
        ({"digest": "sha256:../../x"}, "only sha256"),
        ({"size": -1}, "-1 bytes"),
        ({"size": "many"}, "sent no manifest"),
    ],
)
async def test_a_layer_that_cannot_be_had_is_refused_by_what_it_is(store, change, said):
    with AnsweringServer(Image(tar_of({}), layer=change).answer) as server:
        with pytest.raises(ImageNotPulled, match=said):
            await pull(store, server)
        assert not any("/blobs/" in path for path, _ in server.seen)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b"\xff", b'{"schemaVersion": 1}', b'{"manifests": [{}]}', b"[" * 100_000]
)
async def test_a_manifest_that_is_none_is_an_error_of_ours(store, body):
    with AnsweringServer(lambda path, headers: (200, {}, body)) as server:
        with pytest.raises(ImageNotPulled):
            await pull(store, server)


async def test_a_server_that_was_named_with_tls_is_not_asked_without(store):
    image = Image(tar_of({"file": b"1"}))
    with AnsweringServer(image.answer) as other:

        def answer(path, headers):
            return (
                (307, {"Location": f"http://{other.host}{path}"}, b"")
                if "/blobs/" in path
                else image.answer(path, headers)
            )

        with AnsweringServer(answer) as server:
            with pytest.raises(ImageNotPulled, match="is not asked: it is not reached over TLS"):
                await pull(store, server, f"https://{other.host}")
            assert other.seen == []
            await pull(store, server, f"http://{other.host}")


async def test_a_redirect_without_end_ends(store):
    with AnsweringServer(lambda path, headers: (302, {"Location": path}, b"")) as server:
        with pytest.raises(ImageNotPulled, match="redirects without end"):
            await pull(store, server)
        assert len(server.seen) < 10


def test_references_have_one_meaning():
    digest = "sha256:" + hashlib.sha256(b"").hexdigest()
    assert (
        canonical_name("python")
        == canonical_name("docker.io/library/python:latest")
        == "docker.io/library/python:latest"
    )
    assert canonical_name("index.docker.io/acme/app:1") == "docker.io/acme/app:1"
    assert canonical_name("Registry.example:5000/a/b") == "registry.example:5000/a/b:latest"
    assert canonical_name(f"localhost/app:1@{digest}") == f"localhost/app@{digest}"
    bad = (
        "",
        "a b",
        "UPPER",
        "a@sha256:12",
        f"a@{digest}x",
        "a:b:c",
        "-x",
        "../x",
        "/etc",
        "a//b",
        "a/../b",
        "http://a/b",
        "a\n",
        "a:" + "t" * 129,
        "u:p@h/x",
        "a?b",
        "a#b",
        "a%2e",
    )
    assert [name for name in bad if canonical_name(name) is not None] == []
    with pytest.raises(ConfigError, match="names no image of a registry"):
        parse_reference("a b")


def test_plain_http_is_for_the_loopback_and_where_it_is_said():
    assert [
        parse_registry(text).secure for text in ("localhost:5000", "127.0.0.1", "[::1]:5000", "http://a.example")
    ] == [False] * 4
    assert [parse_registry(text).secure for text in ("a.example", "10.0.0.1:5000", "https://localhost")] == [True] * 3
    for bad in ("ftp://a.example", "a b", "a.example:99999", ""):
        with pytest.raises(ConfigError):
            parse_registry(bad)
