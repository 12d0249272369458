"""Harbor's own code and ours agree: its folders load here, ours load there, and digests are the same."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.tasks.harbor.load import load_folder
from rollyard.tasks.harbor.write import to_folder
from rollyard.tasks.network import asks_public
from rollyard.tasks.taskset import Taskset
from tests.plane.venvs import venv_or_skip

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"
# without the packages that only its agents need, one of which asks for a release that mirrors lack
PACKAGES = (
    *("certifi", "pydantic", "shortuuid", "typer", "requests", "pyyaml", "rich", "toml", "tenacity", "python-dotenv"),
    *(
        "jinja2",
        "dirhash",
        "packaging",
        "semver",
        "pathspec",
        "filelock",
        "platformdirs",
        "pyjwt",
        "jsonschema",
        "httpx",
    ),
    *("supabase", "fastapi", "uvicorn"),
)


def python312():
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in (shutil.which("python3.12"), *sorted(pyenv.glob("3.12*/bin/python3.12"))):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, timeout=30).returncode == 0:
            return str(candidate)
    pytest.skip("needs Python 3.12, which Harbor runs on")


@pytest.fixture(scope="module")
def harbor():
    """`harbor("load", folder)` -> its answer; the environment is made once and kept in the cache."""
    python = venv_or_skip("harbor", ["--no-deps", "harbor==0.25.0"], PACKAGES, python=python312())

    def run(*words, cwd=None):
        command = [python, Path(__file__).with_name("harbor_side.py"), *map(str, words)]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--no-pytest"],
        ["--verifier-mode", "shared"],
        ["--verifier-mode", "shared", "--no-pytest", "--no-solution"],
        ["--steps", "2"],
        [
            "--include-canary-strings",
            "--include-standard-metadata",
            "--description",
            'says "what"',
            "--author",
            "A <a@example.com>",
        ],
        ["--no-package"],
    ],
)
def test_folders_made_by_harbors_own_init_load(harbor, tmp_path, options):
    harbor("init", "acme/made", "--task", "--output-dir", tmp_path, *options)
    folder = tmp_path / "made"
    (theirs,) = json.loads(harbor("load", folder))
    task = load_folder(folder)
    assert asks_public(task)  # it writes network_mode = "public" out in full
    assert (task.id, task.digest) == (theirs["name"], theirs["digest"])
    assert len(task.steps) == len(theirs["meaning"]["steps"])
    verifier = task.verifier or task.steps[0].verifier
    assert verifier.grade == ("shared" if "shared" in options else "sealed")
    again = to_folder(task, tmp_path / "again" / "made")
    (same,) = json.loads(harbor("load", again))
    assert same["meaning"] == theirs["meaning"]


def test_a_dataset_made_by_harbor_loads_with_its_digests(harbor, tmp_path):
    harbor("init", "acme/set", "--dataset", "--output-dir", tmp_path)
    root = next(path.parent for path in tmp_path.rglob("dataset.toml"))
    harbor("init", "acme/one", "--task", "--output-dir", root, cwd=root)
    manifest = (root / "dataset.toml").read_text()
    if "acme/one" not in manifest:
        (theirs,) = json.loads(harbor("load", root / "one"))
        text = manifest.replace("tasks = []", "") + f'\n[[tasks]]\nname = "acme/one"\ndigest = "{theirs["digest"]}"\n'
        (root / "dataset.toml").write_text(text)
    assert [task.id for task in Taskset.load(root)] == ["acme/one"]


@pytest.mark.parametrize("kind", ["full", "steps", "simple"])
def test_folders_written_here_mean_the_same_to_harbor(harbor, folders, tmp_path, kind):
    task = load_folder(getattr(folders, kind)(tmp_path / "one"))
    (tmp_path / "one" / "environment").mkdir(exist_ok=True)
    written = to_folder(task, tmp_path / "two" / "one")
    (written / "environment").mkdir(exist_ok=True)
    theirs, ours = json.loads(harbor("load", tmp_path / "one", written))
    assert load_folder(written).digest == ours["digest"]
    assert theirs["name"] == ours["name"]
    left, right = theirs["meaning"], ours["meaning"]
    if kind == "full":  # the agent's own network is written as its environment's; its user id as text
        for meant in (left, right):
            for field in ("network_mode", "allowed_hosts"):
                del meant["environment"][field], meant["agent"][field]
            meant["judging"]["user"] = str(meant["judging"]["user"])
        assert right["metadata"].pop("rollyard") == left["metadata"].pop("rollyard")
    if left["environment"]["docker_image"] is None:  # no image and no Dockerfile: the host's own, which is written out
        left["environment"]["docker_image"] = "host"
        for place in (left.get("judging"), *(step["judging"] for step in left["steps"])):
            if place and place["place"] and not place["bundled"]:
                place["place"]["docker_image"] = "host"
    assert right == left


def test_the_examples_are_valid_harbor_tasks_with_the_same_digests(harbor):
    tasks = ry.Taskset.load(EXAMPLES)
    theirs = json.loads(harbor("load", *(task.source for task in tasks)))
    assert [task.digest for task in tasks] == [entry["digest"] for entry in theirs]
    assert [entry["name"] for entry in theirs if entry["valid"]] == [task.id for task in tasks]
