"""Hooks of mkdocs: the README is the site's first page; and behind its language a block may have a name by which a test finds
it, for which the site has no use."""

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File, InclusionLevel

    text = (Path(config["config_file_path"]).parent / "README.md").read_text()
    first = File.generated(config, "index.md", content=make_first_page(text))
    first.inclusion = InclusionLevel.NOT_IN_NAV
    files.append(first)
    return files


def make_first_page(readme: str) -> str:
    """Links into docs/ lead to the site's pages; files that are not on the site are named without a link."""

    def point(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        if target.startswith("docs/"):
            return f"{mark}[{text}]({target.removeprefix('docs/')})"
        return found[0] if "://" in target else text

    return _LINK.sub(point, readme)


def on_page_markdown(markdown: str, **_: object) -> str:
    return re.sub(r"^(```\w+) \w+$", r"\1", markdown, flags=re.MULTILINE)
