"""The page over real HTTP: what it shows, what it refuses, and hostile text that stays text (T6)."""

from __future__ import annotations

import asyncio
import re
import socket
import urllib.error
import urllib.parse
import urllib.request
from contextlib import asynccontextmanager

import anyio
import pytest
import uvicorn

import rollyard as ry
from rollyard.core.task import Task, VerifierSpec
from rollyard.plane.page.actions import LocalActions
from rollyard.plane.page.app import page_app

pytestmark = pytest.mark.anyio
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&{{7*7}}"


@asynccontextmanager
async def serving(app):
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def get(url, form=None):
    def ask():
        data = urllib.parse.urlencode(form).encode() if form is not None else None
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=30) as answer:
                return answer.status, dict(answer.headers), answer.read().decode(), answer.url
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read().decode(), url

    return await asyncio.to_thread(ask)


@pytest.fixture
async def backend():
    async with ry.sandbox.backend("local") as opened:
        yield opened


async def a_run(store, backend, text="done"):
    script = {"steps": [{"shell": f"cat <<'EOF'\n{text}\nEOF\necho hello > out.txt"}, {"text": text}]}
    check = VerifierSpec(kind="commands", options={"commands": ["test -f out.txt"]})
    tasks = [Task(id=f"t{n}", instruction=text, verifier=check) for n in range(2)]
    async with (
        ry.Gate(ry.policy.scripted(script), log=store) as gate,
        ry.Run(tasks, agent="shell-agent", sandbox=backend, gate=gate, store=store) as run,
    ):
        return run.id, [rollout async for rollout in run]


async def test_every_page_answers_with_strict_headers_and_hostile_text_stays_text(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        run_id, (rollout, other) = await a_run(store, backend, HOSTILE)
        call = rollout.trajectory.records[0].id
        async with serving(page_app(store)) as url:
            for path in (
                "/", f"/runs/{run_id}", f"/runs/{run_id}/tasks/t0", f"/rollouts/{rollout.id}", "/compare",
                f"/rollouts/{rollout.id}/steps", f"/rollouts/{rollout.id}/tokens", f"/compare?a={run_id}&b={run_id}",
                f"/runs/{run_id}?sort=reward&down=1&status=completed&q=t",
            ):  # fmt: skip
                status, headers, body, _ = await get(url + path)
                assert status == 200, (path, body[:300])
                policy = headers["content-security-policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert "<script>document" not in body
                assert "<img src=x" not in body
                assert not re.search(r"<[^>]+\son\w+=", body)
                assert 'style="' not in body
            status, headers, body, _ = await get(f"{url}/rollouts/{rollout.id}/raw/{call}")
            assert status == 200
            assert headers["content-type"].startswith("text/plain")
            _, _, body, _ = await get(f"{url}/rollouts/{rollout.id}")
            assert "&lt;script&gt;document" in body


async def test_what_is_not_there_is_a_404_and_nothing_can_be_changed_without_a_token(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        _, (rollout, _) = await a_run(store, backend)
        async with serving(page_app(store)) as url:
            assert (await get(f"{url}/rollouts/ro_none"))[0] == 404
            assert (await get(f"{url}/runs/run_none"))[0] == 404
            assert (await get(f"{url}/rollouts/{rollout.id}/files/..%2f..%2fetc%2fpasswd"))[0] == 404
            assert (await get(f"{url}/static/..%2fapp.py"))[0] == 404
            assert (await get(f"{url}/start"))[0] == 403
            assert (await get(f"{url}/rollouts/{rollout.id}/rescore", {}))[0] == 403


async def test_a_rollout_started_on_the_page_runs_is_watched_and_can_be_cancelled(tmp_path):
    good, slow = tmp_path / "good.yaml", tmp_path / "slow.yaml"
    good.write_text("steps: [{shell: 'touch out.txt'}, {text: done}]")
    slow.write_text("steps: [{sleep: 60}]")
    form = {"agent": "shell-agent", "mode": "transparent_proxy", "instruction": "x", "verify": "test -f out.txt"}
    async with ry.Store.open(tmp_path / "runs.db") as store, LocalActions(store, None) as actions:
        async with serving(page_app(store, actions=actions, token="t" * 20)) as url:
            start = f"{url}/start"
            assert (await get(start))[0] == 200
            assert (await get(start, {**form, "policy": f"scripted:{good}"}))[0] == 403
            status, _, body, _ = await get(start, {**form, "policy": "nonsense:1", "token": "t" * 20})
            assert status == 400
            assert "nonsense" in body
            _, _, _, where = await get(start, {**form, "policy": f"scripted:{good}", "token": "t" * 20})
            rollout_id = where.rsplit("/", 1)[1]
            with anyio.fail_after(30):
                while "reward 1" not in (await get(where))[2]:
                    await anyio.sleep(0.1)
            assert (await store.get_rollout(rollout_id)).reward == 1.0
            _, _, _, where = await get(start, {**form, "policy": f"scripted:{slow}", "token": "t" * 20})
            with anyio.fail_after(30):
                while "under way" not in (await get(where))[2]:
                    await anyio.sleep(0.1)
            assert (await get(f"{where}/cancel", {"token": "t" * 20}))[0] == 200
            with anyio.fail_after(30):
                while actions.running:
                    await anyio.sleep(0.05)


async def test_live_news_are_numbered_and_say_when_a_run_is_over(tmp_path, backend):
    import json

    async with ry.Store.open(tmp_path / "runs.db") as store:
        run_id, _ = await a_run(store, backend)
        async with serving(page_app(store)) as url:
            news = json.loads((await get(f"{url}/live?run={run_id}"))[2])
            assert news["finished"] is True
            assert news["seq"] > 0
            later = json.loads((await get(f"{url}/live?run={run_id}&after={news['seq']}"))[2])
            assert later["seq"] == news["seq"]
            assert later["events"] == []
