"""A large set is read once: what has not changed comes from the index, what has is read again."""

import contextlib
import json
import os
import pickle
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest

from rollyard.core.errors import ConfigError
from rollyard.tasks.dataset_registry import DatasetEntry, add_dataset
from rollyard.tasks.harbor.index import FolderIndex
from rollyard.tasks.harbor.load import load_folder
from rollyard.tasks.packed_tasks import FEWEST
from rollyard.tasks.rows import as_task
from rollyard.tasks.scaffold import new_task
from rollyard.tasks.taskset import Taskset
from tests.memory import trace_memory

MANY = 90


@pytest.fixture
def folders(tmp_path):
    first = new_task(tmp_path / "set" / "task-00")
    for number in range(1, MANY):
        shutil.copytree(first, tmp_path / "set" / f"task-{number:02}")
    return sorted((tmp_path / "set").iterdir())


def load(folders, tmp_path, settled_s=0.0):
    with FolderIndex({folder.parent for folder in folders}, tmp_path / "cache", settled_s=settled_s) as index:
        return [index.load(folder) for folder in folders]


def open_index(tmp_path):
    (file,) = (tmp_path / "cache" / "datasets" / "indexes").iterdir()
    return sqlite3.connect(file, isolation_level=None)


def forge(tmp_path):
    """Let the index say another instruction, as a sign that a task came from there."""
    with contextlib.closing(open_index(tmp_path)) as base:
        for folder, data in base.execute("SELECT folder, task FROM folders").fetchall():
            task = {**msgspec.msgpack.decode(data), "instruction": "from the index"}
            base.execute("UPDATE folders SET task = ? WHERE folder = ?", (msgspec.msgpack.encode(task), folder))


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
    file.write_bytes(b"no index" * 1000)
    assert load(folders, tmp_path)[0] == load_folder(folders[0])
    forge(tmp_path)
    with contextlib.closing(open_index(tmp_path)) as base:
        base.execute("PRAGMA user_version = 7")
    assert load(folders, tmp_path)[0] == load_folder(folders[0])


def test_an_index_that_is_being_written_is_waited_for_or_not_used(folders, tmp_path):
    load(folders, tmp_path)
    forge(tmp_path)
    with contextlib.closing(open_index(tmp_path)) as base:
        base.execute("BEGIN IMMEDIATE")  # readers may still read
        assert load(folders, tmp_path)[0].instruction == "from the index"


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


def growth(make, few, many):
    """Bytes that each further task costs: those that stay, and those at the most."""
    measured = []
    for count in (few, few, many):  # the first is for what is imported and compiled once
        with trace_memory() as traced:
            tasks = make(count)
            measured.append((*traced(), len(tasks)))
        assert len(tasks) == count
    (kept, peak, _), (more_kept, more_peak, _) = measured[1:]
    return (more_kept - kept) / (many - few), (more_peak - peak) / (many - few)


def test_a_set_of_folders_stays_on_disk(folders, tmp_path):
    load(folders, tmp_path)
    kept, peak = growth(lambda n: Taskset.load(tmp_path / "set", cache=tmp_path / "cache", limit=n), FEWEST, MANY)
    assert kept < 400
    assert peak < 1000


def test_a_set_of_rows_stays_on_disk(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"id": f"row-{n}", "instruction": "x" * 5000}) + "\n" for n in range(600)))
    kept, peak = growth(lambda n: Taskset.load(rows, limit=n), 100, 600)
    assert kept < 400
    assert peak < 1000


@pytest.fixture
def rows(tmp_path):
    """As many tasks as are packed, one of them with a function that is never encoded."""
    made = [{"id": f"row-{number:03}", "instruction": f"do {number}"} for number in range(2 * FEWEST)]
    made[3]["metadata"] = {"pair": (1, 2)}  # a tuple would come back as a list
    return made


def test_a_packed_set_is_the_set_that_was_given(rows):
    packed, plain = Taskset(rows), [as_task(row) for row in rows]
    assert list(packed) == plain and len(packed) == len(plain)
    assert packed[-1] == plain[-1] and packed["row-003"].metadata == {"pair": (1, 2)}
    assert list(packed[10:70:3]) == plain[10:70:3]
    assert packed[10:70:3]["row-013"] == plain[13]
    assert [task.id for task in packed.filter("row-00?")] == [f"row-00{number}" for number in range(10)]
    assert list(packed.filter(lambda task: task.instruction.endswith("7"))) == plain[7::10]
    assert packed.shuffle(7).digest == Taskset(plain[::-1]).shuffle(7).digest != packed.digest
    assert list(pickle.loads(pickle.dumps(packed))) == plain
    with pytest.raises(IndexError):
        packed[len(plain)]
    with pytest.raises(ConfigError, match="two tasks are named 'row-003'"):
        Taskset([*rows, rows[3]])
