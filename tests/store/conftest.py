"""Every test of this room that takes `store` runs on SQLite and on a real PostgreSQL server."""

import pytest

from rollyard.store import Store


@pytest.fixture
async def store(store_url):
    async with Store.open(store_url) as store:
        yield store
