"""Removing a layer: gone at once for whoever opens, there to the end for whoever has opened."""

import json
import subprocess
import sys

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.images.layers import layer_prefix

LAYER = "ly_" + "0a" * 12


@pytest.fixture
def layer(backend):
    place = backend.images.layers.dir / LAYER / "root" / layer_prefix(LAYER).lstrip("/")
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "tool").write_text("#!/bin/sh\necho a tool\n")
    (place / "bin" / "tool").chmod(0o755)
    return LAYER


@pytest.mark.anyio
async def test_an_open_sandbox_keeps_a_removed_layer_and_no_other_gets_it(backend, layer):
    tool = f"{layer_prefix(layer)}/bin/tool"
    async with backend.open(ry.SandboxSpec(layers=(layer,))) as box:
        if not box.capabilities.layers:
            pytest.skip(f"layers need namespaces; isolation here is {box.info.isolation}")
        assert await backend.images.remove(layer) == [layer]
        assert backend.images.layers.ids() == []
        assert (await box.exec([tool], timeout=30)).stdout == b"a tool\n"
        assert await backend.images.sweep() == []
        assert (await box.exec([tool], timeout=30)).stdout == b"a tool\n"
    with pytest.raises(UnknownName):
        await backend.images.remove(layer)
    assert len(await backend.images.sweep(unused_s=-1)) == 1
    assert list(backend.images.layers.dir.iterdir()) == []


@pytest.mark.anyio
async def test_a_layer_that_a_snapshot_stands_on_is_not_removed(backend, layer, tmp_path):
    (tmp_path / "upper").mkdir()
    snapshot = await backend.images.add_snapshot("host", {"/": tmp_path / "upper"}, layers=[layer])
    with pytest.raises(ConfigError, match=snapshot):
        await backend.images.remove(layer)
    await backend.images.remove(snapshot)
    assert await backend.images.remove(layer) == [layer]


def test_the_command_takes_a_layers_id(tmp_path):
    place = tmp_path / "layers" / LAYER / "root"
    place.mkdir(parents=True)
    main = [sys.executable, "-c", "from rollyard.cli.main import main; main()"]
    done = subprocess.run(
        [*main, "image", "rm", LAYER, "--json"], env={"ROLLYARD_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["forgotten"] == [LAYER]
    assert not place.exists()
