"""Pythons that have one version of somebody's SDK each, made on first use and kept outside the checkout."""

import asyncio
import json
import os
import sys

import pytest

from rollyard.core.errors import ConfigError
from tests.servers.venvs import make_venv, venv_path


def there(package, version):
    return venv_path(package, [f"{package}=={version}"]).exists()


def unless_there(package, version):
    """A mark for tests that would have to install it first."""
    return () if there(package, version) else pytest.mark.slow


def interpreter(package, version):
    return venv_or_skip(package, [f"{package}=={version}"])


def venv_or_skip(name, *installs, python=sys.executable):
    """The interpreter of a venv with these packages; skips the test where they cannot be installed."""
    try:
        return make_venv(name, *installs, python=python)
    except ConfigError as error:
        pytest.skip(str(error))


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
