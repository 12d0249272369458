"""A real browser on the real page: every page, live updates, keys, both themes, a narrow screen, hostile text (T6).

Screenshots are left in the folder that ROLLYARD_SHOTS names, so that a person can look at them.
"""

from __future__ import annotations

import os
import shutil
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.plane.page.actions import LocalActions
from rollyard.plane.page.app import page_app
from tests.plane.test_page import HOSTILE, a_run, serving

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="Debian's chromium is not installed"),
]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
TOKEN = "a-token-for-the-test-only"


@pytest.fixture
async def backend():
    async with ry.sandbox.backend("local") as opened:
        yield opened


@asynccontextmanager
async def browsing(**options):
    from playwright.async_api import async_playwright

    async with async_playwright() as play:
        browser = await play.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = await browser.new_page(**options)
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
        yield page
        await browser.close()
        assert problems == []


async def shot(page, name):
    folder = os.environ.get("ROLLYARD_SHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        await page.screenshot(path=f"{folder}/{name}.png", full_page=True)


async def test_a_person_finds_their_way_by_keys_from_runs_to_tokens_in_both_themes(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        run_id, rollouts = await a_run(store, backend)
        async with serving(page_app(store)) as url:
            for theme in ("light", "dark"):
                async with browsing(color_scheme=theme) as page:
                    await page.goto(url)
                    await page.keyboard.press("j")
                    await page.keyboard.press("Enter")
                    await page.wait_for_url(f"**/runs/{run_id}")
                    await shot(page, f"run-{theme}")
                    await page.keyboard.press("j")
                    await page.keyboard.press("j")
                    await page.keyboard.press("Enter")
                    await page.wait_for_url("**/rollouts/*")
                    assert await page.locator("article.step").count() >= 4
                    assert await page.locator("svg.graph circle.sampled").count() == 2
                    await shot(page, f"rollout-{theme}")
                    await page.get_by_text("token view").click()
                    assert await page.locator(".tok").count() > 50
                    await shot(page, f"tokens-{theme}")
                    await page.keyboard.press("u")
                    await page.wait_for_url("**/rollouts/*")
                    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
                    assert (background == "rgb(251, 250, 248)") == (theme == "light")


async def test_hostile_output_runs_nothing_and_a_narrow_screen_needs_no_sideways_scrolling(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        run_id, (rollout, _) = await a_run(store, backend, HOSTILE)
        async with serving(page_app(store)) as url:
            async with browsing(viewport={"width": 400, "height": 800}) as page:
                for path in ("/", f"/runs/{run_id}", f"/rollouts/{rollout.id}", f"/rollouts/{rollout.id}/tokens"):
                    await page.goto(url + path)
                    assert "owned" not in await page.title()
                    assert await page.locator("main script, main img").count() == 0
                    wide = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
                    assert wide <= 0, path
                await shot(page, "narrow")


async def test_a_rollout_is_started_watched_live_cancelled_and_two_runs_are_compared(tmp_path, backend):
    slow = tmp_path / "slow.yaml"
    slow.write_text("steps: [{shell: 'echo one'}, {sleep: 60}]")
    async with ry.Store.open(tmp_path / "runs.db") as store, LocalActions(store, None) as actions:
        first, _ = await a_run(store, backend)
        second, _ = await a_run(store, backend)
        async with serving(page_app(store, actions=actions, token=TOKEN)) as url:
            async with browsing() as page:
                await page.goto(f"{url}/start")
                await page.select_option("select[name=agent]", "shell-agent")
                await page.fill("input[name=policy]", f"scripted:{slow}")
                await page.fill("textarea[name=instruction]", "try it")
                await page.fill("input[name=token]", TOKEN)
                await page.click("text=Run it")
                await page.wait_for_url("**/rollouts/*")
                await page.wait_for_selector("text=echo one", timeout=30_000)
                await shot(page, "live")
                await page.fill("input[name=token]", TOKEN)
                await page.click("text=Cancel")
                await page.goto(f"{url}/compare?a={first}&b={second}")
                await page.wait_for_selector("text=2 shared tasks")
                await shot(page, "compare")
