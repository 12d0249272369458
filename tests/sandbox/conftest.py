"""A local backend on a directory of its own: nothing is shared with other tests or with the user's sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import rollyard as ry
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.sandbox.local.box import LocalSandbox


@pytest.fixture
async def backend(tmp_path) -> AsyncIterator[LocalBackend]:
    async with LocalBackend(root=tmp_path / "home", mounts=[tmp_path / "shared"]) as made:
        yield made


@pytest.fixture
async def box(backend: LocalBackend) -> AsyncIterator[LocalSandbox]:
    async with backend.open(ry.SandboxSpec()) as opened:
        yield opened
