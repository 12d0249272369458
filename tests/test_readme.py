"""The README promises names and commands; this holds it to them."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rollyard

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bry\.((?:\w+\.)*\w+)", README))))
def test_a_name_in_the_readme_exists(name):
    value = rollyard
    for part in name.split("."):
        value = getattr(value, part)


@pytest.mark.parametrize("verb", sorted(set(re.findall(r"^rollyard (\w+)|`rollyard (\w+)", README, re.M))), ids="".join)
def test_a_verb_in_the_readme_exists(verb):
    from rollyard.cli.main import VERBS

    name = "".join(verb)
    assert name in VERBS
    importlib.import_module(f"rollyard.cli.{name}")


def test_links_and_targets_in_the_readme_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_page_on_architecture_lists_every_package():
    packages = {path.parent.name for path in (ROOT / "rollyard").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "architecture.md").read_text(), re.M))


def test_what_the_readme_shows_of_the_demo_is_what_it_prints(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rollyard", "demo"], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    (shown,) = re.findall(r"```\n(   1\.0 s .*?)```", README, re.S)
    plain = [re.sub(r"[\d.]+ s\b", "0 s", line).strip() for line in done.stdout.splitlines()]
    assert [line for line in shown.splitlines() if re.sub(r"[\d.]+ s\b", "0 s", line).strip() not in plain] == []


@pytest.mark.parametrize(
    "block", [b for b in re.findall(r"```python\n(.*?)```", README, re.S)], ids=range(README.count("```python"))
)
def test_code_in_the_readme_compiles(block, tmp_path):
    body = "async def block(model, step, asyncio, ry):\n" + "".join(f"    {line}\n" for line in block.splitlines())
    (tmp_path / "block.py").write_text(body)
    done = subprocess.run(
        [sys.executable, "-m", "py_compile", str(tmp_path / "block.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
