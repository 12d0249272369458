"""Several model servers behind one policy: a rollout's calls go where its prompt was computed, and a lost server loses none.

The servers are stand-ins with vLLM's answers and a prefix cache that counts what it finds again; the routers are real.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import openai
import pytest
from aiohttp import web

import rollyard as ry
from rollyard.core.errors import ConfigError, UpstreamError
from rollyard.policy.renderers.bytelevel import END
from tests.servers.venvs import make_venv

from .conftest import plain_call

pytestmark = pytest.mark.anyio
BLOCK = 16
ADMIN = "admin-" + "a" * 20
ROLLOUTS, TURNS = 11, 6  # odd, so that taking turns does not keep rollouts in place by chance
ROUTERS = ("vllm-router==0.1.16", "sglang-router==0.3.2")


class Engine:
    """Answers as vLLM and SGLang do where they are given ids. `follow_up` counts tokens that some engine has computed before,
    `found` those of them that this one has. `status` makes it refuse; `hold` makes calls wait, which `cut` counts."""

    def __init__(self, everywhere: set[int]) -> None:
        self.cache: set[int] = set()
        self.everywhere = everywhere
        self.follow_up = self.found = self.answered = self.cut = 0
        self.status = 200
        self.sessions: set[str | None] = set()
        self.hold: asyncio.Event | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            listed = {"id": "m", "owned_by": "vllm", "max_model_len": 100_000}
            return web.json_response({"object": "list", "data": [listed]})
        if request.path == "/inference/v1/generate":
            return web.json_response({}, status=403)
        if request.path not in ("/v1/completions", "/generate"):
            return web.json_response({"model_path": "m", "status": "ready"})
        body = json.loads(await request.read())
        if self.hold is not None:
            self.cut += 1
            await self.hold.wait()
        if self.status != 200:
            return web.json_response({"error": {"message": "later"}}, status=self.status)
        self.sessions.add(request.headers.get("x-session-id"))
        prompt, sampled = body.get("prompt") or body["input_ids"], [*b"ok", END]
        self._count(prompt)
        self._keep([*prompt, *sampled])
        self.answered += 1
        if request.path == "/generate":
            rows = [[-0.5, token, None] for token in sampled]
            meta = {"output_token_logprobs": rows, "finish_reason": {"type": "stop"}}
            return web.json_response({"text": "ok", "output_ids": sampled, "meta_info": meta})
        choice = {"index": 0, "text": "ok", "token_ids": sampled, "logprobs": {"token_logprobs": [-0.5] * 3}}
        return web.json_response({"id": "c", "choices": [{**choice, "finish_reason": "stop"}]})

    def _blocks(self, ids: list[int]) -> list[int]:
        return [hash(tuple(ids[:end])) for end in range(BLOCK, len(ids) + 1, BLOCK)]

    def _count(self, prompt: list[int]) -> None:
        for block in self._blocks(prompt):
            self.follow_up += BLOCK * (block in self.everywhere)
            self.found += BLOCK * (block in self.cache)

    def _keep(self, ids: list[int]) -> None:
        self.cache.update(self._blocks(ids))
        self.everywhere.update(self._blocks(ids))


@asynccontextmanager
async def engines(count: int):
    everywhere: set[int] = set()
    made, runners = [Engine(everywhere) for _ in range(count)], []
    for engine in made:
        app = web.Application(client_max_size=2**27)
        app.router.add_route("*", "/{path:.*}", engine.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
    try:
        yield made, runners, [f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners]
    finally:
        for runner in runners:
            await runner.cleanup()


async def talk(policy, *, rollouts: int = ROLLOUTS, halfway=None) -> int:
    """Rollouts at the same time through a gate, each with a system prompt of its own; how many turns were answered."""
    answered = itertools.count(1)
    total = 0
    async with ry.Gate(policy, host="127.0.0.1", admin_key=ADMIN) as gate:

        async def one(number: int) -> None:
            nonlocal total
            session = await gate.open_session(f"r{number}")
            async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=session.key, max_retries=0) as client:
                messages = [{"role": "system", "content": f"{number} " * 80}]
                for turn in range(TURNS):
                    messages.append({"role": "user", "content": f"{turn} of {number} " * 10})
                    said = await client.chat.completions.create(model="m", messages=messages)
                    messages.append({"role": "assistant", "content": said.choices[0].message.content})
                    total = next(answered)
                    if halfway is not None and total == rollouts * TURNS // 2:
                        await halfway()
            assert len(session.trajectory.branches) == 1

        await asyncio.gather(*(one(number) for number in range(rollouts)))
        async with (
            aiohttp.ClientSession(headers={"authorization": f"Bearer {ADMIN}"}) as admin,
            admin.get(f"{gate.url}/metrics") as metrics,
        ):
            shown = await metrics.text()
        for event, count in policy.counters().items():
            assert f'rollyard_policy_events_total{{event="{event}"}} {count}.0' in shown
    await policy.aclose()
    return total


def share(made) -> float:
    """Of the prompt tokens that some engine had computed before, the part that came to one that had."""
    return sum(engine.found for engine in made) / sum(engine.follow_up for engine in made)


@asynccontextmanager
async def round_robin(urls):
    """The plainest load balancer."""
    turn = itertools.cycle(urls)

    async def handle(request):
        async with aiohttp.request(
            request.method, next(turn) + request.path, data=await request.read(), headers=dict(request.headers)
        ) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")

    app = web.Application(client_max_size=2**27)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_follow_ups_go_where_their_prompt_was_computed():
    async with engines(2) as (made, _, urls):
        policy = ry.policy.tokens(urls, renderer="bytes", kind="completions")
        assert await talk(policy) == ROLLOUTS * TURNS
        sticky, spread = share(made), [engine.answered for engine in made]
        assert policy.replicas.counts["followed"] == ROLLOUTS * (TURNS - 1)
        assert {session for engine in made for session in engine.sessions} == {f"r{n}" for n in range(ROLLOUTS)}
    async with engines(2) as (made, _, urls), round_robin(urls) as url:
        assert await talk(ry.policy.tokens(url, renderer="bytes", kind="completions")) == ROLLOUTS * TURNS
        scattered = share(made)
    print(f"{sticky:.2f} against {scattered:.2f}")
    assert sticky >= 0.9 > scattered, (sticky, scattered)
    assert min(spread) >= ROLLOUTS * TURNS / 4, f"both work: {spread}"


@pytest.mark.parametrize("kind", ["tokens", "upstream"])
async def test_a_killed_server_loses_no_turn(kind):
    async with engines(3) as (made, runners, urls):

        async def kill():
            await runners[0].cleanup()

        if kind == "tokens":
            policy = ry.policy.tokens(urls, renderer="bytes", kind="completions")
        else:
            policy = ry.policy.upstream([f"{url}/v1" for url in urls], dialect="completions")
        if kind == "upstream":
            await policy(plain_call())
            await runners[0].cleanup()
            for number in range(6):
                await policy(plain_call(rollout_id=f"r{number}"))
            await policy.aclose()
        else:
            assert await talk(policy, halfway=kill) == ROLLOUTS * TURNS
            assert sum(engine.answered for engine in made) >= ROLLOUTS * TURNS
        assert policy.replicas.counts["moved_lost"] >= 1


async def test_a_server_that_dies_with_a_call_in_its_hands_loses_no_turn():
    async with engines(2) as (made, runners, urls):
        made[0].hold = asyncio.Event()
        policy = ry.policy.tokens(urls, renderer="bytes", kind="completions")
        first = asyncio.create_task(policy(plain_call()))
        while not made[0].cut:
            await asyncio.sleep(0.01)
        await runners[0].cleanup()
        reply = await first
        assert list(reply.completion_ids) == [*b"ok", END] and policy.replicas.counts["moved_lost"] == 1
        await policy.aclose()


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_is_passed_over_and_all_busy_is_said(status):
    async with engines(2) as (made, _, urls):
        policy = ry.policy.tokens(",".join(urls), renderer="bytes", kind="completions")
        made[0].status = status
        for number in range(4):
            await policy(plain_call(rollout_id=f"r{number}"))
        assert made[1].answered == 4 and policy.replicas.counts["moved_busy"] >= 1
        made[1].status = status
        with pytest.raises(UpstreamError) as refused:
            await policy(plain_call())
        assert refused.value.status == status
        made[0].status = made[1].status = 400
        with pytest.raises(UpstreamError) as refused:
            await policy(plain_call())
        assert refused.value.status == 400
        await policy.aclose()


async def test_a_server_with_far_more_to_do_than_another_gives_a_rollout_away():
    async with engines(2) as (made, _, urls):
        policy = ry.policy.tokens(urls, renderer="bytes", kind="completions")
        await policy(plain_call(rollout_id="busy"))
        home = next(at for at, engine in enumerate(made) if engine.answered)
        made[home].hold = asyncio.Event()
        held = [asyncio.create_task(policy(plain_call(rollout_id="busy"))) for _ in range(9)]
        while made[home].cut < 9:
            await asyncio.sleep(0.01)
        await policy(plain_call(rollout_id="busy"))
        assert made[1 - home].answered == 1 and policy.replicas.counts["moved_loaded"] == 1
        made[home].hold.set()
        await asyncio.gather(*held)
        await policy.closed("busy")
        await policy.aclose()


def test_an_empty_list_of_urls_is_refused():
    with pytest.raises(ConfigError, match="url of a model server"):
        ry.policy.tokens([])


@contextmanager
def router(program: str, policy: str, urls):
    with socket.socket() as free, socket.socket() as other:
        free.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, metrics = free.getsockname()[1], other.getsockname()[1]
    folder = Path(make_venv("routers", ROUTERS)).parent
    command = [folder / program, *(["launch"] if program == "sglang-router" else []), "--worker-urls", *urls]
    command += ["--policy", policy, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    running = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait(30)


async def wait_ready(url: str) -> None:
    async with asyncio.timeout(120), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/v1/models") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("program", "policy", "kind"),
    [("vllm-router", "consistent_hash", "completions"), ("sglang-router", "manual", "sglang")],
)
async def test_a_real_router_keeps_a_rollout_on_one_server(program, policy, kind):
    shares = {}
    for chosen in (policy, "round_robin"):
        async with engines(2) as (made, _, urls):
            with router(program, chosen, urls) as url:
                await wait_ready(url)
                assert await talk(ry.policy.tokens(url, "m", renderer="bytes", kind=kind)) == ROLLOUTS * TURNS
            shares[chosen] = share(made)
    print(program, shares)
    assert shares[policy] >= 0.9 > shares["round_robin"], shares
