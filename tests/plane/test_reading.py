"""Reading traces in a real browser: rendered text, folding, neighbours, keys, local time, both themes and a narrow screen (T6).

Pictures are left where those of `test_browser` are.
"""

from __future__ import annotations

import shutil

import pytest

import rollyard as ry
from rollyard.core.task import Task, VerifierSpec
from rollyard.page.actions import LocalActions
from rollyard.page.app import page_app
from rollyard.runs.report.spending import Price
from rollyard.testing.serve import serve_app
from tests.plane.test_browser import browsing, shot
from tests.plane.test_page import get

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="Debian's chromium is not installed"),
]
SAID = """## Found

It fails on an **empty list**; see <script>document.title='owned'</script> and [x](javascript:document.title='owned').

```python
def merge(ranges):
    return sorted(ranges)[:1]
```
"""
GOOD = {
    "steps": [
        {"text": SAID, "shell": "printf '\\033[32mok\\033[0m\\n'; echo hello > out.txt"},
        {"shell": "cat nothing.txt"},
        {"shell": "printf -- '--- a/x\\n+++ b/x\\n@@ -1 +1 @@\\n-old\\n+new\\n'"},
        {"text": "done"},
    ]
}
BAD = {"steps": [{"text": "I give up."}]}
PRICES = {"good": Price(prompt=100.0, completion=400.0), "bad": Price(prompt=1.0, completion=4.0)}


async def two_policies(store, *, tasks=2, attempts=2):
    """A run of two policies: one solves its tasks and the other gives up."""
    check = VerifierSpec(kind="commands", options={"commands": ["test -f out.txt"]})
    some = [Task(id=f"t{n}", instruction="Write `out.txt`.", verifier=check) for n in range(tasks)]
    async with (
        ry.sandbox.backend("local") as backend,
        ry.Gate(ry.policy.scripted(BAD), log=store) as gate,
        ry.Run(
            some, agent="shell-agent", sandbox=backend, gate=gate, store=store, attempts=attempts, parallel=2,
            prices=PRICES, currency="$",
            policies={"good": ry.policy.scripted(GOOD), "bad": ry.policy.scripted(BAD)},
        ) as run,
    ):  # fmt: skip
        return run.id, [rollout async for rollout in run]


def find(rollouts, policy, attempt=0):
    return next(r for r in rollouts if (r.labels["policy"], r.attempt, r.task.id) == (policy, attempt, "t0"))


async def test_a_trace_is_read_with_its_code_colours_costs_neighbours_and_keys(tmp_path):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        _, rollouts = await two_policies(store, tasks=1)
        first, second, other = find(rollouts, "good"), find(rollouts, "good", 1), find(rollouts, "bad")
        async with serve_app(page_app(store)) as url, browsing(timezone_id="Asia/Tokyo") as page:
            await page.goto(f"{url}/rollouts/{first.id}")
            assert await page.title() == "t0 #0"  # and not "owned"
            assert await page.locator(".step h2").inner_text() == "Found"
            assert await page.locator(".step pre.code .t-k").first.inner_text() == "def"
            assert await page.locator(".step a[href^=javascript]").count() == 0
            assert await page.locator(".step .a-fg2").inner_text() == "ok"
            assert await page.locator(".step .result .tag.failed").inner_text() == "exit 1"
            assert await page.locator(".step .result .diff .add").inner_text() == "+new"
            facts = await page.locator(".step.assistant .facts").first.inner_text()
            assert "tokens" in facts and "ms" in facts and "$0." in facts, facts
            assert "shell" in await page.locator(".tools summary").first.inner_text()
            assert (await page.locator(".tile time").inner_text())[11:13] == f"{(int(_hour(first)) + 9) % 24:02}"
            results = page.locator(".result pre").first
            await page.keyboard.press("5")
            assert not await results.is_visible()
            await page.keyboard.press("?")
            assert await page.locator("dialog#keys").is_visible()
            await page.keyboard.press("Escape")
            await page.keyboard.press("]")
            await page.wait_for_url(f"**/rollouts/{second.id}")
            assert not await results.is_visible()  # what was folded stays so
            await page.keyboard.press("[")
            await page.wait_for_url(f"**/rollouts/{first.id}")
            await page.keyboard.press("o")
            await page.wait_for_url(f"**/rollouts/{other.id}")


async def test_words_are_searched_notes_are_kept_and_a_run_shows_its_course(tmp_path):
    async with ry.Store.open(tmp_path / "runs.db") as store, LocalActions(store, None) as actions:
        run_id, rollouts = await two_policies(store, tasks=1)
        good, bad = find(rollouts, "good"), find(rollouts, "bad")
        async with serve_app(page_app(store, actions=actions, token="a-token")) as url:
            _, _, run, _ = await get(f"{url}/runs/{run_id}")
            assert "calls/row" in run and 'class="sparkline"' in run and "duration" in run and "$" in run
            _, _, grid, _ = await get(f"{url}/runs/{run_id}/tasks")
            assert f'href="/runs/{run_id}/tasks/t0?agent=shell-agent&amp;policy=good"' in grid
            _, _, cell, _ = await get(f"{url}/runs/{run_id}/tasks/t0?agent=shell-agent&policy=good")
            assert cell.count("<tr tabindex") == 2
            _, _, found, _ = await get(f"{url}/search?q=give+up")
            assert f'href="/rollouts/{bad.id}"' in found and good.id not in found
            assert "I <mark>give</mark> <mark>up</mark>." in found
            _, _, found, _ = await get(f"{url}/search?q=script+owned&run={run_id}")
            assert "<mark>script</mark>" in found and "<script>document" not in found
            _, _, found, _ = await get(f"{url}/search?q=%22%3Cscript%3Edocument%22")
            assert "<mark>&lt;script&gt;document</mark>" in found and "<script>document" not in found
            _, _, tokens, _ = await get(f"{url}/rollouts/{good.id}/tokens")
            assert 'title="id 100, logprob 0.0000, probability 1">d</span>' in tokens
            at = f"{url}/rollouts/{good.id}/notes"
            said = {"kind": "label", "name": "<b>odd</b>", "author": "ann", "score": "", "text": ""}
            assert (await get(at, said))[0] == 403
            status, _, shown, _ = await get(at, {**said, "token": "a-token"})
            assert status == 200 and "&lt;b&gt;odd&lt;/b&gt;" in shown
            assert (await get(at, {**said, "kind": "score", "score": "much", "token": "a-token"}))[0] == 400
            assert (await get(at, {**said, "kind": "score", "token": "a-token"}))[0] == 400
            (note,) = (await store.notes([good.id]))[good.id]
            assert (await get(f"{at}/{note.id}/remove", {"token": "wrong"}))[0] == 403
            assert (await get(f"{at}/{note.id}/remove", {"token": "a-token"}))[0] == 200
            assert await store.notes([good.id]) == {}
        async with serve_app(page_app(store)) as url:
            assert (await get(f"{url}/rollouts/{good.id}/notes", said))[0] == 403


def _hour(rollout):
    import time

    return time.strftime("%H", time.gmtime(rollout.started_at))


@pytest.mark.slow
async def test_what_is_read_fits_both_themes_and_a_narrow_screen(tmp_path):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        run_id, rollouts = await two_policies(store)
        rollout = find(rollouts, "good")
        await store.add_note(rollout.id, "label", author="ann", name="looked at")
        paths = {
            "reading": f"/rollouts/{rollout.id}", "reading-run": f"/runs/{run_id}", "search": "/search?q=empty+list",
            "compare-policies": f"/compare?a={run_id}@bad&b={run_id}@good",
            "side": f"/side?a={find(rollouts, 'bad').id}&b={rollout.id}",
            "reading-tokens": f"/rollouts/{rollout.id}/tokens", "reading-tasks": f"/runs/{run_id}/tasks",
        }  # fmt: skip
        async with serve_app(page_app(store)) as url:
            for theme, width in (("light", 1280), ("dark", 1280), ("light", 400)):
                async with browsing(color_scheme=theme, viewport={"width": width, "height": 860}) as page:
                    for name, path in paths.items():
                        await page.goto(url + path)
                        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, path
                        await shot(page, f"{name}-{theme if width > 400 else 'narrow'}")
