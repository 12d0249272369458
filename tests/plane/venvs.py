"""Pythons that have one version of somebody's SDK each, made on first use and kept outside the checkout."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def place(package, version):
    cache = Path(os.environ.get("ROLLYARD_CACHE") or Path.home() / ".cache" / "rollyard")
    return cache / "venvs" / f"{package}-{version}"


def there(package, version):
    return (place(package, version) / ".ready").exists()


def unless_there(package, version):
    """A mark for tests that would have to install it first."""
    return () if there(package, version) else pytest.mark.slow


def interpreter(package, version):
    folder = place(package, version)
    python = folder / "bin" / "python"
    if not there(package, version):
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        try:
            subprocess.run([str(python), "-m", "pip", "install", "-q", f"{package}=={version}"], check=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{package} {version} cannot be installed here: pip exited with {error.returncode}")
        (folder / ".ready").touch()
    return str(python)


async def told(python, program, *arguments, env=None, timeout=120):
    """What a program prints as JSON in its last line; its whole error where it fails."""
    running = await asyncio.create_subprocess_exec(
        python,
        str(program),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )
    out, err = await asyncio.wait_for(running.communicate(), timeout)
    assert running.returncode == 0, err.decode()[-3000:]
    return json.loads(out.splitlines()[-1])
