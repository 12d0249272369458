"""Folders as public sets have them: what cannot be read is left out and named, and Harbor's older and newer spellings load."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.tasks.scaffold import new_task
from rollyard.testing.tasks import CheckOptions, load_each

ROLLYARD = str(Path(sys.executable).with_name("rollyard"))


@pytest.fixture
def folder(tmp_path):
    for name in ("alpha", "beta", "gamma"):
        new_task(tmp_path / "set" / name)
    return tmp_path / "set"


def rewrite(folder, old, new):
    toml = folder / "task.toml"
    assert old in toml.read_text()
    toml.write_text(toml.read_text().replace(old, new))


def test_a_task_that_cannot_be_read_is_left_out_and_named(folder):
    rewrite(folder / "beta", "[agent]", "[agnet]")
    found = ry.Taskset.load(folder)
    assert [task.id for task in found] == ["alpha", "gamma"]
    ((where, reason),) = found.skipped
    assert where == str(folder / "beta") and "agnet" in reason
    with pytest.raises(ConfigError, match="agnet"):
        ry.Taskset.load(folder, strict=True)


def test_one_task_alone_or_a_set_without_any_is_an_error(folder):
    for name in ("alpha", "beta", "gamma"):
        rewrite(folder / name, "[agent]", "[agnet]")
    with pytest.raises(ConfigError, match="agnet"):
        ry.Taskset.load(folder / "beta")
    with pytest.raises(ConfigError, match="none of 3 tasks can be read; the first: .*agnet"):
        ry.Taskset.load(folder)


@pytest.mark.parametrize("version", ["0.1", "1.4", "2.0"])
def test_a_version_says_nothing_that_its_keys_do_not(folder, version):
    rewrite(folder / "alpha", 'schema_version = "1.4"', f'version = "{version}"')
    assert ry.Taskset.load(folder / "alpha")[0].id == "alpha"
    rewrite(folder / "alpha", f'version = "{version}"', 'version = "new"')
    with pytest.raises(ConfigError, match="schema_version is written like"):
        ry.Taskset.load(folder / "alpha")


def test_the_time_for_an_agents_setup_is_that_of_its_installation(folder):
    rewrite(folder / "alpha", "[agent]\n", "[agent]\nsetup_timeout_sec = 77.0\n")
    (task,) = ry.Taskset.load(folder / "alpha")
    assert (task.limits.install, task.limits.agent) == (77.0, 600.0)


def test_of_two_tasks_with_one_name_the_later_has_its_folders(folder):
    for name in ("alpha", "gamma"):
        rewrite(folder / name, "[metadata]", '[task]\nname = "org/same"\n\n[metadata]')
    assert [task.id for task in ry.Taskset.load(folder)] == ["org/same", "beta", "gamma"]
    tasks, broken = load_each(str(folder), CheckOptions())
    assert [task.id for task in tasks] == ["org/same", "beta", "gamma"] and not broken


def test_an_unknown_key_of_the_package_is_told_and_left_out_others_are_refused(folder, caplog):
    rewrite(folder / "alpha", "[metadata]", '[task]\nname = "org/a"\nhomepage = "x"\n\n[metadata]')
    assert ry.Taskset.load(folder / "alpha")[0].id == "org/a"
    assert "keys=homepage" in caplog.text
    rewrite(folder / "alpha", "[verifier]\n", "[verifier]\nhomepage = 1\n")
    with pytest.raises(ConfigError, match="homepage"):
        ry.Taskset.load(folder / "alpha")


def test_an_ignore_file_acts_wherever_it_lies(folder):
    before = ry.Taskset.load(folder / "alpha")[0].digest
    (folder / "alpha" / "tests" / "extra.log").write_text("x")
    with_extra = ry.Taskset.load(folder / "alpha")[0].digest
    (folder / "alpha" / "tests" / ".harborignore").write_text("*.log\n")
    assert before != with_extra and ry.Taskset.load(folder / "alpha")[0].digest == before


def test_a_run_says_how_many_are_left_out_and_strict_stops_it(folder, tmp_path):
    rewrite(folder / "beta", "[agent]", "[agnet]")
    words = [ROLLYARD, "run", str(folder), "--agent", "oracle", "--limit", "3", "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and json.loads(done.stdout)["tasks"] == 2
    assert "tasks.left_out" in done.stderr and "left_out=1 of=3" in done.stderr
    strict = subprocess.run([*words, "--strict"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert strict.returncode == 2 and "agnet" in json.loads(strict.stdout)["message"]


@pytest.mark.adversarial
@pytest.mark.parametrize("more", [0, 60])
def test_files_that_no_reader_takes_leave_out_their_task_alone(tmp_path, more):
    """Few tasks are read one by one, many through an index."""
    broken = ["directory", "loop", "bytes", "deep", "zero", "pattern", "\x1b[31mred", "\udcff"]
    names = ["good", *broken, *(f"more-{n}" for n in range(more))]
    (folder := tmp_path / "set").mkdir()
    new_task(folder / "good")
    for name in names[1:]:
        shutil.copytree(folder / "good", folder / name)
    (folder / "directory" / "instruction.md").unlink()
    (folder / "directory" / "instruction.md").mkdir()
    (folder / "loop" / "solution" / "solve.sh").unlink()
    (folder / "loop" / "solution" / "solve.sh").symlink_to("solve.sh")
    (folder / "bytes" / "trajectory.json").write_bytes(b"\xff")
    with (folder / "deep" / "task.toml").open("a") as file:
        file.write("\n[metadata.a]\nb = " + "[" * 5000 + "]" * 5000 + "\n")
    with (folder / "zero" / "task.toml").open("a") as file:
        file.write('\n[[metadata.rollyard.files]]\npath = "/app/x"\nsource = "a\\u0000b"\n')
    (folder / "pattern" / ".gitignore").write_text("!\n")
    found = ry.Taskset.load(folder)
    shown = {*broken[:-2], r"\x1b[31mred", r"\xdcff"}
    assert {Path(one.folder).name for one in found.skipped} == shown, found.skipped
    assert len(found) == 1 + more
    with pytest.raises(ConfigError):
        ry.Taskset.load(folder, strict=True)


def test_tasks_stay_in_memory_where_the_cache_takes_nothing(tmp_path, monkeypatch):
    new_task(tmp_path / "set" / "first")
    for number in range(60):
        shutil.copytree(tmp_path / "set" / "first", tmp_path / "set" / f"more-{number}")
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "file" / "cache"))
    found = ry.Taskset.load(tmp_path / "set")
    assert len(found) == 61 and found["more-59"].id == "more-59"
