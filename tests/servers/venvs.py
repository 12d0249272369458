"""Pythons with packages that cannot share an environment with ours: venvs, each made once and kept in the cache."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rollyard.core.cache import cache_home, make_once
from rollyard.core.errors import ConfigError

INSTALL_S = 1200.0


def venv_path(name: str, *installs: Sequence[str], python: str = sys.executable) -> Path:
    """Where the venv of this name lies that was made with these words to `pip install`, once for each of `installs`."""
    base = str(Path(python).resolve())  # not the link of one checkout: others share what is made
    wanted = hashlib.sha256(repr((base, [list(words) for words in installs])).encode()).hexdigest()[:8]
    return cache_home() / "pythons" / f"{name}-{wanted}"


def make_venv(name: str, *installs: Sequence[str], python: str = sys.executable) -> str:
    """Its interpreter. What pip cannot install is a `ConfigError` that ends with what pip said."""
    path = venv_path(name, *installs, python=python)
    make_once(path, lambda aside: _make(aside, path, installs, python))
    return str(path / "bin" / "python")


def _make(aside: Path, path: Path, installs: Sequence[Sequence[str]], python: str) -> None:
    commands = [[python, "-m", "venv", str(aside)]]
    pip = [str(aside / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    commands += [[*pip, *words] for words in installs]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            raise ConfigError(f"{path.name} cannot be made here: {' '.join(command[1:4])} failed: {said[-300:]}")
    for program in (aside / "bin").iterdir():  # their first lines name the place they were installed in
        if program.is_file() and not program.is_symlink():
            content = program.read_bytes()
            if bytes(aside) in content:
                program.write_bytes(content.replace(bytes(aside), bytes(path)))
