"""Async tests run on asyncio, the loop the product runs on. Images, layers and sandboxes of tests lie apart from the user's
own, in a directory that lasts from run to run, so that a layer is built once and not once a run."""

import hashlib
import os
from pathlib import Path

import pytest


def pytest_configure(config):
    if "ROLLYARD_HOME" not in os.environ:
        cache = Path(os.environ.get("ROLLYARD_CACHE", Path.home() / ".cache" / "rollyard"))
        checkout = hashlib.sha256(str(config.rootpath).encode()).hexdigest()[:8]
        os.environ["ROLLYARD_HOME"] = str(cache / f"tests-{checkout}")


@pytest.fixture
def anyio_backend():
    return "asyncio"
