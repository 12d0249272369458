"""`rollyard serve rollouts`: jobs in, rows out, for trainers of any language; nothing is lost with the server."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import http.server
import json
import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import anyio
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, PolicyError
from rollyard.store import Store
from rollyard.train.formats import FORMATS
from rollyard.train.rollouts_client import RolloutsClient, RolloutsRefused
from rollyard.train.service.api import RolloutsApi
from rollyard.train.service.openapi import document
from rollyard.train.service.request import RolloutJobRequest, ServiceDefaults, tasks_of
from rollyard.train.service.serve import read_keys
from tests.train.served import server

pytestmark = pytest.mark.anyio
SLOW = "steps:\n  - sleep: 60\n"
TASK = {"id": "t", "instruction": "x", "verify": ["test -f out.txt"]}
ANN, BOB = "key-of-ann-0123456789", "key-of-bob-0123456789"


async def test_a_job_runs_once_whatever_is_repeated_and_its_rows_come_in_every_format(tmp_path):
    async with server(tmp_path) as (url, _), RolloutsClient(url) as rollouts:
        job = await rollouts.submit(key="one", tasks=[TASK], attempts=2)
        assert (await rollouts.submit(key="one", tasks=[TASK], attempts=2))["id"] == job["id"]
        with pytest.raises(RolloutsRefused, match="another request") as refused:
            await rollouts.submit(key="one", tasks=[TASK], attempts=3)
        assert refused.value.status == 409
        done = await rollouts.wait(job["id"])
        assert (done["state"], done["attempts"]) == ("done", {"done": 2})
        assert [(r["attempt"], r["reward"]) for r in await rollouts.rollouts(job["id"])] == [(0, 1.0), (1, 1.0)]
        answer = await rollouts.row_answer(job["id"])
        assert [(row["reward"], sum(row["loss_mask"]) > 0) for row in answer["rows"]] == [(1.0, True)] * 2
        assert answer["left_out"] == []
        assert len(await rollouts.rows(job["id"], "attempts")) == 2
        assert await rollouts.rows(job["id"], group="another") == []
        for name in FORMATS:
            if name not in ("prime_rl", "tinker"):  # a script has no temperature and no logprobs, which those two want
                assert await rollouts.rows(job["id"], name), name
        with pytest.raises(RolloutsRefused, match="temperature") as refused:
            await rollouts.rows(job["id"], "prime_rl")
        assert (refused.value.status, refused.value.code) == (422, "untrainable")
        with pytest.raises(RolloutsRefused, match="no row format named 'trll'"):
            await rollouts.rows(job["id"], "trll")


async def test_a_trainer_in_node_does_a_batch_of_grpo(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed")
    words = ("--policy", "queue#renderer=bytes", "--parallel", "4")
    async with server(tmp_path, *words, script=None, keys={"ann": ANN}) as (url, _):
        command = [node, str(Path(__file__).with_name("trainer.mjs")), url, ANN]
        with anyio.fail_after(200):
            done = await anyio.run_process(command, check=False)
    assert done.returncode == 0, done.stderr.decode()
    said = json.loads(done.stdout)
    assert (said["rows"], said["left_out"], said["mean"], said["answered"]) == (4, [], 0.5, 8)
    assert sorted(said["advantages"]) == [-0.5, -0.5, 0.5, 0.5]
    assert (said["versions"], said["logprobs"], said["policy_version"]) == ([7], [-0.25], 8)
    assert min(said["trained"]) > 30  # both answers of each rollout, token by token


@pytest.mark.slow
async def test_a_killed_server_is_started_again_and_goes_on(tmp_path):
    slow = "steps:\n  - shell: sleep 1; echo hello > out.txt\n  - text: done\n"
    async with server(tmp_path, "--parallel", "1", script=slow) as (url, process), RolloutsClient(url) as rollouts:
        job = await rollouts.submit(tasks=[TASK], attempts=3)
        with anyio.fail_after(120):
            while not (await rollouts.job(job["id"]))["attempts"].get("done"):
                await anyio.sleep(0.1)
        os.kill(process.pid, signal.SIGKILL)
    async with server(tmp_path, "--parallel", "1", script=slow) as (url, _), RolloutsClient(url) as rollouts:
        done = await rollouts.wait(job["id"])
        assert (done["state"], done["attempts"]) == ("done", {"done": 3})
        assert sorted(r["attempt"] for r in await rollouts.rollouts(job["id"])) == [0, 1, 2]


async def test_a_job_that_died_before_its_run_was_kept_whole_is_whole_after_the_restart(tmp_path):
    """The server is killed after its first attempt was kept and before the second."""
    from rollyard.core.lease import Attempt
    from rollyard.core.rollout_job import RolloutJob

    body = json.dumps({"request": {"tasks": [TASK], "attempts": 2}, "sign": "x"})
    async with Store.open(tmp_path / "r.db") as store:
        job = RolloutJob(id="job_1", owner="local", key="k", body=body, run_id="run_1", created_at=1.0, updated_at=1.0)
        await store.add_job(job)
        await store.create_run({"agents": ["shell-agent"], "attempts": 2}, id="run_1")
        half = Attempt(id="a0", run_id="run_1", task_id="t", agent="shell-agent", number=0)
        await store.add_attempts("run_1", [half])
    async with server(tmp_path) as (url, _), RolloutsClient(url) as rollouts:
        done = await rollouts.wait("job_1")
        assert (done["state"], done["attempts"]) == ("done", {"done": 2})


@pytest.fixture
async def backend():
    async with ry.sandbox.backend("local") as found:
        yield found


@pytest.mark.slow
async def test_a_cancelled_job_ends_its_rollouts_and_stays_cancelled(tmp_path, backend):
    async with server(tmp_path, script=SLOW) as (url, _), RolloutsClient(url) as rollouts:
        job = await rollouts.submit(tasks=[TASK])
        with anyio.fail_after(120):
            while not await backend.list({"rollyard.run": job["run_id"]}):
                await anyio.sleep(0.1)
            assert (await rollouts.cancel(job["id"]))["state"] == "cancelled"
            while await backend.list({"rollyard.run": job["run_id"]}):
                await anyio.sleep(0.1)
        assert (await rollouts.wait(job["id"]))["state"] == "cancelled"
        assert (await rollouts.cancel(job["id"]))["state"] == "cancelled"
    async with server(tmp_path, script=SLOW) as (url, _), RolloutsClient(url) as rollouts:
        assert (await rollouts.job(job["id"]))["state"] == "cancelled"


@pytest.mark.adversarial
async def test_owners_do_not_see_each_other_and_have_a_quota(tmp_path):
    words = ("--quota", "1", "--policy", "queue#renderer=bytes")
    async with server(tmp_path, *words, script=None, keys={"ann": ANN, "bob": BOB}) as (url, _):
        async with RolloutsClient(url, ANN) as ann, RolloutsClient(url, BOB) as bob, RolloutsClient(url, "x") as nobody:
            job = await ann.submit(tasks=[TASK])
            for forbidden in (bob.job, bob.cancel, bob.rows, bob.rollouts):
                with pytest.raises(RolloutsRefused, match="there is no job") as refused:
                    await forbidden(job["id"])
                assert refused.value.status == 404
            with pytest.raises(RolloutsRefused, match="ann has 1 jobs under way") as refused:
                await ann.submit(tasks=[TASK])
            assert refused.value.status == 429
            assert (await bob.submit(tasks=[TASK]))["state"] == "queued"
            for of_several in (ann, bob):  # nobody said whose the calls of both are
                with pytest.raises(RolloutsRefused) as refused:
                    await of_several.take(wait=0)
                assert refused.value.status == 403
            with pytest.raises(RolloutsRefused, match="missing or wrong") as refused:
                await nobody.job(job["id"])
            assert refused.value.status == 401


@pytest.mark.adversarial
async def test_what_a_client_may_not_choose_and_what_makes_no_sense_is_refused_by_name(tmp_path):
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "one.jsonl").write_text(json.dumps(TASK) + "\n")
    (tmp_path / "secret.jsonl").write_text(json.dumps(TASK) + "\n")
    words = ("--tasks", str(tmp_path / "sets"), "--callback-host", "127.0.0.1")
    async with server(tmp_path, *words) as (url, _), RolloutsClient(url) as rollouts:
        for request, reason in (
            ({"tasks": [TASK], "options": {"mounts": []}}, "mounts: this server decides"),
            ({"tasks": [TASK], "options": {"base_url": "http://x/v1"}}, "base_url: this server decides"),
            ({"tasks": [TASK], "options": {"speed": 1}}, "no option 'speed'"),
            ({"tasks": [TASK], "parallel": 99}, "more than this server's 8"),
            ({"tasks": [TASK], "attempts": 0}, "attempts"),
            ({"tasks": [TASK], "agents": ["nobody"]}, "nobody"),
            ({"tasks": [TASK], "surprise": 1}, "surprise"),
            ({"tasks": [TASK], "callback": "http://169.254.169.254/x"}, "no callback goes to"),
            ({"tasks": []}, "no task"),
            ({}, "tasks or the name of a taskset"),
            ({"taskset": "../secret.jsonl"}, "there is no taskset"),
            ({"tasks": [{**TASK, "files": [{"path": "/x", "source": "/etc/passwd"}]}]}, "passwd"),
            ({"tasks": [{**TASK, "image": "/etc"}]}, "/etc is a path"),
            ({"tasks": [{**TASK, "trusted": True}]}, "unknown field 'trusted'"),
            ({"taskset": "one.jsonl\0"}, "there is no taskset"),
            ({"tasks": [TASK], "agents": [str(tmp_path / "agent.toml")]}, "no agent named"),
            ({"tasks": [TASK], "agents": ["rollyard.train.tiny:nothing"]}, "no agent named"),
            ({"tasks": [TASK], "attempts": 10**9}, "more than 100,000"),
            ({"tasks": [TASK], "retries": 10**9}, "retries"),
            ({"tasks": [TASK], "callback": "http://127.0.0.1:99999/"}, "no callback goes to"),
        ):
            with pytest.raises(RolloutsRefused, match=reason) as refused:
                await rollouts.submit(**request)
            assert refused.value.status == 400, request
        assert (await rollouts.wait((await rollouts.submit(taskset="one.jsonl"))["id"]))["state"] == "done"
        done = await anyio.run_process(["curl", "-s", f"{url}/v1/calls?wait=abc"])
        assert json.loads(done.stdout)["error"]["message"] == "wait=abc is no number"


@pytest.mark.adversarial
@pytest.mark.parametrize("place", ["here", "where files of the moment are"])
def test_rows_of_a_client_are_never_the_users_own(tmp_path, monkeypatch, place):
    """Wherever the server was started, also where its own temporary files are."""
    monkeypatch.chdir(tmp_path if place == "here" else tempfile.gettempdir())
    code = {"kind": "python", "options": {"ref": f"{tmp_path}/evil.py:check"}}
    (task,) = tasks_of(RolloutJobRequest(tasks=[TASK]), ServiceDefaults(agent="nop", sandbox="local"))
    assert not task.trusted
    for row in ({"verifier": code}, {"build": "."}, {"image": "./x"}, {"source": "."}):
        with pytest.raises(ConfigError, match="is a path of this machine"):
            tasks_of(
                RolloutJobRequest(tasks=[{"instruction": "x", **row}]), ServiceDefaults(agent="nop", sandbox="local")
            )


@pytest.mark.adversarial
async def test_bytes_that_are_no_request_are_refused_and_the_server_goes_on(tmp_path):
    async with server(tmp_path) as (url, _), RolloutsClient(url) as rollouts:
        (tmp_path / "deep").write_bytes(b'{"tasks": ' + b"[" * 100_000)
        (tmp_path / "large").write_bytes(b" " * (33 << 20))
        (tmp_path / "text").write_bytes(b"\xff\0")
        for name in ("deep", "large", "text"):
            command = ["curl", "-s", f"{url}/v1/jobs", "--data-binary", f"@{tmp_path / name}"]
            done = await anyio.run_process([*command, "-H", "content-type: application/json"])
            assert json.loads(done.stdout)["error"]["code"] == "invalid", name
        assert (await rollouts.wait((await rollouts.submit(tasks=[TASK]))["id"]))["state"] == "done"


@pytest.mark.slow
async def test_whoever_asked_is_told_with_a_signature(tmp_path):
    told: list[tuple[dict[str, str], bytes]] = []

    class Told(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            told.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(204 if len(told) > 1 else 500)  # the first time it is lost
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Told) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{listening.server_port}/over"
        async with server(tmp_path, "--callback-host", "127.0.0.1", keys={"ann": ANN}) as (url, _):
            async with RolloutsClient(url, ANN) as rollouts:
                job = await rollouts.submit(tasks=[TASK], callback=here)
                await rollouts.wait(job["id"])
                with anyio.fail_after(60):
                    while len(told) < 2:
                        await anyio.sleep(0.1)
        listening.shutdown()
    headers, body = told[1]
    assert json.loads(body) == {"job": job["id"], "run_id": job["run_id"], "state": "done", "error": ""}
    key = hmac.new(ANN.encode(), b"rollyard callback", hashlib.sha256).hexdigest()
    signed = headers["x-rollyard-timestamp"].encode() + b"." + body
    wanted = hmac.new(key.encode(), signed, hashlib.sha256).hexdigest()
    assert headers["x-rollyard-signature"] == f"sha256={wanted}"


@pytest.mark.slow
async def test_events_are_streamed_and_a_reader_that_was_cut_off_goes_on(tmp_path):
    async with server(tmp_path) as (url, _), RolloutsClient(url) as rollouts:
        job = await rollouts.submit(tasks=[TASK], attempts=2)
        where = f"{url}/v1/jobs/{job['id']}/events"
        whole = (await anyio.run_process(["curl", "-sN", where])).stdout.decode()
        names = [line[7:] for line in whole.splitlines() if line.startswith("event: ")]
        assert names == ["rollout", "rollout", "end"]
        first = next(line[4:] for line in whole.splitlines() if line.startswith("id: "))
        rest = (await anyio.run_process(["curl", "-sN", "-H", f"Last-Event-ID: {first}", where])).stdout.decode()
        assert [line[7:] for line in rest.splitlines() if line.startswith("event: ")] == ["rollout", "end"]


async def test_the_client_asks_again_for_what_it_may_and_an_answer_is_sent_once():
    asked: list[bytes] = []

    async def cut(reader, writer):
        asked.append((await reader.readline()).split()[1])
        if asked == [b"/v1/jobs/x"] * 3:
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 16\r\nconnection: close\r\n\r\n{"state":"done"}')
        writer.close()

    listening = await asyncio.start_server(cut, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening, RolloutsClient(url) as rollouts:
        assert (await rollouts.job("x"))["state"] == "done"
        with pytest.raises(PolicyError, match=f"{url} does not answer"):
            await rollouts.reply("c", text="t")
    assert asked == [b"/v1/jobs/x"] * 3 + [b"/v1/calls/c/reply"]


def test_the_document_is_of_the_routes_that_are_served():
    served = {
        (route.path, method.lower())
        for route in RolloutsApi(None, None, None, {}).app.routes  # type: ignore[arg-type]
        for method in route.methods - {"HEAD"}
    }
    described = document(RolloutJobRequest)
    assert {(path, method) for path, methods in described["paths"].items() for method in methods} == served
    assert set(described["components"]["schemas"]["RolloutJobRequest"]["properties"]) == set(
        RolloutJobRequest.__struct_fields__
    )


def test_keys_are_read_with_care(tmp_path):
    keys = tmp_path / "keys"
    for text, mode, reason in (
        (f"ann {ANN}\n", 0o644, "others can read"),
        ("", 0o600, "holds no key"),
        ("ann short\n", 0o600, "entry 1"),
        (f"ann {ANN} more\n", 0o600, "entry 1"),
        (f"ann {ANN}\nbob {ANN}\n", 0o600, "the same key"),
    ):
        keys.write_text(text)
        keys.chmod(mode)
        with pytest.raises(ConfigError, match=reason):
            read_keys(keys)
    keys.write_text(f"# people\nann {ANN}\n\nbob {BOB}\n")
    keys.chmod(0o600)
    assert read_keys(keys) == {ANN: "ann", BOB: "bob"}
