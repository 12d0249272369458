"""A large set is read once: what has not changed comes from the index, what has is read again."""

import json
import os
import shutil
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from rollyard.core.errors import ConfigError
from rollyard.tasks.dataset_registry import DatasetEntry, add_dataset
from rollyard.tasks.harbor.index import FolderIndex
from rollyard.tasks.harbor.load import load_folder
from rollyard.tasks.scaffold import new_task
from rollyard.tasks.taskset import Taskset

MANY = 60


@pytest.fixture
def folders(tmp_path):
    first = new_task(tmp_path / "set" / "task-00")
    for number in range(1, MANY):
        shutil.copytree(first, tmp_path / "set" / f"task-{number:02}")
    return sorted((tmp_path / "set").iterdir())


def load(folders, tmp_path, settled_s=0.0):
    with FolderIndex({folder.parent for folder in folders}, tmp_path / "cache", settled_s=settled_s) as index:
        return [index.load(folder) for folder in folders]


def forge(tmp_path):
    """Let the index say another instruction, as a sign that a task came from there."""
    (file,) = (tmp_path / "cache" / "datasets" / "indexes").iterdir()
    code, entries = msgspec.msgpack.decode(file.read_bytes())
    for entry in entries.values():
        entry[1]["instruction"] = "from the index"
    file.write_bytes(msgspec.msgpack.encode([code, entries]))


def test_a_task_from_the_index_is_the_task(folders, tmp_path):
    read = [load_folder(folder) for folder in folders]
    assert load(folders, tmp_path) == read
    assert load(folders, tmp_path) == read
    forge(tmp_path)
    assert {task.instruction for task in load(folders, tmp_path)} == {"from the index"}


def rewrite(folder):
    (folder / "instruction.md").write_text("Another thing, of whatever length it is.\n")


def put_same_size(folder):
    file = folder / "instruction.md"
    text, before = file.read_bytes(), file.stat()
    file.write_bytes(text[::-1])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def add_test(folder):
    (folder / "tests" / "more.txt").write_text("x")


def remove_solution(folder):
    shutil.rmtree(folder / "solution")


def swap_for_link(folder):
    (folder / "tests" / "test.sh").rename(folder / "tests" / "real.sh")
    (folder / "tests" / "test.sh").symlink_to("real.sh")


@pytest.mark.parametrize("change", [rewrite, put_same_size, add_test, remove_solution, swap_for_link])
def test_a_folder_that_changed_is_read_again(folders, tmp_path, change):
    load(folders, tmp_path)
    forge(tmp_path)
    change(folders[7])
    found = load(folders, tmp_path)
    assert found[7] == load_folder(folders[7]) and found[7].instruction != "from the index"
    assert found[8].instruction == "from the index"


def test_a_folder_that_breaks_is_an_error_though_it_was_fine(folders, tmp_path):
    load(folders, tmp_path)
    (folders[3] / "task.toml").write_text("[environment]\ncpuz = 1\n")
    with pytest.raises(ConfigError, match="cpuz"):
        load(folders, tmp_path)


def test_what_changed_a_moment_ago_is_not_kept(folders, tmp_path):
    load(folders, tmp_path, settled_s=3600.0)
    assert not (tmp_path / "cache").exists()


def test_an_index_of_other_code_or_of_no_sense_is_not_used(folders, tmp_path):
    load(folders, tmp_path)
    (file,) = (tmp_path / "cache" / "datasets" / "indexes").iterdir()
    file.write_bytes(b"no index")
    assert load(folders, tmp_path)[0] == load_folder(folders[0])
    forge(tmp_path)
    code, entries = msgspec.msgpack.decode(file.read_bytes())
    file.write_bytes(msgspec.msgpack.encode([b"other", entries]))
    assert load(folders, tmp_path)[0] == load_folder(folders[0])


def test_folders_that_an_adapter_made_are_indexed_too(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLYARD_DATASETS", str(tmp_path / "datasets.toml"))
    row = {
        "prompt": "def f():\n",
        "canonical_solution": "    return 1\n",
        "test": "def check(f): ...\n",
        "entry_point": "f",
    }
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**row, "task_id": f"t{n}"}) + "\n" for n in range(3)))
    add_dataset(DatasetEntry(name="rows", source=str(tmp_path / "rows.jsonl"), adapter="functions"))
    read = list(Taskset.load("rows", cache=tmp_path / "cache"))
    load([Path(task.source) for task in read], tmp_path)
    assert list(Taskset.load("rows", cache=tmp_path / "cache")) == read
    forge(tmp_path)
    assert {task.instruction for task in Taskset.load("rows", cache=tmp_path / "cache")} == {"from the index"}


def test_loading_takes_no_more_memory_than_a_few_times_its_tasks(folders, tmp_path):
    load(folders[:1], tmp_path)  # what is imported and compiled once
    for _ in range(2):  # read from the files, then from the index
        tracemalloc.start()
        try:
            tasks = load(folders, tmp_path)
            kept, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(tasks) == MANY
        assert kept < MANY * 20_000
        assert peak < 4 * kept
