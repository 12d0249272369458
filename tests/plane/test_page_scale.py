"""The page over a large store: rows, bytes and queries of a page do not grow with the run or the trajectory."""

from __future__ import annotations

import re
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine, event

import rollyard as ry
from bench.page import fill, paths
from rollyard.page.app import page_app
from rollyard.testing.serve import serve_app
from tests.plane.test_page import get

pytestmark = pytest.mark.anyio
ROLLOUTS, CALLS = 1200, 300


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
async def large(tmp_path_factory):
    where = tmp_path_factory.mktemp("large") / "runs.db"
    async with ry.Store.open(where) as store:
        yield store, *await fill(store, ROLLOUTS, CALLS)


@contextmanager
def statements():
    """What the readers ask of the database."""
    asked = []

    def note(connection, cursor, statement, parameters, context, executemany):
        asked.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        event.remove(Engine, "before_cursor_execute", note)


async def test_every_page_is_bounded_in_rows_bytes_and_queries(large):
    store, run_id, rollout_id = large
    async with serve_app(page_app(store)) as url:
        for name, path in paths(run_id, rollout_id, ROLLOUTS, CALLS).items():
            with statements() as asked:
                status, _, body, _ = await get(url + path)
            assert status == 200, name
            assert len(re.findall("<tr tabindex", body)) <= (400 if name == "compare" else 50), name
            assert len(re.findall("<article", body)) <= 60, name
            assert len(re.findall('class="tok ', body)) <= 2000 + 7, name
            assert len(re.findall("<(circle|rect|path)", body)) <= 1000, name
            assert len(body.encode()) < 400_000, name
            assert len(asked) <= 36, (name, asked)


async def test_pages_follow_each_other_without_a_gap_or_a_repetition(large):
    store, run_id, _ = large
    async with serve_app(page_app(store)) as url:
        seen, path = [], f"/runs/{run_id}?sort=task_id&status=completed"
        while path is not None:
            _, _, body, _ = await get(url + path)
            seen += re.findall(r'data-href="/rollouts/([^"]+)"', body)
            following = re.search(r'<a rel="next" href="([^"]+)"', body)
            path = following[1].replace("&amp;", "&") if following else None
    rows = [row for row in await store.lines(run_id) if row.status == "completed"]
    assert len(seen) == len(set(seen))
    assert set(seen) == {row.id for row in rows}


async def test_a_page_past_the_last_rollout_leads_back_to_the_first(large):
    store, run_id, _ = large
    async with serve_app(page_app(store)) as url:
        _, _, body, _ = await get(f"{url}/runs/{run_id}?status=completed&offset=99999")
        assert "No rollout fits" not in body
        back = re.search(r'<a href="([^"]+)">First page</a>', body)
        _, _, first, _ = await get(url + back[1].replace("&amp;", "&"))
        assert len(re.findall("<tr tabindex", first)) == 50 and "infra_error</span>" not in first
        _, _, body, _ = await get(f"{url}/runs/{run_id}?q=nothing-like-this")
        assert "No rollout fits" in body and "First page" not in body


async def test_a_long_trajectory_is_read_window_by_window_from_its_first_step_to_its_last(large):
    store, _, rollout_id = large
    async with serve_app(page_app(store)) as url:
        seen, path = [], f"/rollouts/{rollout_id}/steps"
        while path is not None:
            _, _, body, _ = await get(url + path)
            seen += [int(number) for number in re.findall(r'<article[^>]* id="s(\d+)"', body)]
            following = re.search(r'<a rel="next" href="([^"]+)"', body)
            path = following[1].replace("&amp;", "&") if following else None
    assert seen == list(range(2 * CALLS + 1))


async def test_statistics_of_a_run_are_read_again_only_once_it_has_changed(large):
    store, run_id, _ = large
    async with serve_app(page_app(store)) as url:
        await get(f"{url}/runs/{run_id}")
        with statements() as asked:
            await get(f"{url}/runs/{run_id}?offset=50")
        assert not any("LIMIT" not in one and "rollouts.task_id" in one for one in asked)
        unscored = next(row for row in await store.lines(run_id) if row.reward is None)
        await store.add_verdict(unscored.id, ry.Verdict(reward=1.0))
        _, _, before, _ = await get(f"{url}/runs/{run_id}")
        scored = sum(row.reward is not None for row in await store.lines(run_id))
        assert f'<span class="value ">{scored:,}'.replace(",", "\u202f") in before
