"""Agents from anywhere: a folder, an archive, or what commands made once in a sandbox."""

from __future__ import annotations

import tarfile

import pytest

import rollyard as ry
from rollyard import agents
from rollyard.core.agent import Agent, LayerSpec
from rollyard.core.errors import ConfigError
from rollyard.core.sandbox import SandboxSpec
from rollyard.core.task import Task
from rollyard.images.store import ImageStore
from rollyard.runs.rollout.provision import Provision
from tests.runs.conftest import CHECK
from tests.runs.test_hosted_tasks import hosted_backend

pytestmark = pytest.mark.anyio
SCRIPT = "#!/bin/sh\ncat $(dirname $0)/../share/word > out.txt\n"


@pytest.fixture
def program(tmp_path):
    """A program with a file of its own, as a folder."""
    root = tmp_path / "program"
    (root / "bin").mkdir(parents=True)
    (root / "share").mkdir()
    (root / "bin/mine").write_text(SCRIPT)
    (root / "bin/mine").chmod(0o755)
    (root / "share/word").write_text("hello\n")
    return root


@pytest.fixture
async def store_backend(tmp_path):
    async with ry.sandbox.backend("local", root=tmp_path / "images") as opened:
        yield opened


def agent(**layer):
    return Agent(name="mine", layer=LayerSpec(**layer), argv=("{prefix}/bin/mine",))


async def solve(backend, one):
    done = await ry.run_rollout("x", agent=one, sandbox=backend, verify=CHECK)
    assert done.failure is None, (done.failure, done.install)
    return done


async def test_a_folder_is_an_agents_layer_and_other_bytes_are_another(store_backend, program):
    assert (await solve(store_backend, agent(folder=str(program)))).reward == 1.0
    (program / "share/word").write_text("something else\n")
    assert (await solve(store_backend, agent(folder=str(program)))).reward == 0.0
    assert len(store_backend.images.layers.ids()) == 2


@pytest.mark.parametrize("mode", ["w", "w:gz"])
async def test_an_archive_is_an_agents_layer(store_backend, program, tmp_path, mode):
    with tarfile.open(tmp_path / "program.tar", mode) as archive:
        archive.add(program, arcname=".")
    assert (await solve(store_backend, agent(archive=str(tmp_path / "program.tar")))).reward == 1.0


async def test_commands_make_a_layer_once_in_a_sandbox_of_their_own(store_backend, program):
    commands = (
        "mkdir -p $PREFIX && cp -R bin $PREFIX/",
        "mkdir $PREFIX/share; echo hello > $PREFIX/share/word; date +%N > $PREFIX/at",
    )
    one = agent(folder=str(program / "."), commands=commands)
    assert (await solve(store_backend, one)).reward == 1.0
    assert (await solve(store_backend, one)).reward == 1.0
    assert len(store_backend.images.layers.ids()) == 1  # a second build would have another time in it
    assert await store_backend.list({"rollyard.role": "layer"}) == []


async def test_a_command_that_fails_is_an_install_that_failed(store_backend):
    done = await ry.run_rollout("x", agent=agent(commands=("echo out; echo why >&2; exit 4",)), sandbox=store_backend)
    assert (done.failure.stage, done.failure.cause, done.failure.retry) == ("install", "AgentInstallFailed", True)
    assert [(one.exit_code, one.stdout, one.stderr) for one in done.install] == [(4, "out\n", "why\n")]


async def test_a_source_that_is_not_there_is_named(store_backend, tmp_path):
    for layer in ({"folder": str(tmp_path / "none")}, {"archive": str(tmp_path / "none")}):
        done = await ry.run_rollout("x", agent=agent(**layer), sandbox=store_backend)
        assert "is not there" in done.failure.message and not done.failure.retry
    with pytest.raises(ConfigError, match="not from both"):
        LayerSpec(folder="a", archive="b")


async def test_an_agents_file_names_a_folder_beside_it(store_backend, program, tmp_path):
    (tmp_path / "mine.toml").write_text('name = "mine"\nargv = ["{prefix}/bin/mine"]\n[layer]\nfolder = "program"\n')
    assert (await solve(store_backend, agents.get(str(tmp_path / "mine.toml")))).reward == 1.0


@pytest.mark.parametrize(("version", "used"), [("1.2.3", "image"), ("1.2", "layer"), ("9.9.9", "layer")])
async def test_an_agent_in_the_image_is_used_when_its_version_is_right(store_backend, program, version, used):
    """The image is the host's with one program more; what the layer holds says another word."""
    async with store_backend.open(SandboxSpec(image="host")) as box:
        await box.write(
            "/usr/local/bin/mine", "#!/bin/sh\necho mine v1.2.3\necho from the image > out.txt\n", mode=0o755
        )
        image = await box.snapshot()
    one = Agent(
        name="mine", version=version, layer=LayerSpec(folder=str(program)), check=("{prefix}/bin/mine", "--version"),
        argv=("{prefix}/bin/mine",),
    )  # fmt: skip
    for prebaked in (True, False):
        done = await ry.run_rollout(
            Task(id="t", instruction="x", image=image, workdir="/work"), agent=one, sandbox=store_backend,
            prebaked=prebaked, collect=["out.txt"],
        )  # fmt: skip
        assert done.failure is None, done.failure
        word = b"from the image\n" if prebaked and used == "image" else b"hello\n"
        assert done.files["/work/out.txt"] == word
        assert len(store_backend.images.layers.ids()) == (0 if prebaked and used == "image" else 1)
    assert await store_backend.list({"rollyard.role": "look"}) == []


async def test_an_agent_that_cannot_be_looked_for_is_refused(store_backend, program):
    with pytest.raises(ConfigError, match="has no check"):
        await ry.run_rollout("x", agent=agent(folder=str(program)), sandbox=store_backend, prebaked=True)


@pytest.mark.parametrize("name", ["e2b", "hf"])
@pytest.mark.ordinary("e2b")
async def test_hosted_sandboxes_use_the_images_agent_and_build_nothing_on_the_host(
    name, tmp_path, program, monkeypatch
):
    """Nobody asked: a look comes before an upload. Another version is baked or uploaded, and then there is no look for it."""
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "Dockerfile").write_text("FROM host\nCOPY mine /usr/local/bin/mine\nRUN chmod 755 /usr/local/bin/mine\n")
    (folder / "mine").write_text("#!/bin/sh\necho mine v1.2.3\necho image > out.txt\n")
    async with hosted_backend(name, tmp_path) as hosted:
        provision = Provision(ImageStore(tmp_path / "layers"))
        for version, prebaked, word in (("1.2.3", None, "image"), ("1.2.3", False, "hello"), ("9.9.9", None, "hello")):
            one = Agent(
                name="mine", version=version, layer=LayerSpec(folder=str(program)),
                check=("{prefix}/bin/mine", "--version"), argv=("{prefix}/bin/mine",),
            )  # fmt: skip
            done = await ry.run_rollout(
                Task(id="t", instruction="x", workdir="/work", build=str(folder)), agent=one, sandbox=hosted,
                prebaked=prebaked, provision=provision, collect=["out.txt"], limits=ry.Limits(boot=60.0),
            )  # fmt: skip
            assert done.failure is None, done.failure
            assert done.files["/work/out.txt"].decode() == f"{word}\n", version
            assert len(provision.images.layers.ids()) == (word != "image")
        assert await hosted.list({"rollyard.role": "look"}) == []
        looked = [key for key in provision.prebaked if key[2] == "9.9.9"]
        assert len(looked) == (1 if name == "hf" else 0)  # e2b has the baked image of the rollout before
