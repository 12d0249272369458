"""One local backend and one gate for the tests of this folder; agents' layers are cached between runs."""

from __future__ import annotations

import pytest

import rollyard as ry


@pytest.fixture
async def backend():
    async with ry.sandbox.backend("local") as opened:
        yield opened


HELLO = {"steps": [{"shell": "echo hello > out.txt"}, {"text": "done"}]}
CHECK = 'test "$(cat out.txt)" = hello'
