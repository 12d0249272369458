"""Async tests run on asyncio, the loop the product runs on."""

import pytest


@pytest.fixture
def anyio_backend():
    return "asyncio"
