"""A task evaluated as a remote job: the real Fleet SDK against a server that speaks its routes (V1-V3)."""

from __future__ import annotations

import asyncio
from functools import partial

import anyio
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from rollyard.core.errors import ConfigError, EnvUnavailable
from rollyard.runs import FleetJob, evaluate_task
from rollyard.testing.serve import serve_app
from tests.waiting import settle

pytest.importorskip("fleet", reason="fleet-python is not installed")
pytestmark = pytest.mark.anyio
CODE = "def verify(env, final_answer=None):\n    return 1.0\n"
NOW = "2026-01-01T00:00:00Z"


class Jobs:
    """`outcomes` are a session's (model, status, verifier_execution); they are all there from poll `ready` on."""

    def __init__(self, outcomes, *, ready=1, refuse_tasks=False, status="completed", broken_polls=0):
        self.outcomes, self.ready, self.status = outcomes, ready, status
        self.refuse_tasks, self.broken = refuse_tasks, broken_polls
        self.tasks, self.jobs, self.polls = [], [], 0
        self.polled = asyncio.Event()

    async def task(self, request):
        if self.refuse_tasks:
            return JSONResponse({"detail": "no"}, 400)
        self.tasks.append(await request.json())
        return JSONResponse({"key": self.tasks[-1]["key"]})

    async def create(self, request):
        if request.headers["authorization"] != "Bearer fleet-key":
            return JSONResponse({"detail": "who?"}, 401)
        self.jobs.append(await request.json())
        return JSONResponse({"job_id": "job-1", "status": "pending"})

    async def job(self, request):
        self.polls += 1
        self.polled.set()
        if self.polls <= self.broken:
            return JSONResponse({"detail": "busy"}, 418)
        over = self.polls >= self.ready
        return JSONResponse({"id": "job-1", "status": self.status if over else "running"})

    async def sessions(self, request):
        shown = self.outcomes if self.polls >= self.ready else [(m, "running", None) for m, _, _ in self.outcomes]
        listed = [
            {
                "session_id": f"s{n}",
                "model": m,
                "status": s,
                "created_at": NOW,
                "step_count": 1,
                "verifier_execution": v,
            }
            for n, (m, s, v) in enumerate(shown)
        ]
        group = {"total_sessions": len(listed), "passed_sessions": 0, "pass_rate": 0.0, "sessions": listed}
        return JSONResponse({"job_id": "job-1", "total_sessions": len(listed), "tasks": [group]})

    def app(self):
        return Starlette(
            routes=[
                Route("/v1/tasks", self.task, methods=["POST"]),
                Route("/v1/jobs", self.create, methods=["POST"]),
                Route("/v1/jobs/{id}", self.job),
                Route("/v1/sessions/job/{id}", self.sessions),
            ]
        )


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("FLEET_API_KEY", "fleet-key")


def scored(value):
    return {"success": True, "score": value, "execution_time_ms": 3}


BROKEN = {"success": False, "score": None, "stdout": "Traceback: boom", "execution_time_ms": 3}


def job(url, **more):
    return FleetJob(env="shop", env_version="1.2", verifier_code=CODE, base_url=url, **{"poll_s": 0.05, **more})


async def test_scores_come_back_by_model_however_the_server_names_it_and_errors_stay_apart():
    outcomes = [
        ("anthropic/strong", "completed", scored(1.0)), ("strong", "completed", scored(1.0)),
        ("weak", "completed", scored(0.0)), ("acme/weak", "failed", None),
    ]  # fmt: skip
    jobs = Jobs(outcomes, ready=3)
    async with serve_app(jobs.app()) as url:
        quality = await evaluate_task(
            {"id": "Order #7", "instruction": "buy it"}, ["anthropic/strong", "acme/weak"], attempts=2, remote=job(url)
        )
    assert quality.scores("strong").rewards == (1.0, 1.0)
    assert quality.scores("acme/weak").rewards == (0.0,)
    assert quality.scores("weak").errors == ("the session is failed",)
    assert (quality.judgement, quality.job_id) == ("learnable", "job-1")
    assert quality.separation[0].difference == 1.0
    (task,), (created,) = jobs.tasks, jobs.jobs
    assert (task["prompt"], task["env_id"], task["version"], task["verifier_func"]) == ("buy it", "shop", "1.2", CODE)
    assert created["models"] == ["anthropic/strong", "acme/weak"]
    assert (created["pass_k"], created["task_keys"], created["max_steps"]) == (2, [task["key"]], 30)
    assert jobs.polls >= 3


async def test_a_verifier_that_fails_is_broken_and_an_unscored_session_is_no_zero():
    jobs = Jobs([("p/m", "completed", BROKEN), ("p/m", "completed", BROKEN), ("p/m", "completed", None)])
    async with serve_app(jobs.app()) as url:
        quality = await evaluate_task("x", ["p/m"], attempts=3, remote=job(url))
    assert quality.judgement == "broken verifier"
    (model,) = quality.models
    assert model.rewards == ()
    assert model.errors == ("the verifier gave no score: Traceback: boom",) * 2 + ("it was not verified",)


async def test_after_the_limit_what_has_not_ended_is_an_error_and_the_rest_counts():
    jobs = Jobs([("p/m", "completed", scored(1.0))], ready=10_000)
    async with serve_app(jobs.app()) as url:
        quality = await evaluate_task("x", ["p/m"], attempts=2, remote=job(url, limit_s=0.3))
    assert quality.models[0].rewards == ()
    assert quality.models[0].errors == ("the session is running", "no session of it was seen")
    assert quality.judgement == "not enough scores"


async def test_cancelling_stops_asking_at_once_even_between_two_distant_polls():
    jobs = Jobs([("p/m", "completed", scored(1.0))], ready=10_000)
    async with serve_app(jobs.app()) as url:
        async with asyncio.timeout(30):
            async with anyio.create_task_group() as group:
                far = job(url, poll_s=10.0)
                group.start_soon(partial(evaluate_task, "x", ["p/m"], attempts=1, remote=far))
                await jobs.polled.wait()
                group.cancel_scope.cancel()
        await settle()
        assert jobs.polls == 1


def test_it_asks_every_ten_seconds_for_half_an_hour_unless_told_otherwise():
    plain = FleetJob(env="shop", verifier_code=CODE)
    assert (plain.poll_s, plain.limit_s) == (10.0, 1800.0)


async def test_a_poll_that_fails_is_tried_again_and_a_server_that_stays_away_is_an_error():
    jobs = Jobs([("p/m", "completed", scored(1.0))], broken_polls=2, ready=3)
    async with serve_app(jobs.app()) as url:
        quality = await evaluate_task("x", ["p/m"], attempts=1, remote=job(url))
        assert quality.models[0].rewards == (1.0,)
    jobs = Jobs([], broken_polls=1000)
    async with serve_app(jobs.app()) as url:
        with pytest.raises(EnvUnavailable, match="busy"):
            await evaluate_task("x", ["p/m"], attempts=1, remote=job(url))


async def test_what_cannot_work_is_refused_by_name(monkeypatch):
    with pytest.raises(ConfigError, match="provider/model"):
        await evaluate_task("x", ["bare"], remote=job("http://127.0.0.1:9"))
    with pytest.raises(ConfigError, match="policies by name"):
        await evaluate_task("x", ["p/m"])
    jobs = Jobs([], refuse_tasks=True)
    async with serve_app(jobs.app()) as url:
        with pytest.raises(EnvUnavailable, match="did not take the task"):
            await evaluate_task("x", ["p/m"], remote=job(url))
    monkeypatch.setenv("FLEET_API_KEY", "other")
    jobs = Jobs([])
    async with serve_app(jobs.app()) as url:
        with pytest.raises(ConfigError, match="refused the key"):
            await evaluate_task("x", ["p/m"], remote=job(url))
    monkeypatch.delenv("FLEET_API_KEY")
    with pytest.raises(ConfigError, match="FLEET_API_KEY"):
        await evaluate_task("x", ["p/m"], remote=job(url))
