"""Layers: real packages from npm and PyPI, built once, relocatable, the same on every build, private to nobody inside."""

import asyncio
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rollyard.core.agent import LayerSpec
from rollyard.core.errors import CommandFailed, ConfigError, UnknownName
from rollyard.images.host_programs import build_env
from rollyard.images.layers import layer_prefix
from rollyard.images.store import ImageStore

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("layers")]
NPM = LayerSpec(npm=("semver@7.6.3",))
PIP = LayerSpec(pip=("packaging==24.2", "markdown-it-py==3.0.0"))

# Lays the layer's tree over /opt in a private mount namespace and runs a program there with an empty environment.
INSIDE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
uid, gid = os.getuid(), os.getgid()
if libc.unshare(0x10000000 | 0x00020000) != 0: sys.exit(77)
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write(f"0 {uid} 1"); open("/proc/self/gid_map", "w").write(f"0 {gid} 1")
if libc.mount(b"overlay", b"/opt", b"overlay", 1, f"lowerdir={sys.argv[1]}/opt:/opt,userxattr".encode()) != 0: sys.exit(78)
os.execve(sys.argv[2], sys.argv[2:], {"HOME": "/nonexistent", "PATH": "/nonexistent"})
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return ImageStore(tmp_path_factory.mktemp("layers"))


def inside(tree, *argv):
    done = subprocess.run([sys.executable, "-c", INSIDE, str(tree), *argv], capture_output=True, text=True, timeout=60)
    if done.returncode == 77:
        pytest.skip("user namespaces are not allowed on this machine")
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


async def test_npm_programs_run_with_the_layers_own_node_and_no_search_path(store):
    layer = await store.build_layer(NPM)
    out = inside(store.layers.tree(layer), f"{layer_prefix(layer)}/bin/semver", "-r", ">=2", "1.0.0", "2.1.0")
    assert out.strip() == "2.1.0"


async def test_pip_programs_run_with_the_layers_own_python(store):
    layer = await store.build_layer(PIP)
    tree, prefix = store.layers.tree(layer), layer_prefix(layer)
    assert "markdown-it-py" in inside(tree, f"{prefix}/bin/markdown-it", "--version")
    code = "import sys, ssl, sqlite3, packaging; print(sys.prefix, packaging.__file__, sep='\\n')"
    assert all(line.startswith(prefix) for line in inside(tree, f"{prefix}/bin/python3", "-c", code).split())


async def test_asking_again_builds_nothing(store):
    layer = await store.build_layer(NPM)
    before = (store.layers.dir / layer).stat().st_ino
    assert await store.layer(npm=["semver@7.6.3"]) == layer
    assert (store.layers.dir / layer).stat().st_ino == before


def write_wheel(path, text):
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("mine.py", text)
        wheel.writestr("mine-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
        wheel.writestr("mine-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("mine-1.dist-info/RECORD", "")


@pytest.mark.parametrize("form", [pytest.param("{}", marks=pytest.mark.slow), "mine @ file://{}"])
async def test_a_package_that_is_a_file_is_built_again_when_the_file_changes(store, tmp_path, form):
    wheel = tmp_path / "mine-1-py3-none-any.whl"
    write_wheel(wheel, "x = 1")
    first = await store.layer(pip=[form.format(wheel)])
    assert await store.layer(pip=[form.format(wheel)]) == first
    write_wheel(wheel, "x = 2")
    second = await store.layer(pip=[form.format(wheel)])
    assert [file.read_text() for file in store.layers.tree(second).rglob("mine.py")] == ["x = 2"] and second != first


async def test_two_builds_of_one_spec_are_the_same_layer(store, tmp_path):
    other = ImageStore(tmp_path / "other")
    assert await other.build_layer(NPM) == await store.build_layer(NPM)


async def test_builders_at_the_same_time_share_one_build(tmp_path):
    store = ImageStore(tmp_path / "store")
    layers = await asyncio.gather(*(ImageStore(store.root).build_layer(NPM) for _ in range(3)))
    assert len(set(layers)) == 1
    assert [path.name for path in store.layers.dir.iterdir()] == [layers[0]]


async def test_the_lock_names_what_came_with_its_checksum(store):
    npm = {found.name: found for found in store.layer_record(await store.build_layer(NPM)).npm}
    assert (npm["semver"].version, npm["semver"].integrity[:7]) == ("7.6.3", "sha512-")
    pip = {found.name: found for found in store.layer_record(await store.build_layer(PIP)).pip}
    assert pip["packaging"].version == "24.2"
    assert all(found.integrity.startswith("sha256:") for found in pip.values())
    assert "mdurl" in pip  # what came along is in the lock too


async def test_a_changed_file_is_found_by_verify(tmp_path, store):
    layer = await store.build_layer(NPM)
    assert await store.layers.verify(layer) == []
    other = ImageStore(tmp_path / "other")
    assert await other.build_layer(NPM) == layer
    victim = next(other.layers.tree(layer).rglob("semver.js"))
    victim.write_text("evil")
    assert await other.layers.verify(layer) == [str(victim.relative_to(other.layers.tree(layer)))]


async def test_files_are_readable_by_any_user_and_name_no_build_directory(store):
    for spec in (NPM, PIP):
        layer = await store.build_layer(spec)
        tree = store.layers.tree(layer)
        for path in tree.rglob("*"):
            if not path.is_symlink():
                wanted = 0o755 if path.is_dir() else 0o444
                assert path.stat().st_mode & wanted == wanted, path
                assert not path.stat().st_mode & 0o7022, path
        scripts = (path for path in (tree / layer_prefix(layer)[1:] / "bin").iterdir() if path.stat().st_size < 100_000)
        assert not any(str(store.root).encode() in path.read_bytes() for path in scripts)


async def test_layers_lie_on_top_of_an_image_the_last_one_topmost(store):
    npm, pip = await store.build_layer(NPM), await store.build_layer(PIP)
    lowers = (await store.resolve("host", [npm, pip])).lowers
    assert lowers[:2] == (str(store.layers.tree(pip)), str(store.layers.tree(npm)))


async def test_a_snapshot_remembers_its_layers(store, tmp_path):
    layer = await store.build_layer(NPM)
    (tmp_path / "upper").mkdir()
    snap = await store.add_snapshot("host", {"/": tmp_path / "upper"}, layers=[layer])
    plain, again = await store.resolve(snap), await store.resolve(snap, [layer])
    assert plain.lowers == again.lowers
    assert str(store.layers.tree(layer)) in plain.lowers


async def test_a_package_that_does_not_exist_is_an_error_with_the_managers_words(store):
    with pytest.raises(CommandFailed) as caught:
        await store.layer(npm=["@rollyard-nobody/does-not-exist@9.9.9"])
    assert caught.value.exit_code not in (0, None)
    assert "does-not-exist" in str(caught.value)
    assert not list(store.layers.dir.glob(".new-*"))


@pytest.mark.parametrize("spec", [{}, {"npm": ["--global"]}, {"pip": [""]}])
async def test_an_empty_or_option_like_request_is_refused(store, spec):
    with pytest.raises(ConfigError):
        await store.layer(**spec)


async def test_an_unknown_layer_or_python_says_what_to_do(store):
    with pytest.raises(UnknownName, match=r"images\.layer"):
        await store.resolve("host", ["ly_nothing"])
    with pytest.raises(UnknownName):
        await store.resolve("host", ["../../etc"])
    with pytest.raises(ConfigError, match=r"python3\.99"):
        await store.layer(python="3.99")


@pytest.mark.adversarial
def test_install_scripts_see_no_key_of_the_caller(tmp_path):
    code = "from pathlib import Path; from rollyard.images.host_programs import build_env; print(build_env(Path.cwd()))"
    env = dict(os.environ, OPENAI_API_KEY="sk-canary", AWS_SECRET_ACCESS_KEY="canary", GITHUB_TOKEN="canary")
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert "canary" not in out
    assert build_env(tmp_path)["HOME"] == str(tmp_path)


@pytest.mark.slow
async def test_a_node_that_this_machine_does_not_have_comes_from_pypi(store):
    layer = await store.layer(node="24")
    out = inside(store.layers.tree(layer), f"{layer_prefix(layer)}/bin/node", "--version")
    assert out.startswith("v24.")


@pytest.mark.slow
@pytest.mark.agent
async def test_an_agent_with_a_native_binary_starts_from_its_layer(store):
    layer = await store.layer(npm=["@openai/codex@0.166.0"])
    assert "0.166.0" in inside(store.layers.tree(layer), f"{layer_prefix(layer)}/bin/codex", "--version")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no distribution Python on this machine")
async def test_a_layer_may_carry_another_python(store):
    out = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
    )
    layer = await store.layer(pip=["packaging==24.2"], python=out.stdout.strip())
    code = "import packaging, sys; print(sys.version_info[:2])"
    assert inside(store.layers.tree(layer), f"{layer_prefix(layer)}/bin/python3", "-c", code)
