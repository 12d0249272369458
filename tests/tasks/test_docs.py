"""What the pages show is what the code takes."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

import rollyard as ry
from rollyard.core import registry
from rollyard.images.registries import read_registries
from rollyard.tasks.harbor import schema
from rollyard.tasks.harbor.taskfile import Extra

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "tasks.md", DOCS / "verifiers.md"]


def blocks(language):
    return [text for page in PAGES for text in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.mark.parametrize("text", blocks("toml"))
def test_toml_on_the_pages_is_a_task_file(text):
    file = schema.parse(tomllib.loads(text))
    msgspec.convert(file.metadata.get("rollyard", {}), Extra)


def test_the_registries_file_on_the_page_is_one(tmp_path, monkeypatch):
    (text,) = blocks('toml title="registries.toml"')
    (tmp_path / "registries.toml").write_text(text)
    monkeypatch.setenv("ROLLYARD_REGISTRIES", str(tmp_path / "registries.toml"))
    found = read_registries()
    assert [one.secure for one in found.allowed] == [True, False] and len(found.mirrors["docker.io"]) == 2


@pytest.mark.parametrize("text", blocks("json"))
def test_rows_on_the_pages_are_tasks(text, tmp_path):
    (tmp_path / "rows.jsonl").write_text(text)
    assert len(ry.Taskset.load(tmp_path / "rows.jsonl")) == 1


@pytest.mark.parametrize("text", [text for text in blocks("python") if "import rollyard" in text])
def test_python_on_the_pages_runs(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.py").write_text(text)
    if "def load" in text:
        assert len(ry.Taskset.load("page.py")) == 1
    else:
        compile(text, "page", "exec")


def test_every_verifier_is_on_the_page():
    page = (DOCS / "verifiers.md").read_text()
    assert [name for name in registry.names("rollyard.verifiers") if f"| `{name}` |" not in page] == []


def test_every_extra_key_is_on_the_page():
    page = (DOCS / "tasks.md").read_text()
    assert [name for name in Extra.__struct_fields__ if not re.search(rf"^{name} = ", page, re.MULTILINE)] == []


def test_every_option_of_an_adapter_is_on_the_page():
    rows = re.findall(r"^\| (`[^|]*`) \| (`[^|]*=[^|]*) \|", (DOCS / "tasks.md").read_text(), re.MULTILINE)
    told = {(name, option) for names, options in rows for name in re.findall(r"`([\w-]+)`", names)
            for option in re.findall(r"`(\w+)=", options)}  # fmt: skip
    adapters = {name: registry.load("rollyard.datasets", name) for name in registry.names("rollyard.datasets")}
    assert told == {(name, option) for name, adapter in adapters.items() for option in adapter.options}
