"""Tasksets: every form tasks come in, with errors that name the row, and one identity per content."""

import json
import subprocess
import sys
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollyard as ry
from rollyard.core import toml
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.core.task import VerifierSpec
from rollyard.tasks.host_variables import references, resolve_env, resolve_text


def test_a_folder_of_folders_is_a_taskset_in_name_order(folders, tmp_path):
    for name in ("b", "a", "org/c"):
        folders.simple(tmp_path / name)
    (tmp_path / "notes").mkdir()
    tasks = ry.Taskset.load(tmp_path)
    assert [task.id for task in tasks] == ["a", "b", "c"]
    assert tasks["b"].source == str(tmp_path / "b")
    assert [task.id for task in tasks.filter("[ab]")] == ["a", "b"]
    assert [task.id for task in tasks.limit(1)] == ["a"]
    assert [t.id for t in tasks.shuffle(3)] == [t.id for t in ry.Taskset(reversed(tasks)).shuffle(3)]
    with pytest.raises(UnknownName, match="did you mean 'a'"):
        tasks["aa"]


def test_two_rows_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two tasks are named 'same'"):
        ry.Taskset([{"id": "same", "instruction": "x"}, {"id": "same", "instruction": "y"}])


def test_a_dataset_checks_its_digests(folders, tmp_path):
    folders.simple(tmp_path / "one", '[task]\nname = "acme/one"\n')
    folders.simple(tmp_path / "two")
    digest = ry.Taskset.load(tmp_path / "one")[0].digest
    manifest = f"[dataset]\nname = 'acme/set'\n[[tasks]]\nname = 'acme/one'\ndigest = '{digest}'\n"
    (tmp_path / "dataset.toml").write_text(manifest)
    assert [task.id for task in ry.Taskset.load(tmp_path)] == ["acme/one"]
    (tmp_path / "one" / "instruction.md").write_text("changed\n")
    with pytest.raises(ConfigError, match=r"tasks\[0\]\.digest.*pinned"):
        ry.Taskset.load(tmp_path / "dataset.toml")
    (tmp_path / "dataset.toml").write_text(manifest.replace("acme/one", "acme/none"))
    with pytest.raises(ConfigError, match=r"tasks\[0\]\.name.*acme/none"):
        ry.Taskset.load(tmp_path)


def test_a_datasets_files_are_checked_too(tmp_path):
    (tmp_path / "metric.py").write_text("x = 1\n")
    bad = "sha256:" + "0" * 64
    (tmp_path / "dataset.toml").write_text(
        f"[dataset]\nname = 'a/b'\n[[files]]\npath = 'metric.py'\ndigest = '{bad}'\n"
    )
    with pytest.raises(ConfigError, match=r"files\[0\]\.digest"):
        ry.Taskset.load(tmp_path / "dataset.toml")


def test_a_registry_gives_local_and_git_tasks(folders, tmp_path):
    folders.simple(tmp_path / "local")
    repo = folders.simple(tmp_path / "repo" / "tasks" / "remote").parents[1]
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-C", str(repo)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "tasks"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    entry = {"name": "remote", "path": "tasks/remote", "git_url": f"file://{repo}", "git_commit_id": commit}
    registry = [
        {"name": "set", "version": "1.0", "description": "", "tasks": [{"name": "here", "path": "local"}, entry]},
        {"name": "other", "version": "2", "description": "", "tasks": []},
    ]
    (tmp_path / "registry.json").write_text(json.dumps(registry))
    tasks = ry.Taskset.load(f"{tmp_path}/registry.json#set", cache=tmp_path / "cache")
    assert [task.id for task in tasks] == ["here", "remote"]
    assert tasks["here"].digest == tasks["remote"].digest
    with pytest.raises(ConfigError, match=r"set@1\.0, other@2"):
        ry.Taskset.load(tmp_path / "registry.json")
    registry[0]["tasks"][1]["git_commit_id"] = "HEAD"
    (tmp_path / "registry.json").write_text(json.dumps(registry))
    with pytest.raises(ConfigError, match="must name a commit"):
        ry.Taskset.load(f"{tmp_path}/registry.json#set")


def test_rows_are_tasks_and_errors_name_the_line(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instruction": "a", "verify": "true"}\n\n{"id": 7, "instruction": "b", "files": {"x": "y"}}\n')
    first, second = ry.Taskset.load(rows)
    assert first.id.startswith("task-")
    assert first.verifier == VerifierSpec(kind="commands", options={"commands": ["true"]})
    assert second.id == "7"
    assert second.files[0].data == b"y"
    for bad, said in [
        ('{"instruction": 1}', "instruction"),
        ('{"prompt": "x"}', "instruction: the task has none"),
        ('{"instruction": "x", "cpus": 1}', "unknown field 'cpus'"),
        ('{"instruction": "x", "limits": {"agent": "long"}}', r"limits\.agent"),
        ("[1]", "not list"),
        ("{", "not JSON"),
    ]:
        rows.write_text('{"instruction": "fine"}\n' + bad + "\n")
        with pytest.raises(ConfigError, match=said) as caught:
            ry.Taskset.load(rows)
        assert f"{rows}:2" in str(caught.value)


def test_a_row_is_identified_by_its_content(tmp_path):
    (tmp_path / "f").write_text("1")
    row = {"instruction": "x", "files": [{"path": "f", "source": str(tmp_path / "f")}]}
    one, same = ry.Taskset([row])[0], ry.Taskset([dict(row)])[0]
    assert (one.id, one.digest) == (same.id, same.digest)
    (tmp_path / "f").write_text("2")
    assert ry.Taskset([row])[0].digest != one.digest


def test_python_tasksets_by_file_module_and_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(
        "import rollyard as ry\n"
        "@ry.verifier\nasync def good(sandbox, rollout):\n    return 1.0\n"
        "def load():\n"
        "    n = 0\n"
        "    while True:\n"
        "        yield {'id': f't{n}', 'instruction': 'x', 'verifier': good}\n"
        "        n += 1\n"
        "few = ['do a', ry.Task(id='b', instruction='do b')]\n"
    )
    endless = ry.Taskset.load(file, limit=3)
    assert [task.id for task in endless] == ["t0", "t1", "t2"]
    assert endless[0].verifier.options["ref"] == f"{file}:good"
    assert [task.instruction for task in ry.Taskset.load(f"{file}:few")] == ["do a", "do b"]
    assert len(ry.Taskset.load(["one", {"instruction": "two"}])) == 2
    sys.modules["mine_as_module"] = next(m for m in sys.modules.values() if getattr(m, "__file__", "") == str(file))
    try:
        assert len(ry.Taskset.load("mine_as_module:few")) == 2
    finally:
        del sys.modules["mine_as_module"]
    with pytest.raises(ConfigError, match="no nothing in this file"):
        ry.Taskset.load(f"{file}:nothing")


def test_what_cannot_be_loaded_says_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        ry.Taskset.load(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no task folders"):
        ry.Taskset.load(tmp_path)
    with pytest.raises(UnknownName):
        ry.Taskset.load("no-such-taskset")
    (tmp_path / "broken.py").write_text("1/0\n")
    with pytest.raises(ConfigError, match=r"broken\.py: ZeroDivisionError"):
        ry.Taskset.load(tmp_path / "broken.py")


def test_env_templates_are_resolved_late_and_missing_ones_are_named():
    env = {"A": "${X}", "B": "${Y:-fallback}", "C": "literal ${X}", "D": "${Z:-}"}
    assert resolve_env(env, {"X": "1"}, where="task") == {"A": "1", "B": "fallback", "C": "literal ${X}", "D": ""}
    assert references(env) == ["X"]
    with pytest.raises(ConfigError, match=r"task\.A needs X"):
        resolve_env(env, {}, where="task")
    assert resolve_text("Bearer ${T}-${U:-u}", {"T": "t"}, where="header") == "Bearer t-u"


_values = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), _values, max_size=4))
def test_what_the_toml_writer_writes_the_standard_reader_reads(table):
    assert tomllib.loads(toml.dumps(table)) == table
