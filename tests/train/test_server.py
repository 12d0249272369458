"""The reference model server: real torch, real sockets, the token policy as its client."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys

import aiohttp
import msgspec
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make torch)")

import rollyard as ry  # noqa: E402
from rollyard.core.call import Call, Sampling, ids  # noqa: E402
from rollyard.core.errors import ConfigError  # noqa: E402
from rollyard.core.ids import new_id  # noqa: E402
from rollyard.core.message import Message, Text, tools_digest  # noqa: E402
from rollyard.policy.renderers.bytelevel import ByteRenderer  # noqa: E402
from rollyard.testing.serve import serve_app  # noqa: E402
from rollyard.train.sampler import Sampler, SampleRequest, pad  # noqa: E402
from rollyard.train.serve_model import ModelOptions, key_of  # noqa: E402
from rollyard.train.server import ModelServer  # noqa: E402
from rollyard.train.tiny import TinyConfig, TinyModel, load_model, save_model  # noqa: E402
from rollyard.trajectory.trajectory import Trajectory  # noqa: E402
from tests.waiting import settle  # noqa: E402

pytestmark = pytest.mark.anyio
torch.set_num_threads(1)  # two threads on a busy machine wait for each other

ROLLYARD = [sys.executable, "-c", "from rollyard.cli.main import main; main()"]
SMALL = TinyConfig(width=32, layers=2, heads=2, context=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    return save_model(TinyModel(SMALL), tmp_path_factory.mktemp("model") / "small")


@contextlib.asynccontextmanager
async def serving(folder, *, key=None, version=0):
    """The server on a real socket, in this process."""
    async with Sampler(load_model(folder), version=version) as sampler:
        app = ModelServer(sampler, ByteRenderer(), name="small", key=key).app
        async with serve_app(app) as url:
            yield url


@pytest.fixture
async def url(folder):
    async with serving(folder) as url:
        yield url


def user(text):
    return Message("user", (Text(text),))


def call_of(*messages, rollout_id="r1", **sampling):
    call = Call(
        id=new_id("call"),
        rollout_id=rollout_id,
        dialect="chat",
        model="m",
        messages=messages,
        sampling=Sampling(**{"max_tokens": 12, **sampling}),
    )
    return msgspec.structs.replace(call, tools_digest=tools_digest(()))


def trainer_logprobs(model, prompt, completion, temperature=1.0):
    with torch.no_grad():
        logits, _ = model(torch.tensor([[*prompt, *completion]]))
        scores = (logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return [float(scores[n, token]) for n, token in enumerate(completion)]


async def begun(sampler):
    """Until a few tokens of the first request are there."""
    async with asyncio.timeout(30):
        while sampler.tokens < 4:
            await asyncio.sleep(0.001)


async def test_the_samplers_logprobs_are_the_trainers_to_1e_4_alone_and_in_a_batch(folder):
    """Rows of different lengths in one batch: padding changes nothing."""
    model = load_model(folder)
    prompts = [ids([*b"a"]), ids([*b"hello world, this is longer"]), ids([*b"mid size"])]
    async with Sampler(load_model(folder), gather_s=0.05) as sampler:
        rows = await asyncio.gather(
            *(
                sampler.sample(SampleRequest(prompt=p, max_tokens=20, temperature=0.7, seed=n))
                for n, p in enumerate(prompts)
            )
        )
        assert sampler.batches == 1
        alone = await sampler.sample(SampleRequest(prompt=prompts[0], max_tokens=20, temperature=0.7, seed=0))
    assert alone.ids == rows[0].ids
    for prompt, row in zip(prompts, rows, strict=True):
        ours = trainer_logprobs(model, prompt, row.ids, 0.7)
        assert max(abs(a - b) for a, b in zip(ours, row.logprobs, strict=True)) < 1e-4


async def test_truncated_sampling_reports_the_truncated_distribution(folder):
    async with Sampler(load_model(folder)) as sampler:
        one = await sampler.sample(SampleRequest(prompt=ids([1, 2]), max_tokens=8, top_k=1))
        greedy = await sampler.sample(SampleRequest(prompt=ids([1, 2]), max_tokens=8, temperature=0.0))
        narrow = await sampler.sample(SampleRequest(prompt=ids([1, 2]), max_tokens=30, top_p=0.1, seed=1))
    assert one.ids == greedy.ids and all(value == 0.0 for value in one.logprobs)
    assert all(value < 0.0 for value in greedy.logprobs) and all(value <= 0.0 for value in narrow.logprobs)


async def test_new_weights_are_taken_between_two_tokens_and_each_token_says_its_version(folder):
    async with Sampler(load_model(folder), version=1) as sampler:
        sampling = asyncio.create_task(sampler.sample(SampleRequest(prompt=ids([1]), max_tokens=400)))
        await begun(sampler)
        torch.manual_seed(1)
        await sampler.load(TinyModel(SMALL).state_dict(), 2)
        assert sampler.version == 2 and not sampling.done()
        sampled = await sampling
    assert [span.version for span in sampled.spans] == [1, 2]
    assert sampled.spans[0].start == 0 and sampled.spans[0].end == sampled.spans[1].start
    assert sampled.spans[1].end == len(sampled.ids) == 400


async def test_an_abort_keeps_what_was_sampled_and_a_pause_holds_what_has_not_begun(folder):
    async with Sampler(load_model(folder)) as sampler:
        sampling = asyncio.create_task(sampler.sample(SampleRequest(prompt=ids([1]), max_tokens=500)))
        await begun(sampler)
        await sampler.load(sampler.model.state_dict(), 1, mode="abort")
        cut = await sampling
        assert cut.finish == "abort" and 0 < len(cut.ids) < 500
        await sampler.pause()
        held = asyncio.create_task(sampler.sample(SampleRequest(prompt=ids([1]), max_tokens=1)))
        await settle()
        assert not held.done()
        sampler.resume()
        assert len((await held).ids) == 1


@pytest.mark.parametrize(
    "request_", [{"prompt": ids()}, {"prompt": ids([9999])}, {"prompt": ids([1]), "max_tokens": 600}]
)
async def test_a_request_that_cannot_be_sampled_is_refused(folder, request_):
    async with Sampler(load_model(folder)) as sampler:
        with pytest.raises(ValueError):
            await sampler.sample(SampleRequest(**{"max_tokens": 1, **request_}))


def test_padding_is_on_the_left():
    tokens, real = pad([ids([1]), ids([2, 3])])
    assert tokens.tolist() == [[0, 1], [2, 3]] and real.tolist() == [[False, True], [True, True]]


async def test_the_token_policy_finds_the_server_and_gets_exact_tokens(url, folder):
    policy = ry.policy.tokens(url, renderer="bytes", check="always")
    assert (await policy.probe()).level == "tokens" and policy.engine.name == "torch"
    model = load_model(folder)
    trajectory = Trajectory("r1")
    messages, before = [user("go")], ids()
    for _ in range(3):
        call = call_of(*messages)
        found = trajectory.match(call)
        reply = await policy(msgspec.structs.replace(call, continues=found.continues))
        trajectory.add(call, reply)
        assert reply.prompt_ids[: len(before)] == before
        ours = trainer_logprobs(model, reply.prompt_ids, reply.completion_ids)
        assert max(abs(a - b) for a, b in zip(ours, reply.logprobs, strict=True)) < 1e-4
        assert reply.logprobs_mode == "processed" and reply.version_start == 0
        before = reply.prompt_ids + reply.completion_ids
        messages += [reply.message, user("more")]
    await policy.aclose()


def taught(folder):
    """A model that has learnt to answer every turn with `yes`."""
    torch.manual_seed(0)
    model = TinyModel(SMALL)
    renderer = ByteRenderer()
    said = [user("go")]
    for turn in range(3):
        said += [Message("assistant", (Text("yes"),)), user(f"more {turn}")]
    row = torch.tensor([renderer.render(said).tolist()])
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        logits, _ = model(row[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits[0], row[0, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return save_model(model, folder)


async def branches_by_upstream_and_by_tokens(url):
    captured = []
    for policy in (
        ry.policy.upstream(url + "/v1", sampling={"temperature": 0.0}),
        ry.policy.tokens(url, renderer="bytes", sampling={"temperature": 0.0}),
    ):
        trajectory = Trajectory("r1")
        messages = [user("go")]
        for turn in range(3):
            call = call_of(*messages, max_tokens=5)
            reply = await policy(msgspec.structs.replace(call, continues=trajectory.match(call).continues))
            assert reply.capture == "tokens" and reply.trainable, reply.flaws
            trajectory.add(call, reply)
            messages += [reply.message, user(f"more {turn}")]
        captured.append([(b.ids, b.mask) for b in trajectory.branches])
        await policy.aclose()
    return captured


async def test_one_rollout_seen_by_upstream_and_by_tokens_has_the_same_branches(tmp_path):
    """A model that speaks canonical text: the chat API tells its ids, and both ways of capture give one branch."""
    async with serving(taught(tmp_path / "taught")) as url:
        upstream, tokens = await branches_by_upstream_and_by_tokens(url)
    assert upstream == tokens and len(tokens) == 1


async def test_where_the_model_does_not_speak_canonical_text_only_the_bridge_keeps_one_branch(url):
    """An untrained model samples ids that no text encodes to: a re-render forks every turn, the bridge none."""
    upstream, tokens = await branches_by_upstream_and_by_tokens(url)
    assert len(upstream) > 1 and len(tokens) == 1


async def test_the_completions_endpoint_takes_ids(url):
    policy = ry.policy.tokens(url, "small", kind="completions", renderer="bytes")
    reply = await policy(call_of(user("go")))
    assert reply.capture == "tokens" and len(reply.completion_ids) == len(reply.logprobs)
    await policy.aclose()


async def test_weights_are_reloaded_over_http(folder, tmp_path):
    torch.manual_seed(5)
    other = save_model(TinyModel(SMALL), tmp_path / "other")
    async with serving(folder, version=3) as url:
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{url}/weights", json={"path": str(other), "version": 4}) as answer:
                assert await answer.json() == {"weight_version": 4}
            async with http.post(f"{url}/weights", json={"path": str(tmp_path), "version": 5}) as refused:
                assert refused.status == 400
        policy = ry.policy.tokens(url, renderer="bytes")
        reply = await policy(call_of(user("go")))
        ours = trainer_logprobs(load_model(other), reply.prompt_ids, reply.completion_ids)
        assert reply.version_start == 4
        assert max(abs(a - b) for a, b in zip(ours, reply.logprobs, strict=True)) < 1e-4
        await policy.aclose()


async def test_bad_requests_are_400_and_a_key_is_asked_for_when_there_is_one(folder):
    async with serving(folder, key="sekret") as url:
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{url}/v1/models") as answer:
                assert answer.status == 401
            bearer = {"authorization": "Bearer sekret"}
            for body in (
                b"{",
                b"[]",
                b"{}",
                b'{"token_ids": "x"}',
                b'{"token_ids": [1], "sampling_params": {"max_tokens": 9999}}',
            ):
                async with http.post(f"{url}/inference/v1/generate", data=body, headers=bearer) as answer:
                    assert answer.status == 400, body
        policy = ry.policy.tokens(url, renderer="bytes", key="sekret")
        assert (await policy.probe()).level == "tokens"
        await policy.aclose()


def test_it_does_not_listen_beyond_loopback_without_a_key():
    with pytest.raises(ConfigError, match="--key-file"):
        key_of(ModelOptions(host="0.0.0.0"))


async def test_the_command_serves_a_model_until_it_is_stopped(folder, tmp_path):
    key = tmp_path / "key"
    key.write_text("sekret\n")
    key.chmod(0o600)
    command = [
        *ROLLYARD,
        "serve",
        "model",
        str(folder),
        "--json",
        "--threads",
        "1",
        "--version",
        "7",
        "--key-file",
        str(key),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            ready = json.loads(process.stdout.readline())
            assert ready["model"] == "small" and ready["weight_version"] == 7
            policy = ry.policy.tokens(ready["url"], renderer="bytes", key="sekret")
            assert (await policy(call_of(user("go")))).version_start == 7
            await policy.aclose()
        finally:
            process.terminate()
        assert process.wait(20) in (0, -signal.SIGTERM)


async def test_the_openai_client_talks_to_the_chat_api(url):
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", timeout=30) as client:
        answer = await client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "hi"}], max_tokens=4, logprobs=True
        )
        assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
        text = ""
        stream = await client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "hi"}], max_tokens=4, temperature=0, stream=True
        )
        async for chunk in stream:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    assert len(text) > 0
