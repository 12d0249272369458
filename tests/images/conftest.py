"""One registry for all tests of this folder, with images that `skopeo` pushed."""

import os

import pytest

from tests.images.registry import Layout, running_registry, shell_files, tar_of

# `base` is a small root that programs run in; `child` is that and one layer more, which removes a file of it.
BASE = {"etc/marker": b"of the base\n", "etc/gone": b"x"}
CHILD = {"etc/marker": b"of the child\n", "etc/.wh.gone": b""}
LARGE = {"blob": os.urandom(3 << 20)}  # does not compress


@pytest.fixture(scope="session")
def registry(tmp_path_factory):
    with running_registry() as found:
        base = tar_of({**shell_files(), **BASE})
        config = {"Env": ["PATH=/bin", "FROM_IMAGE=yes"], "WorkingDir": "/app", "Cmd": ["sleep", "600"]}
        layout = Layout(tmp_path_factory.mktemp("base"))
        layout.image([base], config=config)
        found.push(layout.folder, "acme/base:1")
        found.push(layout.folder, "library/hub:1")
        found.push(layout.folder, "acme/base:docker", "--format", "v2s2")
        layout = Layout(tmp_path_factory.mktemp("child"))
        layout.image([base, tar_of(CHILD)], config=config)
        found.push(layout.folder, "acme/child:1")
        layout = Layout(tmp_path_factory.mktemp("large"))
        layout.image([tar_of(LARGE), tar_of({"small": b"1"})])
        found.push(layout.folder, "acme/large:1")
        yield found


@pytest.fixture(autouse=True)
def own_settings(tmp_path, monkeypatch):
    """No registry and no account of the user's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    for name in ("ROLLYARD_REGISTRIES", "DOCKER_AUTH_CONFIG"):
        monkeypatch.delenv(name, raising=False)
