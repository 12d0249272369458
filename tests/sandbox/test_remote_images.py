"""Images of hosted backends: a Dockerfile is built once and found by its content, a layer is baked once, limits are compared."""

from contextlib import asynccontextmanager

import msgspec
import pytest

from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.sandbox import Resources, SandboxSpec
from rollyard.sandbox import backend as make
from rollyard.sandbox.remote.images import name_image
from tests.plane.e2b_server import serving as e2b_serving
from tests.sandbox import sdks
from tests.sandbox.remote_servers import serving

pytestmark = pytest.mark.anyio
KEY = "e2b_" + "0" * 40
NAMES = [
    "e2b",
    "hf",
    *(pytest.param(name, marks=[] if sdks.ready(name) else [pytest.mark.slow]) for name in ("daytona", "prime")),
    pytest.param("runloop", marks=pytest.mark.slow),
]
DOCKERFILE = """ARG BASE=host
FROM ${BASE}
ENV COLOUR=blue
WORKDIR /srv/app
COPY . /srv/app/
RUN echo made-$COLOUR > made.txt
"""


@asynccontextmanager
async def hosted(name, local):
    """The backend against a server with local sandboxes, and what opens it a second time."""
    if name == "e2b":
        pytest.importorskip("e2b", reason="the e2b SDK is not installed")
        async with e2b_serving(local) as url:
            yield lambda: make("e2b", url=url, key=KEY, isolation="namespace")
    else:
        async with serving(name, local) as server:
            yield lambda: make(name, **server.options)


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "task" / "environment"
    place.mkdir(parents=True)
    (place / "Dockerfile").write_text(DOCKERFILE)
    (place / "a.txt").write_text("copied")
    return place


async def build(backend, folder):
    return await backend.build_image(str(folder), resources=Resources(), timeout_s=120)


async def said(backend, image):
    async with backend.open(SandboxSpec(image=image, boot_s=120)) as box:
        return (await box.exec("cat made.txt a.txt; pwd; echo $COLOUR", timeout=30)).text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.ordinary("e2b")
async def test_a_dockerfile_means_the_same_everywhere_and_is_built_once(name, backend, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "cache"))
    async with hosted(name, backend) as again:
        async with again() as first:
            image = await build(first, folder)
            assert await said(first, image) == "made-blue\ncopied/srv/app\nblue\n"
        async with again() as second:  # another process: nothing is known but what the provider keeps
            assert await build(second, folder) == image
            assert await said(second, image) == "made-blue\ncopied/srv/app\nblue\n"
            baking = [record for record in backend.images.catalog.records() if record.kind == "snapshot"]
            assert len(baking) == (0 if name == "hf" else 1)
            (folder / "a.txt").write_text("changed")
            other = await build(second, folder)
            assert other != image
            assert "changed" in await said(second, other)
            removed = await second.remove_baked()
            assert len(removed) == (0 if name == "hf" else 2)
            assert all(one.startswith("rollyard-task-") for one in removed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.ordinary("e2b")
async def test_a_layer_is_baked_once_and_is_there_in_every_sandbox(name, backend, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "layer").mkdir()
    (tmp_path / "layer" / "tool").write_text("#!/bin/sh\necho tool\n")
    (tmp_path / "layer" / "tool").chmod(0o755)
    layer = {"title": "agent", "source": str(tmp_path / "layer"), "prefix": "/opt/tools", "resources": Resources()}
    async with hosted(name, backend) as again, again() as remote:
        baked = await remote.bake_layer("host", "ly_1", **layer)
        if name == "hf":
            assert baked is None
            return
        assert await remote.bake_layer("host", "ly_1", **layer) == baked
        assert await remote.bake_layer("host", "ly_2", **layer) != baked
        assert len([record for record in backend.images.catalog.records() if record.kind == "snapshot"]) == 2
        async with remote.open(SandboxSpec(image=baked)) as box:
            assert (await box.exec("/opt/tools/tool", timeout=30)).text == "tool\n"
        assert len(await remote.remove_baked()) == 2


@pytest.mark.parametrize("name", NAMES)
async def test_a_working_directory_that_is_not_there_is_made(name, backend):
    async with hosted(name, backend) as again, again() as remote:
        async with remote.open(SandboxSpec(workdir="/not/there/yet")) as box:
            assert (await box.exec("pwd", timeout=30)).text == "/not/there/yet\n"


async def test_a_reference_becomes_a_template_once_and_limits_are_compared(backend):
    await backend.images.add("host", names=["registry.example/team/tool:1"])
    limits = Resources(memory_mb=512)
    name = name_image("registry.example/team/tool:1", b"registry.example/team/tool:1", msgspec.json.encode(limits))
    async with hosted("e2b", backend) as again, again() as remote:
        for _ in range(2):
            spec = SandboxSpec(image="registry.example/team/tool:1", resources=limits)
            async with remote.open(spec) as box:
                assert box.info.image == "registry.example/team/tool:1"
                with pytest.raises(Unsupported, match="resources.memory_mb=512, and 1024 was asked for"):
                    await remote.open(SandboxSpec(image=name, resources=Resources(memory_mb=1024)))
        assert len(backend.images.catalog.records()) == 1
        with pytest.raises(Unsupported, match="resources.disk_mb"):
            remote.open(SandboxSpec(resources=Resources(disk_mb=100)))
        with pytest.raises(ConfigError, match="no image named 'registry.example/none:1'"):
            await remote.open(SandboxSpec(image="registry.example/none:1"))
