"""The files of a task folder: which count, and how its tests or solution are laid out for upload.

`.harborignore` files (gitignore syntax, inherited downwards) keep files out of the tests and the solution. A link that leads
out of the folder is refused: what it shows is not the task's, and could be a secret of the host.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from pathspec import GitIgnoreSpec

from rollyard.core.errors import ConfigError

IGNORE_FILE = ".harborignore"
_SCOPES = GitIgnoreSpec.from_lines(("/tests/", "/solution/", "/steps/*/tests/", "/steps/*/solution/"))


class TaskFiles:
    """The files of one task folder, less those that `.harborignore` files (inherited downwards) exclude."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._specs: dict[Path, GitIgnoreSpec] = {}

    @cached_property
    def _may_exclude(self) -> bool:
        """Most tasks have no ignore file, and then there is nothing to match. A linked folder may hold one unseen."""
        for root, folders, files in os.walk(self.folder):
            if IGNORE_FILE in files or any(os.path.islink(f"{root}/{name}") for name in folders):  # noqa: PTH114 - many
                return True
        return False

    def _spec(self, directory: Path) -> GitIgnoreSpec:
        if directory not in self._specs:
            file = directory / IGNORE_FILE
            lines = file.read_text().splitlines() if file.is_file() else []
            self._specs[directory] = GitIgnoreSpec.from_lines(lines)
        return self._specs[directory]

    def excludes(self, path: Path) -> bool:
        if path.name == IGNORE_FILE:
            return True
        if not self._may_exclude:
            return False
        parts = path.relative_to(self.folder).parts
        scopes: list[Path] = []
        here = self.folder
        for depth, part in enumerate(parts):
            if _SCOPES.match_file(f"{here.relative_to(self.folder).as_posix()}/"):
                scopes.append(here)
            here = here / part
            slash = "/" if depth < len(parts) - 1 or here.is_dir() else ""
            if not _SCOPES.match_file(here.relative_to(self.folder).as_posix() + slash):
                continue
            out = False
            for directory in scopes:
                said = self._spec(directory).check_file(here.relative_to(directory).as_posix() + slash).include
                out = out if said is None else said
            if out:
                return True
        return False

    def walk(self, directory: Path) -> Iterator[Path]:
        """Files below `directory`, through links as long as they stay inside the task."""
        for root, folders, files in os.walk(directory, followlinks=True):
            here = Path(root)
            folders[:] = sorted(name for name in folders if not self.excludes(here / name))
            for name in folders:
                self._check_link(here / name)
            for name in sorted(files):
                if not self.excludes(here / name):
                    self._check_link(here / name)
                    yield here / name

    def _check_link(self, path: Path) -> None:
        if not path.is_symlink():
            return
        target = path.resolve()
        if not target.is_relative_to(self.folder):
            raise ConfigError(f"{path}: a link leads out of the task folder")
        if path.is_relative_to(target):
            raise ConfigError(f"{path}: a link leads round in a circle")


def stage(directories: Sequence[str], target: Path, *, source: str | None) -> None:
    """Copy directories over each other into `target`, later ones on top, less what the task's ignore files exclude."""
    root = Path(source).resolve() if source is not None else None
    for directory in directories:
        base = Path(directory).resolve()
        files = TaskFiles(root if root is not None and base.is_relative_to(root) else base)
        for path in files.walk(base):
            copy = target / path.relative_to(base)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)


def copy_template(source: Path, target: Path) -> None:
    """Copy a folder of the package. `*.py.txt` loses its `.txt`; scripts become executable, also out of an archive that kept
    no modes."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    for code in list(target.rglob("*.py.txt")):
        code.rename(code.with_suffix(""))
    for script in target.rglob("*.sh"):
        script.chmod(0o755)
