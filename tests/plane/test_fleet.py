"""The real `fleet-python` SDK against our Fleet-shaped server: instances are local sandboxes that run an example world."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import pickle
import zipfile

import httpx
import pytest

from rollyard.core.errors import EnvError
from rollyard.tools import RemoteTools
from tests.fleet_server import KEY, serving

fleet = pytest.importorskip("fleet", reason="the extra `fleet` (fleet-python) is not installed")
pytestmark = pytest.mark.anyio


@pytest.fixture
async def server():
    async with serving() as made:
        yield made


def client(server, **more):
    return fleet.AsyncFleet(api_key=KEY, base_url=server.url, **more)


async def test_the_sdk_makes_resets_queries_and_closes_an_instance(server, monkeypatch):
    monkeypatch.setenv("FLEET_BASE_URL", server.url)
    monkeypatch.setenv("FLEET_API_KEY", KEY)
    made = await fleet.AsyncFleet().make(
        "tickets:1.0.0", data_key="default:v1", ttl_seconds=600, run_id="r1", env_variables={"COLOUR": "red"}
    )
    assert (made.status, made.env_key, made.version, made.data_key) == ("running", "tickets", "v1.0.0", "default")
    assert made.urls.root.endswith("/") and made.urls.manager.api == made.urls.root + "api/v1/env"
    assert (await made.reset(seed=2)).success
    resources = await made.resources()
    assert {resource.resource.name for resource in resources} == {"seed", "current"}
    described = await made.db("current").describe()
    assert [table.name for table in described.tables] == ["notes", "tickets"]
    rows = (await made.db("current").query("SELECT title FROM tickets WHERE id = ?", [1])).rows
    assert rows == [["Please order more coffee"]], "the seed turns the list"
    written = await made.db("current").exec("UPDATE tickets SET state = 'closed' WHERE id = 1")
    assert written.success and written.rows_affected == 1
    assert not (await made.db("seed").exec("DELETE FROM tickets")).success, "nobody writes to the seed"
    assert not (await made.db("current").query("DELETE FROM tickets")).success, "a query reads"
    diff = await made.db("seed").diff(made.db("current"))
    await diff.expect_only([{"table": "tickets", "pk": 1, "field": "state", "after": "closed"}])
    async with RemoteTools(made.urls.root, KEY, timeout_s=30) as tools:
        assert [tool.name for tool in await tools.list()] == ["list_tickets", "get_ticket", "set_state", "add_note"]
        assert (await tools.ask("get_ticket", {"ticket_id": 1})).value["state"] == "closed"
        assert (await tools.ask("get_ticket", {"ticket_id": 99})).value == {"error": "there is no ticket 99"}
    closed = await made.close()
    assert closed.status == "stopped" and closed.terminated_at
    assert made.instance_id not in await server.left()


async def test_the_blocking_sdk_works_as_well(server):
    def used():
        blocking = fleet.Fleet(api_key=KEY, base_url=server.url)
        made = blocking.make("tickets")
        made.instance.load()
        count = made.db("current").query("SELECT count(*) FROM tickets").rows
        beat = made.heartbeat()
        made.close()
        return count, beat.success

    assert await asyncio.to_thread(used) == ([[5]], True)


async def test_environments_regions_account_runs_and_batches(server):
    sdk = client(server)
    one, two = await asyncio.gather(sdk.make("tickets", run_id="r1"), sdk.make("tickets", run_id="r2"))
    assert "tickets" in {env.env_key for env in await sdk.list_envs()}
    assert (await sdk.environment("tickets")).default_version == "v1.0.0"
    assert "us-west-1" in await sdk.list_regions()
    account = await sdk.account()
    assert (account.instance_count, account.instance_limit) == (2, 1_000_000)  # without a quota
    assert {run.run_id: run.running_count for run in await sdk.list_runs()} == {"r1": 1, "r2": 1}
    assert [env.instance_id for env in await sdk.instances(run_id="r2")] == [two.instance_id]
    assert (await sdk.instance(one.instance_id)).status == "running"
    assert [gone.instance_id for gone in await sdk.close_all(run_id="r1")] == [one.instance_id]
    assert (await sdk.instance(one.instance_id)).status == "stopped"
    assert [env.instance_id for env in await sdk.instances()] == [two.instance_id]


async def test_what_is_wrong_with_a_create_has_a_type_of_its_own(server):
    from fleet._async.exceptions import (
        FleetAuthenticationError,
        FleetEnvironmentNotFoundError,
        FleetInstanceLimitError,
        FleetRegionError,
        FleetVersionNotFoundError,
    )

    sdk = client(server)
    with pytest.raises(FleetEnvironmentNotFoundError):
        await sdk.make("nothing")
    with pytest.raises(FleetVersionNotFoundError):
        await sdk.make("tickets:9.9")
    with pytest.raises(FleetVersionNotFoundError):
        await sdk.make("tickets", data_key="default:v7")
    with pytest.raises(FleetRegionError):
        await sdk.make("tickets", region="moon")
    with pytest.raises(FleetAuthenticationError):
        await fleet.AsyncFleet(api_key="wrong", base_url=server.url).make("tickets")
    await server.plane.store.set_terms("local", quota=0)
    with pytest.raises(FleetInstanceLimitError) as caught:
        await sdk.make("tickets")
    assert caught.value.instance_limit == 0


async def test_a_create_whose_answer_was_lost_is_recovered_and_not_made_twice(server):
    """The SDK sends the same request id again; 409 names the instance that the first request made."""
    sent = {"x-request-id": "request-1", "authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        first = await http.post("/v1/env/instances", json={"env_key": "tickets"}, headers=sent)
        again = await http.post("/v1/env/instances", json={"env_key": "tickets"}, headers=sent)
    assert first.status_code == 200 and again.status_code == 409
    assert again.json()["detail"]["error"] == "duplicate_request_id"
    assert again.json()["detail"]["instance_id"] == first.json()["instance_id"]

    made = {}

    async def lost(request):
        """The first answer to a create is thrown away, as a proxy that gave up would."""
        response = await httpx.AsyncHTTPTransport().handle_async_request(request)
        if request.method == "POST" and request.url.path == "/v1/env/instances" and not made:
            await response.aread()
            made.update(json.loads(response.content))
            return httpx.Response(503)
        return response

    import httpx_retries

    policy = httpx_retries.Retry(total=3, status_forcelist=[503], allowed_methods=["GET", "POST"], backoff_factor=0.01)
    retrying = httpx_retries.RetryTransport(transport=httpx.MockTransport(lost), retry=policy)
    sdk = client(server, httpx_client=httpx.AsyncClient(transport=retrying, timeout=60))
    recovered = await sdk.make("tickets")
    assert recovered.instance_id == made["instance_id"] and recovered.status == "running"


async def test_a_world_that_does_not_start_is_an_error_with_its_last_words(server):
    from rollyard.plane.compat.fleet import World

    broken = World(key="broken", version="1", command=("python3", "-c", "raise SystemExit('no such data')"), port=8700)
    async with serving(worlds=[broken]) as other:
        async with httpx.AsyncClient(base_url=other.url, timeout=60) as http:
            answer = await http.post(
                "/v1/env/instances", json={"env_key": "broken"}, headers={"authorization": f"Bearer {KEY}"}
            )
        assert answer.status_code == 503 and "no such data" in answer.text
        assert await other.left() == []


async def test_heartbeats_keep_an_instance_and_their_absence_ends_it(server):
    sdk = client(server)
    patient, made = await asyncio.gather(
        sdk.make("tickets", heartbeat_interval=600), sdk.make("tickets", heartbeat_interval=2)
    )
    first = await patient.heartbeat()
    second = await patient.heartbeat()
    assert first.success and first.interval_seconds == 600 and second.deadline_timestamp > first.deadline_timestamp
    async with asyncio.timeout(60):
        while (await sdk.instance(made.instance_id)).status == "running":
            await asyncio.sleep(0.2)
    assert await server.left() == [patient.instance_id]
    with pytest.raises(fleet._async.exceptions.FleetAPIError, match="stopped"):
        await made.heartbeat()


async def test_verifier_functions_run_on_the_instance(server):
    made = await client(server).make("tickets")
    code = """
def check(env: Environment, final_answer: str | None = None) -> float:
    before = env.db("seed")
    after = env.db("current")
    before.diff(after).expect_only([])
    return TASK_SUCCESSFUL_SCORE
"""
    done = await made.verify_raw(code)
    assert done.success and done.result == 1, done
    broken = await made.verify_raw("def check(env):\n    return 1 / 0\n")
    assert not broken.success and "ZeroDivisionError" in broken.error and broken.result is None


async def test_tasks_are_imported_and_their_verifiers_run_by_digest(server):
    sdk = client(server)
    listed = await sdk.load_tasks(env_key="tickets")
    assert {task.key for task in listed} == {"close-printer", "count-open"}
    task = next(task for task in listed if task.key == "count-open")
    made = await sdk.make(task.env_key)
    right = await task.verify_detailed_async(made, final_answer="There are 3 of them")
    assert right.success and right.result == 1.0 and not right.bundle_cache_hit and right.execution_time_ms > 0
    wrong = await task.verify_detailed_async(made, final_answer="4")
    assert wrong.success and wrong.result == 0.0 and wrong.bundle_cache_hit
    changed = await sdk.update_task(
        "count-open", verifier_code="def check(env, final_answer=None):\n    raise OSError('x')\n"
    )
    assert changed.verifier.code.startswith("def check")
    (task,) = await sdk.load_tasks(keys=["count-open"])
    failed = await task.verify_detailed_async(made, final_answer="3")
    assert not failed.success and failed.result is None and "OSError" in failed.error["message"]
    new = fleet.Task(key="new", prompt="p", env_id="tickets", verifier_func="def ok(env):\n    return 1.0\n")
    assert (await sdk.import_single_task(new)).status_code == 200
    assert (await sdk.get_task("new")).prompt == "p"


def bundle(code):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as packed:
        packed.writestr("verifier.py", code)
    return made.getvalue()


class Bomb:
    """Does something where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (exec, (f"import pathlib; pathlib.Path({self.path!r}).write_text('unpickled')",))


@pytest.mark.adversarial
async def test_pickled_arguments_are_never_opened_in_the_server(server, tmp_path):
    made = await client(server).make("tickets")
    mark = tmp_path / "mark"
    packed = bundle("def verify(env, *args, **named):\n    print(args)\n    return 1.0\n")
    asked = {
        "key": "k",
        "sha256": hashlib.sha256(packed).hexdigest(),
        "bundle": base64.b64encode(packed).decode(),
        "args": base64.b64encode(pickle.dumps({"args": (None, Bomb(str(mark))), "kwargs": {}})).decode(),
        "args_array": [{"env": made.instance_id}],
        "function_name": "verify",
        "timeout": 30,
    }
    async with httpx.AsyncClient(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
        answer = (await http.post("/v1/verifiers/execute", json=asked)).json()
        assert not mark.exists()
        assert answer["success"] or "No such file" in str(answer["error"]), "it went off inside, if anywhere"
        forged = {**asked, "sha256": hashlib.sha256(b"another").hexdigest()}
        assert (await http.post("/v1/verifiers/execute", json=forged)).status_code == 400
        unknown = {**asked, "bundle": None, "sha256": "0" * 64}
        assert (await http.post("/v1/verifiers/execute", json=unknown)).status_code == 404
        for packed in (b"not a zip", bundle(b"\xff\xfe")):
            spoiled = {**asked, "bundle": base64.b64encode(packed).decode(), "sha256": None}
            assert (await http.post("/v1/verifiers/execute", json=spoiled)).status_code == 400


@pytest.mark.adversarial
async def test_an_agents_token_opens_the_tools_of_its_instance_and_nothing_else(server):
    sdk = client(server)
    made, other = await asyncio.gather(sdk.make("tickets"), sdk.make("tickets"))
    token = server.guard.instance_token(made.instance_id)
    async with RemoteTools(made.urls.root + "mcp", token, timeout_s=30) as tools:
        assert len(await tools.list()) == 4
    for key in (token, "wrong", None):
        async with RemoteTools(other.urls.root + "mcp", key, timeout_s=30, pauses_s=(0,)) as tools:
            with pytest.raises(EnvError, match="HTTP 40[134]"):
                await tools.list()
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=60) as http:
        manager = made.urls.manager.api
        for method, url, status in (
            ("POST", f"{manager}/reset", 403),
            ("GET", f"{manager}/resources", 403),
            ("POST", f"{manager}/resources/sqlite/seed/query", 403),
            ("POST", f"{manager}/execute_verifier_function", 403),
            ("DELETE", f"{server.url}/v1/env/instances/{made.instance_id}", 401),
            ("GET", f"{server.url}/v1/env/instances", 401),
            ("GET", f"{server.url}/v1/runner-auth/token", 401),
            ("POST", f"{server.url}/v1/verifiers/execute", 401),
        ):
            assert (await http.request(method, url, json={})).status_code == status, url


async def test_a_server_that_was_started_again_finds_its_instances():
    from rollyard.plane.compat.fleet import fleet_app, load_worlds, one_key
    from rollyard.testing.serve import serve_app
    from tests.fleet_server import WORLDS

    async with serving(secret="a secret that stays") as server:
        made = await client(server).make("tickets", run_id="kept")
        later = fleet_app(
            load_worlds(WORLDS), server.plane, server.engine, admit=one_key(KEY), secret="a secret that stays"
        )
        async with serve_app(later) as url:
            sdk = fleet.AsyncFleet(api_key=KEY, base_url=url)
            (found,) = await sdk.instances(run_id="kept")
            assert found.instance_id == made.instance_id
            await found.instance.load()
            assert (await found.db("current").query("SELECT count(*) FROM tickets")).rows == [[5]]
            await found.close()
        assert (await client(server).instance(made.instance_id)).status == "stopped"


async def test_a_request_id_is_remembered_by_a_server_that_was_started_again(server):
    """It is kept with the instance in the plane's store, and not in the process that answered first."""
    from rollyard.plane.compat.fleet import fleet_app, load_worlds, one_key
    from rollyard.plane.parts import assemble
    from rollyard.testing.serve import serve_app
    from tests.fleet_server import WORLDS

    sent = {"x-request-id": "request-9", "authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(timeout=60, headers=sent) as http:
        first = await http.post(f"{server.url}/v1/env/instances", json={"env_key": "tickets"})
        again = await assemble(server.plane.store, {server.engine.name: server.engine})
        later = fleet_app(load_worlds(WORLDS), again, server.engine, admit=one_key(KEY))
        async with serve_app(later) as url:
            second = await http.post(f"{url}/v1/env/instances", json={"env_key": "tickets"})
    assert (first.status_code, second.status_code) == (200, 409)
    assert second.json()["detail"]["instance_id"] == first.json()["instance_id"]
    assert len(await server.left()) == 1


async def test_tasks_verifiers_and_written_sessions_are_known_to_every_replica_and_to_their_owner(server):
    from rollyard.plane.compat.fleet import fleet_app
    from rollyard.plane.parts import assemble
    from rollyard.testing.serve import serve_app

    async def named(header):
        return header or ""

    again = await assemble(server.plane.store, {server.engine.name: server.engine})
    apps = [fleet_app([], plane, server.engine, admit=named) for plane in (server.plane, again)]
    code = "def check(env):\n    return 1.0\n"
    task = {"key": "mine", "prompt": "p", "env_id": "tickets", "verifier_func": code}
    said = {"session_id": "s1", "messages": [{"role": "user", "content": "go"}]}
    async with serve_app(apps[0]) as one, serve_app(apps[1]) as two, httpx.AsyncClient(timeout=60) as http:
        ann, bob = {"authorization": "ann"}, {"authorization": "bob"}
        made = (await http.post(f"{one}/v1/tasks", json=task, headers=ann)).json()
        for _ in range(2):
            written = await http.post(f"{one}/v1/sessions/ingest", json=said, headers=ann)
        assert written.json()["message_count"] == 2
        assert (await http.get(f"{two}/v1/tasks/mine", headers=ann)).json() == made
        digest = {"sha256": hashlib.sha256(code.encode()).hexdigest()}
        assert (await http.get(f"{two}/v1/verifiers/check", params=digest, headers=ann)).json()["success"]
        kept = await http.get(f"{two}/v1/verifiers/{made['verifier_id']}", headers=ann)
        assert kept.json()["code"] == code
        told = (await http.get(f"{two}/v1/sessions/s1/transcript", headers=ann)).json()
        assert [line["content"] for line in told["transcript"]] == ["go", "go"]
        for path in ("tasks/mine", f"verifiers/{made['verifier_id']}", "sessions/s1/transcript"):
            assert (await http.get(f"{two}/v1/{path}", headers=bob)).status_code == 404, path


@pytest.mark.adversarial
async def test_no_body_makes_the_server_fail(server):
    """Whatever is sent is refused with words; nothing is a 500, and the instance lives on."""
    made = await client(server).make("tickets")
    manager = made.urls.manager.api
    headers = {"authorization": f"Bearer {KEY}", "x-runner-token": server.guard.runner_token("local")}
    bodies = [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"x"',
        b"{}",
        b'{"env_key": 7}',
        b'{"query": "SELECT 1", "args": [{"a": []}]}',
    ]
    bodies += [
        b'{"query": "SELECT \\u0000"}',
        b'{"query": "SELECT ?", "args": [1e400]}',
        b'{"path": "../../etc/none"}',
        b"\xff",
    ]
    bodies += [b'{"seed": 99999999999999999999999}', b'{"function_code": "", "function_name": null}', b'{"sha256": 1}']
    posts = [f"{server.url}/v1/env/instances", f"{server.url}/v1/verifiers/execute", f"{server.url}/v1/tasks"]
    posts += [f"{manager}/{path}" for path in ("reset", "resources/sqlite/current/query", "fs/file", "fs/file/text")]
    posts += [f"{manager}/resources/sqlite/no%2Fsuch/query", f"{server.url}/v1/env/instances/no/heartbeat"]
    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        for url in posts:
            for content in bodies:
                answer = await http.post(url, content=content)
                assert answer.status_code < 500 or answer.status_code in (501, 502), (url, content, answer.text)
        assert (await http.get(f"{manager}/nothing")).status_code == 501
        assert (await http.get(f"{server.url}/i/none/mcp")).status_code == 404
        assert (await http.get(made.urls.app[0] + "health")).json() == {"status": "healthy"}
        for hidden in ("mcp", "%6dcp", "x/../mcp", "/mcp", "api/v1/env/resources"):
            assert (await http.get(made.urls.app[0] + hidden)).status_code == 404, hidden
        assert (await http.get(made.urls.app[0].replace("/p/", "/p/0"))).status_code == 404
    assert (await made.reset()).success
