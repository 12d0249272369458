"""Pages name only what is there: links, files, modules and tests exist; and they keep to the words of the glossary."""

import importlib
import pydoc
import re
from pathlib import Path

import pytest
import yaml

import rollyard

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("README.md")])
AVOIDED = re.compile(
    r"\brooms?\b(?! of each engine)|\brungs?\b|\b(?:hold|held|holds) (?:\w+ ){0,4}against\b|\bwhoever\b|\bsomebody\b|\banybody\b"
    r"|\bfaces\b|\b(?:one|the|its|same|that|chat|agent|trainer's|operator's) face\b",
    re.IGNORECASE,
)
# Words that code and its comments avoid too.
AVOIDED_IN_CODE = re.compile(
    r"\b(?:whoever|somebody|anybody)\b|\bdut(?:y|ies)\b|(?<!hugging )\bfaces?\b|\bthis room\b", re.IGNORECASE
)
PACKAGES = sorted(folder.name for folder in (ROOT / "rollyard").iterdir() if (folder / "__init__.py").exists())
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pages
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pages
def test_files_and_modules_that_a_page_names_exist(page):
    text = page.read_text()
    for path in re.findall(r"`((?:rollyard|tests|examples|bench|docs|deploy)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`(rollyard(?:\.\w+){2,})`|^(?:from|import) (rollyard(?:\.\w+)*)", text, re.M):
        try:
            assert pydoc.locate("".join(name)) is not None, name
        except pydoc.ErrorDuringImport as error:
            assert isinstance(error.value, ModuleNotFoundError) and error.value.name == "torch", (
                name
            )  # `make torch` has it


def test_files_of_the_glossary_exist():
    for path in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", (ROOT / "docs" / "glossary.md").read_text()):
        assert (ROOT / "rollyard" / path).exists(), path


@pages
def test_a_page_uses_the_words_of_the_glossary(page):
    lines = [line for line in page.read_text().splitlines() if not re.search(r"Hugging Face|test_\w+", line)]
    assert [line for line in lines if AVOIDED.search(line)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_code_uses_the_words_of_the_glossary(package):
    files = sorted(file for file in (ROOT / "rollyard" / package).rglob("*.py") if "migrations" not in file.parts)
    assert [
        f"{file.name}: {line}"
        for file in files
        for line in file.read_text().splitlines()
        if AVOIDED_IN_CODE.search(line)
    ] == []


def test_the_site_has_every_page_and_every_public_name():
    """What `make docs` builds, without building it."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = [
        one if isinstance(one, str) else next(iter(one.values()))
        for part in site["nav"]
        for one in next(iter(part.values()))
    ]
    pages = {
        str(path.relative_to(ROOT / "docs"))
        for path in (ROOT / "docs").rglob("*.md")
        if "conformance" not in path.parts
    }
    assert sorted(listed) == sorted(pages)
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    values = [
        getattr(importlib.import_module(module), name) for module, _, name in (one.rpartition(".") for one in named)
    ]
    modules = {"agents", "envs", "plane", "policy", "sandbox", "tools", "train"}
    assert [name for name in dir(rollyard) if name not in modules and getattr(rollyard, name) not in values] == []


def test_the_first_page_of_the_site_is_the_readme_with_links_that_lead_there():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.make_first_page((ROOT / "README.md").read_text())
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert "quickstart.md" in targets and "img/grpo-curve.png" in targets
    assert [target for target in targets if not (ROOT / "docs" / target).exists()] == []
