"""The page over real HTTP: what it shows, what it refuses, and hostile text that stays text (T6)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import json
import re
import shlex
import sys
import urllib.error
import urllib.parse
import urllib.request

import anyio
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

import rollyard as ry
from bench.page import PRICES, fill
from rollyard.core.errors import ConfigError
from rollyard.core.events import POLICY_STOPPED, Event
from rollyard.core.lease import Attempt
from rollyard.core.rollout import Failure, Rollout, Verdict
from rollyard.core.task import Task, VerifierSpec
from rollyard.net.web_pages import AllowedHosts, NoWebPages
from rollyard.page.actions import LocalActions
from rollyard.page.app import page_app
from rollyard.page.formats import money
from rollyard.testing.serve import serve_app

pytestmark = pytest.mark.anyio
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&{{7*7}}"


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
        async with serve_app(page_app(store)) as url:
            for path in (
                "/", f"/runs/{run_id}", f"/runs/{run_id}/tasks/t0", f"/rollouts/{rollout.id}", "/compare",
                f"/rollouts/{rollout.id}/steps", f"/rollouts/{rollout.id}/tokens", f"/compare?a={run_id}&b={run_id}",
                f"/runs/{run_id}?sort=reward&down=1&status=completed&q=t", f"/runs/{run_id}/tasks",
                f"/runs/{run_id}?sort=nonsense&down=7&offset=-1", "/?q=none&sort=mean_reward&down=0",
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
            status, headers, body, _ = await get(f"{url}/runs/{run_id}/run.html")
            assert status == 200
            assert "attachment" in headers["content-disposition"]
            (script,) = re.findall(r"<script>(.*?)</script>", body, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
            assert f"script-src 'sha256-{digest}';" in body  # ours, and no other
            assert "<img" not in body
            assert "default-src 'none'" in body
            assert "&lt;script&gt;document" in body
            status, headers, body, _ = await get(f"{url}/rollouts/{rollout.id}/raw/{call}")
            assert status == 200
            assert headers["content-type"].startswith("text/plain")
            _, _, body, _ = await get(f"{url}/rollouts/{rollout.id}")
            assert "&lt;script&gt;document" in body


async def test_the_page_of_a_rollout_leads_to_its_parent_and_to_what_branches_off_it(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        _, (parent, _) = await a_run(store, backend)
        policy = ry.policy.scripted({"steps": [{"text": "other"}]})
        (child,) = await ry.branch(parent, at=0, policy=policy, store=store, sandbox=backend)
        async with serve_app(page_app(store)) as url:
            _, _, body, _ = await get(f"{url}/rollouts/{child.id}")
            assert f'rel="parent" href="/rollouts/{parent.id}"' in body and "0 calls answered as its were" in body
            _, _, body, _ = await get(f"{url}/rollouts/{parent.id}")
            assert f'rel="branch-run" href="/runs/{child.run_id}"' in body and 'rel="parent"' not in body


async def test_an_answer_is_changed_on_the_page_and_the_branch_is_set_beside_its_parent(tmp_path, backend):
    other = tmp_path / "other.yaml"
    other.write_text("steps: [{text: done}]")
    async with ry.Store.open(tmp_path / "runs.db") as store, LocalActions(store, None) as actions:
        _, (parent, _) = await a_run(store, backend)
        call, token = parent.captured.records[0].id, "t" * 20
        async with serve_app(page_app(store, actions=actions, token=token)) as url:
            where = f"{url}/rollouts/{parent.id}/branch"
            _, _, body, _ = await get(f"{url}/rollouts/{parent.id}")
            assert f'rel="what-if" href="/rollouts/{parent.id}/branch?at={call}"' in body
            status, _, body, _ = await get(f"{where}?at={call}")
            assert status == 200 and "tool_calls" in body
            form = {"at": call, "answer": "I stop here.", "policy": f"scripted:{other}"}
            assert (await get(where, form))[0] == 403
            status, _, body, _ = await get(where, {**form, "answer": '{"say": 1}', "token": token})
            assert status == 400 and "the answer is not one" in body
            assert (await get(where, {**form, "token": token}))[0] == 200
            with anyio.fail_after(120):
                while not (
                    branched := [run for run in await store.list_runs() if run.rollouts and "branch" in run.config]
                ):
                    await anyio.sleep(0.1)
            (child,) = [one async for one in store.rollouts(branched[0].id)]
            assert (child.parent_rollout, child.parent_call, child.status) == (parent.id, call, "completed")
            _, _, body, _ = await get(f"{url}/rollouts/{child.id}")
            assert f'rel="side" href="/side?a={parent.id}&amp;b={child.id}"' in body and "I stop here." in body
            assert (await get(f"{url}/side?a={parent.id}&b={child.id}"))[0] == 200


async def test_what_is_not_there_is_a_404_and_nothing_can_be_changed_without_a_token(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        _, (rollout, _) = await a_run(store, backend)
        async with serve_app(page_app(store)) as url:
            assert (await get(f"{url}/rollouts/ro_none"))[0] == 404
            assert (await get(f"{url}/runs/run_none"))[0] == 404
            assert (await get(f"{url}/rollouts/{rollout.id}/files/..%2f..%2fetc%2fpasswd"))[0] == 404
            assert (await get(f"{url}/static/..%2fapp.py"))[0] == 404
            assert (await get(f"{url}/start"))[0] == 403
            assert (await get(f"{url}/rollouts/{rollout.id}/rescore", {}))[0] == 403


@pytest.mark.adversarial
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:1", 200),
        ("localhost", 200),
        ("[::1]:8700", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:80", 403),
    ],
)
async def test_a_website_whose_name_was_pointed_at_loopback_reads_nothing(tmp_path, host, status):
    async with (
        ry.Store.open(tmp_path / "runs.db") as store,
        serve_app(NoWebPages(page_app(store), AllowedHosts("127.0.0.1"), forms=True)) as url,
    ):

        def ask():
            request = urllib.request.Request(url, headers={"Host": host})
            try:
                return urllib.request.urlopen(request, timeout=30).status
            except urllib.error.HTTPError as error:
                return error.code

        assert await asyncio.to_thread(ask) == status


async def test_a_rollout_started_on_the_page_runs_is_watched_and_can_be_cancelled(tmp_path):
    good, slow = tmp_path / "good.yaml", tmp_path / "slow.yaml"
    good.write_text("steps: [{shell: 'touch out.txt'}, {text: done}]")
    slow.write_text("steps: [{sleep: 60}]")
    form = {"agent": "shell-agent", "mode": "transparent_proxy", "instruction": "x", "verify": "test -f out.txt"}
    async with ry.Store.open(tmp_path / "runs.db") as store, LocalActions(store, None) as actions:
        async with serve_app(page_app(store, actions=actions, token="t" * 20)) as url:
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
            status, _, body, _ = await get(f"{where}/cancel", {"token": "t" * 20})
            assert status == 409
            assert "was not started on this page" in body


async def test_the_page_shows_the_command_that_does_the_same_and_asks_no_token_for_it(tmp_path):
    from typer.main import get_command

    from rollyard.cli.main import app

    good = tmp_path / "it's good.yaml"
    good.write_text("steps: [{shell: 'touch out.txt'}, {text: done}]")
    form = {
        "agent": "shell-agent", "mode": "transparent_proxy", "sandbox": "local", "policy": f"scripted:{good}",
        "instruction": "say 'hello'; <b>now</b>", "setup": "echo one\necho two", "verify": "test -f out.txt", "do": "show",
    }  # fmt: skip
    db = str(tmp_path / "runs.db")
    async with ry.Store.open(db) as store, LocalActions(store, None, where=db) as actions:
        async with serve_app(page_app(store, actions=actions, token="t" * 20)) as url:
            status, _, body, _ = await get(f"{url}/start", form)
            assert status == 200
            shown = html.unescape(re.search(r'<pre[^>]*id="command">(.*?)</pre>', body, re.S)[1])
            assert actions.running == ()
    words = shlex.split(shown)
    assert words[:2] == ["rollyard", "run"]
    verb = get_command(app).get_command(None, "run")
    options = verb.make_context("run", words[2:]).params
    assert options["instruction"] == form["instruction"]
    assert list(options["setup"]) == ["echo one", "echo two"]
    done = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *words, "--json", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said, problem = await done.communicate()
    assert json.loads(said)["reward"] == 1.0, problem


async def test_an_option_that_can_be_no_can_be_given_as_no_on_the_page(tmp_path):
    form = {"agent": "shell-agent", "policy": "scripted:x.yaml", "instruction": "x", "do": "show"}
    async with ry.Store.open(tmp_path / "runs.db") as store, LocalActions(store, None) as actions:
        async with serve_app(page_app(store, actions=actions, token="t" * 20)) as url:
            for value, words in {"": 0, "true": "--disable-thinking", "false": "--no-disable-thinking"}.items():
                _, _, body, _ = await get(f"{url}/start", {**form, "disable_thinking": value})
                shown = html.unescape(re.search(r'<pre[^>]*id="command">(.*?)</pre>', body, re.S)[1])
                assert [word for word in shlex.split(shown) if "thinking" in word] == ([words] if words else [])
                choice = re.search(r'<select name="disable_thinking".*?</select>', body, re.S)[0]
                assert re.findall(r'value="(\w*)"( selected)?', choice) == [
                    (one, " selected" if one == value else "") for one in ("", "true", "false")
                ]


async def test_a_stored_task_is_run_as_it_is_and_not_mixed_with_typed_commands(tmp_path):
    async with ry.Store.open(tmp_path / "runs.db") as store, LocalActions(store, "examples/tasks") as actions:
        form = {"agent": "oracle", "task": "file-edit"}
        assert shlex.split(actions.command(form))[:5] == ["rollyard", "run", "examples/tasks", "--filter", "file-edit"]
        with pytest.raises(ConfigError, match="brings its own"):
            await actions.start({**form, "verify": "true"})
        with pytest.raises(ConfigError, match="no stored task"):
            await actions.start({**form, "task": "other"})


async def test_tokens_money_and_time_are_shown_for_the_run_and_for_each_rollout(tmp_path):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        run_id, rollout_id = await fill(store, 24, 3)
        rows = {row.id: row for row in await store.lines(run_id)}
        async with serve_app(page_app(store)) as url:
            _, _, run, _ = await get(f"{url}/runs/{run_id}")
            _, _, rollout, _ = await get(f"{url}/rollouts/{rollout_id}")
    row = rows[rollout_id]
    price = PRICES[row.policy]
    spent = (row.prompt_tokens * price["prompt"] + row.completion_tokens * price["completion"]) / 1e6
    assert f'<span class="value ">{money(spent)}</span>' in rollout
    whole = sum(
        (r.prompt_tokens * PRICES[r.policy]["prompt"] + r.completion_tokens * PRICES[r.policy]["completion"]) / 1e6
        for r in rows.values()
    )
    assert f'<span class="value ">{money(whole)}</span>' in run
    assert "sandbox and verifier" in rollout


async def test_a_run_under_way_lists_what_is_in_flight_with_a_page_for_each(tmp_path, backend):
    slow = ry.policy.scripted({"steps": [{"shell": "echo one"}, {"sleep": 60}]})
    tasks = [Task(id=f"t{n}", instruction="x") for n in range(3)]
    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(slow, log=store) as gate:
        async with (
            ry.Run(tasks, agent="shell-agent", sandbox=backend, gate=gate, store=store, parallel=2) as run,
            serve_app(page_app(store)) as url,
        ):
            with anyio.fail_after(60):
                while (body := (await get(f"{url}/runs/{run.id}"))[2]).count('<span class="tag live">wait') < 2:
                    await anyio.sleep(0.1)
            assert "In flight" in body
            flying = re.findall(r'data-href="(/rollouts/[^"]+)"', body)
            assert len(flying) == 2
            assert re.search(r'<a href="/rollouts/[^"]+">t[01]</a></td><td class="n">0</td><td>shell-agent</td>', body)
            status, _, body, _ = await get(url + flying[0])
            assert status == 200
            assert re.search(r"<h1>t[01] ", body)


async def test_mounted_under_another_path_every_link_stays_under_it(tmp_path):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        run_id, rollout_id = await fill(store, 60, 3)
        async with serve_app(Starlette(routes=[Mount("/page", page_app(store))])) as url:
            for path in ("/", f"/runs/{run_id}", f"/runs/{run_id}/tasks", f"/rollouts/{rollout_id}", "/static/page.js"):
                status, _, body, _ = await get(f"{url}/page{path}")
                assert status == 200
                links = re.findall(r'(?:href|src|action|data-href|data-live)="(/[^"]*)"', body)
                assert [link for link in links if not link.startswith("/page/")] == []


async def test_live_news_are_numbered_and_say_when_a_run_is_over(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        run_id, _ = await a_run(store, backend)
        async with serve_app(page_app(store)) as url:
            news = json.loads((await get(f"{url}/live?run={run_id}"))[2])
            assert news["finished"] is True
            assert news["seq"] > 0
            later = json.loads((await get(f"{url}/live?run={run_id}&after={news['seq']}"))[2])
            assert later["seq"] == news["seq"]
            assert later["events"] == []


async def test_a_run_shows_its_failures_by_what_they_say_and_the_policy_that_was_stopped(tmp_path):
    said = f"http://127.0.0.1:9/v1/models answered 401: {HOSTILE}"
    why = Failure(
        boundary="policy", cause="UpstreamError", message=said, stage="wait", retry=True, grade=False, trainable=False
    )
    async with ry.Store.open(tmp_path / "runs.db") as store:
        await store.create_run({"tasks": "x"}, id="run_f")
        for number in range(2):
            failed = Rollout(id=f"ro_{number}", run_id="run_f", task=Task(id="t", instruction="x"), failure=why)
            await store.commit_rollout(failed)
        one = Attempt(id="a", run_id="run_f", task_id="t", task_digest="", agent="x", policy="", number=0)
        await store.add_attempts("run_f", [one])
        fields = {"policy": "", "message": said}
        await store.event(Event(at=1.0, name=POLICY_STOPPED, run_id="run_f", fields=fields))
        async with serve_app(page_app(store)) as url:
            _, _, page, _ = await get(f"{url}/runs/run_f")
    assert f"<b>2</b> × {html.escape(said).replace('&#x27;', '&#39;').replace('&quot;', '&#34;')}" in page
    assert "was asked no more" in page and "<script>document" not in page


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ""),
        ({"base_url": "http://m:1/v1"}, " --base-url http://m:1/v1"),
        ({"policies": {"p": "tokens:u"}}, " --policy tokens:u"),
    ],
    ids=["none", "a server", "a policy"],
)
async def test_the_command_that_runs_it_again_names_a_policy_where_there_was_one(tmp_path, config, words):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        await store.create_run({"tasks": "x", **config}, id="run_c")
        task = Task(id="t", instruction="x", source="tasks/t")
        judged = Rollout(
            id="ro_c", run_id="run_c", task=task, agent="oracle", sandbox="local", verdict=Verdict(reward=1.0)
        )
        await store.commit_rollout(judged)
        async with serve_app(page_app(store)) as url:
            _, _, page, _ = await get(f"{url}/rollouts/ro_c")
            _, _, whole, _ = await get(f"{url}/runs/run_c")
    assert f">rollyard run tasks/t --agent oracle --sandbox local{words}<" in page
    assert "over 1 task<" in whole and "of 1 group<" in whole
