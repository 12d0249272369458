"""A real browser on the real page: every page, live updates, keys, both themes, a narrow screen, hostile text (T6).

Each page is also left as a picture in `out/screenshots` (or the folder that ROLLYARD_SHOTS names), so that a person can look.
"""

from __future__ import annotations

import os
import shutil
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

import rollyard as ry
from bench.page import fill
from rollyard.core.call import Call, Reply, Usage, floats, ids
from rollyard.core.message import Message, Text, Thinking, ToolCall, ToolResult
from rollyard.core.plane import AdmissionTerms, EnvSpec
from rollyard.core.rollout import Rollout, StageRecord, Verdict
from rollyard.core.task import Task
from rollyard.page.actions import LocalActions
from rollyard.page.app import page_app
from rollyard.page.planes import PlaneTables
from rollyard.plane.server.operator import PlaneOperator
from rollyard.plane.service.instances import CreateInstance
from rollyard.plane.storage.sql import SqlPlane
from rollyard.testing.call_log import conversation
from rollyard.testing.serve import serve_app
from rollyard.trajectory.trajectory import Trajectory
from tests.plane.conftest import OWNER
from tests.plane.test_page import HOSTILE, a_run

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="Debian's chromium is not installed"),
]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
TOKEN = "a-token-for-the-test-only"
SHOTS = Path(os.environ.get("ROLLYARD_SHOTS") or Path(__file__).parents[2] / "out" / "screenshots")
PAPER = {"light": "rgb(251, 251, 250)", "dark": "rgb(20, 23, 27)"}
PATCH = (
    "--- a/ranges.py\n+++ b/ranges.py\n@@ -3,3 +3,3 @@\n def merge(ranges):\n"
    "-    merged = [ordered[0]]\n+    merged = ordered[:1]\n"
)


@pytest.fixture
async def backend():
    async with ry.sandbox.backend("local") as opened:
        yield opened


@asynccontextmanager
async def browsing(**options):
    from playwright.async_api import async_playwright

    async with async_playwright() as play:
        browser = await play.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = await browser.new_page(**{"viewport": {"width": 1280, "height": 860}, **options})
        page.set_default_timeout(60_000)
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
        yield page
        await browser.close()
        assert problems == []


async def shot(page, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    await page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


async def rollout_of_a_model_with_a_long_name(store):
    """An agent may ask for any."""
    _, added = conversation("ro_wide", 2)
    for one, _ in added:
        record = replace(one.record, model_requested="w" * 200, model_served=None)
        await store.commit(record, one.nodes, one.blobs)
    await store.commit_rollout(Rollout(id="ro_wide", task=Task(id="t", instruction="x"), calls=2))


async def rich_rollout(store):
    """Reasoning, a command, an edit, a failing tool, a sub-agent, tokens with logprobs: all of it in one rollout."""
    trajectory = Trajectory("ro_rich")
    system, user = (
        Message("system", (Text("You fix bugs. " * 30),)),
        Message("user", (Text("Fix merge() in ranges.py."),)),
    )
    look = Message(
        "assistant",
        (Thinking("The bug must be in merge; look first."), ToolCall("c1", "bash", '{"command": "cat ranges.py"}')),
    )
    seen = Message("tool", (ToolResult("c1", (Text("def merge(ranges):\n    merged = [ordered[0]]\n"),)),))
    edit = Message(
        "assistant",
        (
            Text("An empty list fails; a slice does not."),
            ToolCall(
                "c2",
                "edit",
                '{"file_path": "ranges.py", "old_string": "merged = [ordered[0]]", "new_string": "merged = ordered[:1]"}',
            ),
        ),
    )
    broken = Message("tool", (ToolResult("c2", (Text("ranges.py: permission denied"),), is_error=True),))
    end = Message("assistant", (Text("Done: an empty list gives an empty list."),))
    at, prompt = 1_800_000_000.0, list(range(1000, 1120))

    async def add(name, messages, answer, took, *, kind="agent", thread=None, words=()):
        nonlocal at
        sampled = list(range(len(words) or 24))
        call = Call(
            id=name, rollout_id="ro_rich", dialect="chat", model="m", messages=tuple(messages), raw=b'{"n": 1}',
            received_at=at, kind=kind, thread=thread,
        )  # fmt: skip
        reply = Reply(
            message=answer, prompt_ids=ids(prompt), completion_ids=ids(sampled), capture="tokens", version_start=7,
            logprobs=floats([-(0.37 * n % 6.5) for n in range(len(sampled))]), finished_at=at + took, prompt_source="bridge",
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(sampled)),
        )  # fmt: skip
        added = trajectory.add(call, reply)
        await store.commit(added.record, added.nodes, added.blobs)
        at += took + 0.4
        return sampled

    prompt += [*await add("call_1", [system, user], look, 1.2), *range(30)]
    prompt += [*await add("call_2", [system, user, look, seen], edit, 2.0), *range(12)]
    await add("call_3", [system, user, look, seen, edit, broken], end, 0.9)
    prompt = list(range(2000, 2060))
    await add("call_4", [Message("system", (Text("You summarise."),)), user], end, 0.5, kind="subagent", thread="sub")
    stages = [("provision", 0.3), ("prepare", 0.4), ("launch", 0.2), ("wait", 6.0), ("collect", 0.2), ("verify", 0.9)]
    start, records = 1_799_999_999.1, []
    for name, took in stages:
        records.append(StageRecord(name=name, started_at=start, duration_s=took))
        start += took
    await store.commit_rollout(
        Rollout(
            id="ro_rich", task=Task(id="bug-fix", instruction="Fix merge() in ranges.py, so that an empty list works."),
            agent="pi", agent_version="0.9", sandbox="local", isolation="namespace", calls=4, exit_code=0,
            verdict=Verdict(reward=0.5, checks={"empty list": True, "touching ranges": False}, log="1 of 2 tests passed"),
            stages=tuple(records), usage={"prompt_tokens": 512, "completion_tokens": 96}, diff=PATCH,
            files={"app/ranges.py": b"x"}, log_tail="bye", started_at=1_799_999_999.1, wall_s=8.0,
        )
    )  # fmt: skip


async def some_plane(assemble, store, noop, clock):
    plane = await assemble(SqlPlane(store.database), {"noop": noop}, clock, terms=AdmissionTerms(quota=40))
    for name in ("weather", "shop"):
        await plane.hub.create(
            name, "1.0", EnvSpec(image="host", description=f"the {name} desk", tags=("demo", name)), by=OWNER
        )
    await plane.hub.release("shop", "1.0", revision=None, by=OWNER)
    made = [
        await plane.instances.create(
            CreateInstance(env="shop@1.0", ttl_s=600 + 60 * n, labels={"team": "<b>red</b>"}), owner=f"team-{n % 3}",
            caller="t", key=None,
        )
        for n in range(8)
    ]  # fmt: skip
    await plane.instances.delete(made[0].id)
    await plane.sweeper.once()
    return PlaneTables(SqlPlane(store.database), {"noop": noop}, plane.sweeper, 40), made[1].id


async def test_a_person_finds_their_way_by_keys_from_runs_to_tokens_in_both_themes(tmp_path):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        run_id, rollout_id = await fill(store, 240, 40)
        async with serve_app(page_app(store)) as url:
            for theme in ("light", "dark"):
                async with browsing(color_scheme=theme) as page:
                    await page.goto(f"{url}/?q=run_bench")
                    await shot(page, f"runs-{theme}")
                    await page.keyboard.press("j")
                    await page.keyboard.press("Enter")
                    await page.wait_for_url(f"**/runs/{run_id}")
                    assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == PAPER[theme]
                    await shot(page, f"run-{theme}")
                    await page.keyboard.press("f")
                    assert await page.evaluate("document.activeElement.dataset.failed") == "1"
                    await page.keyboard.press("/")
                    await page.keyboard.type("task-0000")
                    await page.keyboard.press("Enter")
                    await page.wait_for_url("**q=task-0000**")
                    assert await page.locator("table.rows tbody tr").count() == 20
                    await page.goto(f"{url}/runs/{run_id}?sort=task_id")
                    await page.keyboard.press("n")
                    await page.wait_for_url("**offset=50**")
                    await page.keyboard.press("p")
                    await page.wait_for_url(lambda at: "offset" not in at)
                    await page.goto(f"{url}/runs/{run_id}/tasks")
                    assert await page.locator("td.heat").count() == 12 * 4
                    await shot(page, f"tasks-{theme}")
                    await page.goto(f"{url}/rollouts/{rollout_id}")
                    await page.keyboard.press("j")
                    assert await page.evaluate("document.activeElement.id") == "s0"
                    await page.get_by_text("Token view").click()
                    await page.wait_for_url("**/tokens**")
                    assert await page.locator(".tok").count() > 500
                    await page.keyboard.press("u")
                    await page.wait_for_url(f"**/rollouts/{rollout_id}?branch=0")
                    await page.keyboard.press("u")
                    await page.wait_for_url(f"**/runs/{run_id}")
                    await page.keyboard.press("u")
                    await page.wait_for_url(f"{url}/")


async def test_a_trajectory_shows_reasoning_terminals_patches_branches_tokens_and_raw_json_in_place(tmp_path):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        await rich_rollout(store)
        async with serve_app(page_app(store)) as url:
            for theme in ("light", "dark"):
                async with browsing(color_scheme=theme) as page:
                    await page.goto(f"{url}/rollouts/ro_rich")
                    assert not await page.locator(".thinking .said").first.is_visible()
                    await page.locator(".thinking summary").first.click()
                    assert await page.locator(".thinking .said").first.is_visible()
                    assert await page.locator("pre.terminal.bad").count() == 1
                    assert await page.locator(".call .diff .add").count() == 1
                    assert await page.locator("#patch .diff .del").count() == 1
                    assert await page.locator("svg.graph circle.sampled").count() == 4
                    assert await page.locator("svg.timeline .call-agent").count() == 3
                    await shot(page, f"rollout-{theme}")
                    await page.locator("a[data-raw]").first.click()
                    await page.wait_for_selector("pre.json")
                    assert '"prompt_source": "bridge"' in await page.locator("pre.json").inner_text()
                    await page.locator("a[data-raw]").first.click()
                    assert await page.locator("pre.json").count() == 0
                    await page.goto(f"{url}/rollouts/ro_rich/tokens")
                    first = page.locator(".span.sampled .tok").nth(1)
                    assert (
                        await first.get_attribute("title")
                        == "id 1, logprob -0.3700, probability 0.691, policy version 7"
                    )
                    await shot(page, f"tokens-{theme}")


async def test_hostile_output_runs_nothing_and_a_narrow_screen_needs_no_sideways_scrolling(
    tmp_path, backend, assemble, noop, clock
):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        run_id, (rollout, _) = await a_run(store, backend, HOSTILE)
        await rich_rollout(store)
        await rollout_of_a_model_with_a_long_name(store)
        tables, instance = await some_plane(assemble, store, noop, clock)
        paths = {
            "runs": "/", "run": f"/runs/{run_id}", "tasks": f"/runs/{run_id}/tasks", "task": f"/runs/{run_id}/tasks/t0",
            "rollout": f"/rollouts/{rollout.id}", "steps": f"/rollouts/{rollout.id}/steps",
            "tokens": f"/rollouts/{rollout.id}/tokens", "rich": "/rollouts/ro_rich", "wide": "/rollouts/ro_wide",
            "error": "/runs/none",
            "compare": f"/compare?a={run_id}&b={run_id}", "plane": "/plane", "instances": "/plane/instances",
            "instance": f"/plane/instances/{instance}", "hub": "/plane/hub", "quotas": "/plane/quotas",
        }  # fmt: skip
        async with serve_app(page_app(store, plane=tables)) as url:
            async with browsing(viewport={"width": 400, "height": 800}) as page:
                for name, path in paths.items():
                    if name != "error":  # Chromium reports the status of a page itself as an error on its console
                        await page.goto(url + path)
                    assert "owned" not in await page.title()
                    assert await page.locator("main script, main img").count() == 0
                    wide = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
                    assert wide <= 0, path
                    if name in ("run", "rich", "instances"):
                        await shot(page, f"narrow-{name}")


async def test_a_run_is_followed_live_and_stops_being_asked_about_once_it_is_over(tmp_path, backend):
    script = {"steps": [{"shell": "sleep 1; touch out.txt"}, {"text": "done"}]}
    tasks = [Task(id=f"t{n}", instruction="x") for n in range(6)]
    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(ry.policy.scripted(script), log=store) as gate:
        async with ry.Run(tasks, agent="shell-agent", sandbox=backend, gate=gate, store=store, parallel=2) as run:
            async with serve_app(page_app(store)) as url, browsing() as page, anyio.create_task_group() as group:

                async def finish():
                    async for _ in run:
                        pass

                group.start_soon(finish)
                await page.goto(f"{url}/runs/{run.id}")
                await page.wait_for_selector("text=In flight")
                await page.wait_for_selector("progress")
                await shot(page, "run-live")
                await page.wait_for_selector("tr[data-href] >> nth=5")
                await page.wait_for_selector("body:not([data-live])")
                assert await page.locator(".tag.live").count() == 0


async def test_a_rollout_is_started_watched_live_cancelled_judged_again_and_two_runs_are_compared(tmp_path, backend):
    slow = tmp_path / "slow.yaml"
    slow.write_text("steps: [{shell: 'echo one'}, {sleep: 60}]")
    async with ry.Store.open(tmp_path / "runs.db") as store, LocalActions(store, "examples/tasks") as actions:
        first, (rollout, _) = await a_run(store, backend)
        second, _ = await a_run(store, backend)
        async with serve_app(page_app(store, actions=actions, token=TOKEN)) as url:
            async with browsing() as page:
                await page.goto(f"{url}/start")
                await page.select_option("select[name=agent]", "shell-agent")
                await page.fill("input[name=policy]", f"scripted:{slow}")
                await page.fill("textarea[name=instruction]", "try it")
                await page.click("text=Show the command")
                await page.wait_for_selector("#command")
                assert "--instruction 'try it'" in await page.locator("#command").inner_text()
                await shot(page, "start")
                await page.fill("input[name=token]", TOKEN)
                await page.click("text=Run it")
                await page.wait_for_url("**/rollouts/*")
                await page.wait_for_selector("article pre.terminal:has-text('one')")
                await shot(page, "live")
                await page.fill("input[name=token]", TOKEN)
                await page.click("button:has-text('Cancel')")
                with anyio.fail_after(60):
                    while actions.running:
                        await anyio.sleep(0.1)
                await page.goto(f"{url}/rollouts/{rollout.id}")
                await page.fill("input[name=token]", TOKEN)
                await page.click("text=Judge again")
                await page.wait_for_selector("text=judged 2 times")
                await page.goto(f"{url}/compare")
                await page.select_option("select[name=a]", first)
                await page.select_option("select[name=b]", second)
                await page.click("button:has-text('Compare')")
                await page.wait_for_selector("text=shared tasks")
                await shot(page, "compare")


async def test_the_control_planes_tables_are_searched_sorted_and_opened(tmp_path, assemble, noop, clock):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        tables, _ = await some_plane(assemble, store, noop, clock)
        async with serve_app(page_app(store, plane=tables)) as url:
            for theme in ("light", "dark"):
                async with browsing(color_scheme=theme) as page:
                    await page.goto(url)
                    await page.click("text=Control plane")
                    await page.wait_for_selector("text=round")
                    await shot(page, f"plane-{theme}")
                    await page.click("nav.tabs >> text=Instances")
                    assert await page.locator("table.rows tbody tr").count() == 8
                    await page.select_option("select[name=state]", "deleted")
                    await page.click("text=Filter")
                    await page.wait_for_url("**state=deleted**")
                    assert await page.locator("table.rows tbody tr").count() == 1
                    await page.goto(f"{url}/plane/instances?sort=owner&down=1")
                    await shot(page, f"instances-{theme}")
                    assert await page.locator("tbody tr td:nth-child(3)").first.inner_text() == "team-2"
                    await page.keyboard.press("j")
                    await page.keyboard.press("Enter")
                    await page.wait_for_url("**/plane/instances/*")
                    assert "<b>red</b>" in await page.locator("main").inner_text()
                    await shot(page, f"instance-{theme}")
                    await page.goto(f"{url}/plane/hub?q=desk")
                    assert await page.locator("table.rows tbody tr").count() == 2
                    await shot(page, f"hub-{theme}")
                    await page.goto(f"{url}/plane/quotas")
                    assert await page.locator("meter").count() == 3
                    await shot(page, f"quotas-{theme}")


async def test_an_operator_makes_and_revokes_a_key_and_sets_a_quota(tmp_path, assemble, noop, clock):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        plane = await assemble(SqlPlane(store.database), {"noop": noop}, clock, terms=AdmissionTerms(quota=40))
        operator = PlaneOperator(plane.store, plane.access, "sesame")
        tables = PlaneTables(plane.store, {"noop": noop}, plane.sweeper, 40)
        shown = page_app(store, plane=tables, plane_key="sesame".__eq__, operator=operator)
        async with serve_app(shown) as url:
            for theme, width in (("light", 1280), ("dark", 400)):
                login = {"username": "admin", "password": "sesame"}
                view = {"width": width, "height": 860}
                async with browsing(color_scheme=theme, http_credentials=login, viewport=view) as page:
                    await page.goto(f"{url}/plane/keys")
                    await page.select_option("select[name=role]", "metrics")
                    await page.fill("form.bar input[name=owner]", theme)
                    await page.click("text=New key")
                    made = await page.locator("#made").inner_text()
                    assert (await plane.access.caller(f"Bearer {made}", metrics=True)).owner == theme
                    await shot(page, f"keys-{theme}")
                    assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
                    await page.locator(f"tr:has-text('{theme}') button").click()
                    await page.wait_for_selector(f"tr:has-text('{theme}') >> text=revoked")
                    await page.click("nav.tabs >> text=Quotas")
                    await page.fill("form.bar input[name=owner]", theme)
                    await page.fill("input[name=quota]", "5")
                    await page.click("button:has-text('Set')")
                    await page.wait_for_selector(f"tr:has-text('{theme}')")
                    assert (await plane.store.usage(theme)).quota == 5
                    await shot(page, f"quota-form-{theme}")
                    assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.adversarial
async def test_an_exported_run_opens_from_a_file_sorts_and_makes_no_request(tmp_path, backend):
    from rollyard.page.export import run_page

    async with ry.Store.open(tmp_path / "runs.db") as store:
        run_id, _ = await a_run(store, backend, HOSTILE)
        _, text = await run_page(store, run_id)
    (tmp_path / "run.html").write_text(text)
    asked = []
    async with browsing() as page:
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(f"file://{tmp_path}/run.html")
        assert "owned" not in await page.title()
        assert await page.locator(".picture svg").count() == 6
        head = page.locator("table.sortable").last.locator("th").first
        await head.click()
        assert await head.get_attribute("aria-sort") == "ascending"
        await head.click()
        assert await page.locator("table.sortable").last.locator("tbody a").first.inner_text() == "t1"
        await page.locator("section summary").first.click()
        assert await page.locator("article.step").first.is_visible()
        await shot(page, "export")
    assert asked == [f"file://{tmp_path}/run.html"]
