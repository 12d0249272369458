"""A task's author is not trusted with the host: what a task from elsewhere may try is refused, until the user says otherwise."""

import io
import itertools
import json
import stat
import subprocess
import sys
import tarfile
import uuid
import zipfile
from functools import partial

import msgspec
import pytest

import rollyard as ry
from rollyard.core.agent import LayerSpec
from rollyard.core.errors import CommandFailed, ConfigError, Unsupported
from rollyard.images.layers import Layers
from rollyard.policy.scripted_policy import scripted
from rollyard.runs.rollout.layer_commands import run_apart
from rollyard.tasks.harbor.compose import read_services
from rollyard.tasks.layers import layer_spec
from rollyard.tasks.lint import lint

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]

PLACE = '[metadata.rollyard]\ngrade = "sealed"\n{}\n[environment]\ndocker_image = "host"\nworkdir = "/app"\n'
SECRET = PLACE.format("") + 'env = { LEAK = "${HOST_SECRET:-nothing}" }\n'
SHOWS = {
    "solution/solve.sh": '#!/bin/sh\necho "$LEAK" > /app/leak\n',
    "tests/test.sh": "#!/bin/sh\ngrep -c 'very secret' /app/leak > /logs/verifier/reward.txt\n",
}


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """A user of its own, who works in `own`; everything beside it comes from elsewhere."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOST_SECRET", "very secret")
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path / "own")
    return tmp_path / "state" / "rollyard" / "trusted-tasks"


async def reward(task, backend, agent="oracle", **options):
    return (await ry.run_rollout(task, agent=agent, policy=scripted([]), sandbox=backend, **options)).reward


async def test_a_variable_of_the_host_stays_there_unless_it_is_named(folders, backend, tmp_path):
    (task,) = ry.Taskset.load(folders.simple(tmp_path / "elsewhere", SECRET, **SHOWS))
    assert not task.trusted
    assert await reward(task, backend) == 0.0
    assert await reward(task, backend, env=["HOST_SECRET"]) == 1.0
    assert await reward(task, backend, trust_tasks=True) == 1.0
    (own,) = ry.Taskset.load(folders.simple(tmp_path / "own" / "task", SECRET, **SHOWS))
    assert own.trusted
    assert await reward(own, backend) == 1.0


async def test_a_variable_that_is_needed_says_how_it_is_given(folders, backend, tmp_path):
    toml = PLACE.format("") + 'env = { LEAK = "${HOST_SECRET}" }\n'
    (task,) = ry.Taskset.load(folders.simple(tmp_path / "elsewhere", toml, **SHOWS))
    done = await ry.run_rollout(task, agent="oracle", policy=scripted([]), sandbox=backend)
    assert done.reward is None
    assert "HOST_SECRET" in done.failure.message
    assert "--env HOST_SECRET" in done.failure.hint


async def test_a_variable_reaches_neither_verifier_nor_tool_servers(folders, backend, tmp_path):
    toml = PLACE.format("") + '[verifier.env]\nLEAK = "${HOST_SECRET:-nothing}"\n'
    script = '#!/bin/sh\n[ "$LEAK" = nothing ]\necho $((1 - $?)) > /logs/verifier/reward.txt\n'
    (task,) = ry.Taskset.load(folders.simple(tmp_path / "elsewhere", toml, **{"tests/test.sh": script}))
    assert await reward(task, backend) == 1.0


async def test_trust_is_remembered_for_exactly_these_files(folders, tmp_path, state):
    folder = folders.simple(tmp_path / "elsewhere", SECRET, **SHOWS)
    assert not ry.Taskset.load(folder)[0].trusted
    assert ry.Taskset.load(folder, trust_tasks=True)[0].trusted
    assert ry.Taskset.load(folder)[0].trusted
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    (folder / ".gitignore").write_text("tests/\n")
    (folder / "tests" / "more.py").write_text("changed")
    assert not ry.Taskset.load(folder)[0].trusted


async def test_a_link_in_the_working_directory_makes_nothing_the_users_own(folders, tmp_path):
    folders.simple(tmp_path / "elsewhere", SECRET)
    (tmp_path / "own" / "link").symlink_to(tmp_path / "elsewhere")
    assert not ry.Taskset.load("link")[0].trusted


def rows(tmp_path, **row):
    (tmp_path / "secret.txt").write_text("host secret")
    folder = tmp_path / "elsewhere"
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text(json.dumps({"instruction": "x", **row}) + "\n")
    return folder / "rows.jsonl"


@pytest.mark.parametrize(
    "row",
    [
        {"files": [{"path": "x", "source": "SECRET"}]},
        {"files": [{"path": "x", "source": "linked.txt"}]},
        {"build": "OUTSIDE"},
        {"solution": "OUTSIDE"},
        {"verifier": {"kind": "harbor", "tests": ["OUTSIDE"]}},
        {"verifier": {"kind": "diff", "options": {"folder": "OUTSIDE"}}},
        {"verifier": {"kind": "commands", "site": {"build": "OUTSIDE"}, "options": {"commands": "true"}}},
        {"steps": [{"name": "a", "instruction": "x", "workdir_files": "OUTSIDE"}]},
        {"image": "OUTSIDE"},
        {"image": "~root"},
        {"verifier": {"kind": "commands", "site": {"image": "OUTSIDE"}, "options": {"commands": "true"}}},
        {"build": "OUTSIDE/odd"},
    ],
    ids=lambda row: json.dumps(row)[:40],
)
async def test_a_row_names_no_file_of_the_host(tmp_path, row):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "linked.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "memory").symlink_to("/proc/self/mem")  # whoever reads it fails: nothing outside is read
    text = json.dumps(row).replace("SECRET", str(tmp_path / "secret.txt")).replace("OUTSIDE", str(tmp_path))
    path = rows(tmp_path, **json.loads(text.replace("linked.txt", str(elsewhere / "linked.txt"))))
    with pytest.raises(ConfigError, match="is outside"):
        ry.Taskset.load(path)
    assert ry.Taskset.load(path, trust_tasks=True)[0].trusted


async def test_a_link_out_of_a_rows_folder_is_not_read_for_its_name(tmp_path):
    (tmp_path / "elsewhere" / "context").mkdir(parents=True)
    (tmp_path / "elsewhere" / "context" / "memory").symlink_to("/proc/self/mem")
    (task,) = ry.Taskset.load(rows(tmp_path, build=str(tmp_path / "elsewhere" / "context")))
    assert task.digest and not task.trusted


@pytest.mark.parametrize("line", ["FROM OUTSIDE", "FROM host\nCOPY --from=OUTSIDE secret.txt /app/leak"])
async def test_a_dockerfile_names_no_folder_of_the_host(folders, backend, tmp_path, line):
    (tmp_path / "secret.txt").write_text("very secret")
    toml = PLACE.format("").replace('docker_image = "host"\n', "")
    dockerfile = f"{line}\nWORKDIR /app\n".replace("OUTSIDE", str(tmp_path))
    (task,) = ry.Taskset.load(
        folders.simple(tmp_path / "elsewhere", toml, **{"environment/Dockerfile": dockerfile, **SHOWS})
    )
    done = await ry.run_rollout(task, agent="nop", policy=scripted([]), sandbox=backend)
    assert done.reward is None and "an image has a name" in done.failure.message


BOMB = "x: [&a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1], " + ", ".join(
    f"&{name} [{', '.join([f'*{before}'] * 10)}]" for before, name in itertools.pairwise("abcdefghij")
)
COMPOSE = {
    "a folder of the host": "  db:\n    image: OUTSIDE\n",
    "a folder of the host, built": "  db:\n    build: OUTSIDE\n",
    "aliases without end": f"  db:\n    image: *j\n{BOMB}]\n",
    "a value of another kind": "  db:\n    x-rollyard: 5\n",
    "a volume of another kind": "volumes: {d: 5}\n",
    "a number that is none": "  db: {cpus: abc}\n",
}


@pytest.mark.parametrize("attack", COMPOSE)
def test_a_compose_file_names_nothing_of_the_host_and_breaks_no_reader(tmp_path, attack):
    lines = COMPOSE[attack].replace("OUTSIDE", str(tmp_path))
    if attack == "aliases without end":  # an alias comes after what it stands for
        service, _, bomb = lines.partition("x: ")
        lines = f"x: {bomb}services:\n  main: {{}}\n{service}"
    else:
        lines = f"services:\n  main: {{}}\n{lines}"
    (tmp_path / "docker-compose.yaml").write_text(lines)
    with pytest.raises((ConfigError, Unsupported)):
        read_services(str(tmp_path / "docker-compose.yaml"))


@pytest.mark.parametrize("field", [{"trusted": True}, {"host_env": ["HOST_SECRET"]}])
async def test_a_row_cannot_call_itself_trusted(tmp_path, field):
    with pytest.raises(ConfigError, match="unknown field"):
        ry.Taskset.load(rows(tmp_path, **field))


@pytest.mark.parametrize("part", ["instruction.md", "environment", "environment/Dockerfile", "solution", "task.toml"])
@pytest.mark.parametrize("trust_tasks", [False, True])
async def test_no_part_of_a_task_folder_is_a_link_out_of_it(folders, tmp_path, part, trust_tasks):
    folder = folders.simple(tmp_path / "elsewhere", SECRET)
    place = folder / part
    target = tmp_path / "kept"
    if place.exists():
        place.rename(target)
    else:
        place.parent.mkdir(exist_ok=True)
        target.write_text("FROM host\n")
    place.symlink_to(target)
    with pytest.raises(ConfigError, match="a link leads out of the task folder"):
        ry.Taskset.load(folder, trust_tasks=trust_tasks)


CODE = "import pathlib, os\npathlib.Path(os.environ['MARK']).touch()\ndef check(sandbox, rollout): return 1.0\ntasks = ['x']\n"


async def test_python_of_a_task_does_not_run_in_this_process(tmp_path, backend, monkeypatch):
    mark = tmp_path / "mark"
    monkeypatch.setenv("MARK", str(mark))
    path = rows(tmp_path)
    (path.parent / "evil.py").write_text(CODE)
    path = rows(tmp_path, verifier={"kind": "python", "options": {"ref": f"{path.parent}/evil.py:check"}})
    (task,) = ry.Taskset.load(path)
    assert not [finding for finding in lint(task) if finding.level == "error"]
    assert await reward(task, backend, agent="nop") is None  # in its sandbox there is no MARK
    with pytest.raises(ConfigError, match="would run here"):
        ry.Taskset.load(path.parent / "evil.py")
    assert not mark.exists()
    assert await reward(task, backend, agent="nop", trust_tasks=True) == 1.0
    assert mark.exists()


def source_archive(folder, mark, name):
    """A package without a wheel, whose setup.py runs when it is asked for anything."""
    code = f"import pathlib, setuptools\npathlib.Path({str(mark)!r}).touch()\n"
    code += f"setuptools.setup(name='{name}', version='1')\n"
    folder.mkdir()
    with tarfile.open(folder / f"{name.replace('-', '_')}-1.tar.gz", "w:gz") as archive:
        for file, text in {
            "setup.py": code,
            "PKG-INFO": f"Metadata-Version: 1.0\nName: {name}\nVersion: 1\n",
        }.items():
            member = tarfile.TarInfo(f"{name.replace('-', '_')}-1/{file}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


async def test_packages_that_an_untrusted_task_names_run_no_code_here(tmp_path, sandbox_root, backend, monkeypatch):
    name = f"rollyard-evil-{uuid.uuid4().hex[:8]}"  # of this run: layers outlive it
    source_archive(tmp_path / "archives", tmp_path / "ran", name)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "archives"))
    layers = Layers(sandbox_root)
    with pytest.raises(CommandFailed, match="rollyard-evil"):
        await layers.build(layer_spec(f"pip:{name}==1", sandboxed=True), apart=partial(run_apart, backend))
    assert not (tmp_path / "ran").exists()
    await layers.build(layer_spec(f"pip:{name}==1"))
    assert (tmp_path / "ran").exists()


def evil_wheel(folder, mark, name, members):
    """A wheel whose files land where programs of the layer are, not only among its packages."""
    folder.mkdir(exist_ok=True)
    stem = f"{name.replace('-', '_')}-1"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for member, text in members.items():
            info = zipfile.ZipInfo(member.replace("STEM", stem))
            info.external_attr = 0o100755 << 16
            wheel.writestr(info, text.replace("MARK", str(mark)))
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


MINOR = f"python3.{sys.version_info.minor}"
EVIL = {
    "evil_module.py": "x = 1\n",
    "STEM.data/scripts/python3": "#!/bin/sh\n: > MARK\n",
    f"STEM.data/data/lib/{MINOR}/compileall.py": "open('MARK', 'w')\n",
    "evil.pth": "import os; open('MARK', 'w')\n",
    "sitecustomize.py": "open('MARK', 'w')\n",
}


@pytest.mark.slow
async def test_a_wheel_of_an_untrusted_task_runs_no_code_here(tmp_path, sandbox_root, backend, monkeypatch):
    name = f"rollyard-evil-{uuid.uuid4().hex[:8]}"
    evil_wheel(tmp_path / "archives", tmp_path / "ran", name, EVIL)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "archives"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    layers = Layers(sandbox_root)
    layer = await layers.build(layer_spec(f"pip:{name}==1", sandboxed=True), apart=partial(run_apart, backend))
    assert not (tmp_path / "ran").exists()
    assert list(layers.tree(layer).rglob("evil_module.py"))


@pytest.mark.slow
async def test_a_layer_is_the_same_wherever_it_is_installed(tmp_path, sandbox_root, backend, monkeypatch):
    name = f"rollyard-honest-{uuid.uuid4().hex[:8]}"
    evil_wheel(tmp_path / "archives", tmp_path / "ran", name, {"honest_module.py": "x = 1\n"})
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "archives"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    layers = Layers(sandbox_root)
    apart = await layers.build(layer_spec(f"pip:{name}==1", sandboxed=True), apart=partial(run_apart, backend))
    assert apart == await layers.build(layer_spec(f"pip:{name}==1"))
    assert layers.record(apart).pip[0].integrity.startswith("sha256")


SCRIPTS = {
    "a file of the host": ("touch MARK; echo made > made.txt", None),
    "a link of a folder": ("rm -rf ../../../bin; ln -s TARGET ../../../bin", "became a link"),
    "a link among packages": ("ln -s TARGET ../.cache", "became a link"),
    "a failure": ("exit 3", "exit code"),
}


@pytest.mark.parametrize(
    "attack", [next(iter(SCRIPTS)), *(pytest.param(name, marks=pytest.mark.slow) for name in list(SCRIPTS)[1:])]
)
async def test_an_npm_script_of_an_untrusted_task_runs_in_a_sandbox(attack, tmp_path, sandbox_root, backend):
    mark, target, package = tmp_path / "ran", tmp_path / "target", tmp_path / "evil"
    package.mkdir()
    target.mkdir()
    (target / "kept").touch()
    script, refused = SCRIPTS[attack]
    script = script.replace("MARK", str(mark)).replace("TARGET", str(target))
    fields = {"name": "evil", "version": "1.0.0", "description": uuid.uuid4().hex, "scripts": {"install": script}}
    (package / "package.json").write_text(json.dumps(fields))
    subprocess.run(["npm", "pack", "--silent", "./evil"], cwd=tmp_path, check=True, timeout=60, capture_output=True)
    layers = Layers(sandbox_root)
    spec = LayerSpec(npm=(f"file:{tmp_path}/evil-1.0.0.tgz",), sandboxed=True)
    with pytest.raises(ConfigError, match="in a sandbox"):
        await layers.build(spec)
    if refused is not None:
        with pytest.raises(ry.Error, match=refused):
            await layers.build(spec, apart=partial(run_apart, backend))
    else:
        layer = await layers.build(spec, apart=partial(run_apart, backend))
        assert [file.read_text() for file in layers.tree(layer).rglob("made.txt")] == ["made\n"]
    assert not mark.exists()
    assert [path.name for path in target.iterdir()] == ["kept"]
    if attack == "a file of the host":  # packages that the user chose
        await layers.build(LayerSpec(npm=spec.npm))
        assert mark.exists()


async def test_a_tasks_identity_does_not_depend_on_trust(tmp_path):
    path = rows(tmp_path)
    (task,), (trusted,) = ry.Taskset.load(path), ry.Taskset.load(path, trust_tasks=True)
    assert task.digest == trusted.digest
    assert msgspec.structs.replace(task, trusted=True) == trusted
