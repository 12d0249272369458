"""New weights while answers are sampled, in the three modes: no turn is lost, and every token says which version sampled it.

Each sampled token's logprob is computed again with the weights of the version that its span names: a wrong span, a lost token or
ids that do not follow each other would show there.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make torch)")

import rollyard as ry  # noqa: E402
from rollyard.core.call import Call, Sampling  # noqa: E402
from rollyard.core.errors import ConfigError, Unsupported, UpstreamError  # noqa: E402
from rollyard.core.ids import new_id  # noqa: E402
from rollyard.core.message import Message, Text  # noqa: E402
from rollyard.policy.renderers.bytelevel import END, ByteRenderer  # noqa: E402
from rollyard.testing.serve import serve_app  # noqa: E402
from rollyard.train.sampler import Sampler  # noqa: E402
from rollyard.train.server import ModelServer  # noqa: E402
from rollyard.train.tiny import TinyConfig, TinyModel, load_model, load_weights, save_model  # noqa: E402
from tests.waiting import until  # noqa: E402

pytestmark = pytest.mark.anyio
torch.set_num_threads(1)
SMALL = TinyConfig(width=32, layers=2, heads=2, context=512)
UPDATES = 3


def talkative_model(seed: int) -> TinyModel:
    """It never ends a turn by itself: of two places that the same things raise, the end's is the lower one."""
    torch.manual_seed(seed)
    model = TinyModel(SMALL)
    with torch.no_grad():
        model.norm.bias.fill_(1.0)
        model.head.weight[END].fill_(-5.0)
    return model


def long_call(length: int) -> Call:
    return Call(
        id=new_id("call"),
        rollout_id=new_id("r"),
        dialect="chat",
        model="m",
        messages=(Message("user", (Text("go"),)),),
        sampling=Sampling(max_tokens=length),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One for each version."""
    root = tmp_path_factory.mktemp("versions")
    return [save_model(talkative_model(version), root / str(version)) for version in range(UPDATES + 1)]


class SteppedModel(TinyModel):
    """Computes the next token when it may: a test decides what is under way when an update comes."""

    def __init__(self, folder):
        super().__init__(SMALL)
        self.load_state_dict(load_weights(folder))
        self.steps, self.most = 0, 0.0
        self.turn = threading.Condition()

    def forward(self, *given, **named):
        with self.turn:
            self.turn.wait_for(lambda: self.steps < self.most)
            self.steps += 1
        return super().forward(*given, **named)

    def allow(self, most):
        with self.turn:
            self.most = most
            self.turn.notify_all()


@contextlib.asynccontextmanager
async def serving(folder):
    model = SteppedModel(folder)
    async with Sampler(model) as sampler:
        async with serve_app(ModelServer(sampler, ByteRenderer(), name="small").app) as url:
            try:
                yield sampler, model, url
            finally:
                model.allow(math.inf)


def logprobs_by_version(models, reply):
    """What each token's version gives for it, after all tokens before."""
    row = torch.tensor([[*reply.prompt_ids, *reply.completion_ids]])
    found = []
    for span in reply.spans:
        with torch.no_grad():
            logits, _ = models[span.version](row)
        scores = logits[0, len(reply.prompt_ids) - 1 : -1].log_softmax(-1)
        found += [float(scores[at, reply.completion_ids[at]]) for at in range(span.start, span.end)]
    return found


async def updates_during(folders, mode, *, answers, length):
    """Long answers, and an update after each eight tokens while they are sampled; `wait` lets them end, so more are asked for."""
    calls = []
    async with serving(folders[0]) as (sampler, model, url):
        policy = ry.policy.tokens(url, renderer="bytes")
        for version in range(1, UPDATES + 1):
            model.allow(model.steps)
            for _ in range(answers if version == 1 or mode == "wait" else 0):
                call = long_call(length)
                calls.append(asyncio.create_task(policy(call)))
            model.allow(model.steps + 8)
            await until(lambda: model.steps == model.most, within=120)
            update = asyncio.create_task(policy.weights.publish(folders[version], version=version, mode=mode))
            await until(lambda task=update: sampler.paused or task.done(), within=120)
            assert not update.done() and not all(call.done() for call in calls), (
                "the update comes while tokens are sampled"
            )
            model.allow(math.inf if mode == "wait" else model.most + 1)
            await update
            assert sampler.version == version and sampler.paused is None
        model.allow(math.inf)
        replies = await asyncio.gather(*calls)
        await policy.aclose()
    return replies


def check(folders, replies, length):
    models = {version: load_model(folder) for version, folder in enumerate(folders)}
    for reply in replies:
        assert reply.capture == "tokens" and not reply.flaws
        assert len(reply.completion_ids) == len(reply.logprobs) == length
        assert [span.start for span in reply.spans] == [0, *(span.end for span in reply.spans[:-1])]
        assert reply.spans[-1].end == length
        versions = [span.version for span in reply.spans]
        assert versions == sorted(set(versions))
        ours = logprobs_by_version(models, reply)
        assert max(abs(a - b) for a, b in zip(ours, reply.logprobs, strict=True)) < 1e-4


@pytest.mark.parametrize(
    ("answers", "length"), [(2, 150), pytest.param(16, 450, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_new_weights_lose_no_turn_and_each_token_says_its_version(folders, mode, answers, length):
    replies = await updates_during(folders, mode, answers=answers, length=length)
    check(folders, replies, length)
    most = max(len(reply.spans) for reply in replies)
    print(mode, len(replies), "answers, at most", most, "versions in one")
    assert len(replies) == answers * (UPDATES if mode == "wait" else 1)
    assert most == (1 if mode == "wait" else UPDATES + 1)


async def test_weights_that_cannot_be_read_leave_the_old_ones_and_no_pause(folders, tmp_path):
    async with serving(folders[0]) as (sampler, model, url):
        model.allow(math.inf)
        policy = ry.policy.tokens(url, renderer="bytes")
        with pytest.raises(UpstreamError, match="cannot read weights"):
            await policy.weights.publish(tmp_path, version=1)
        other = save_model(TinyModel(TinyConfig(width=64, layers=1, heads=2)), tmp_path / "other")
        with pytest.raises(UpstreamError, match="those of another model"):
            await policy.weights.publish(other, version=1)
        assert (sampler.version, sampler.paused, policy.weights.version) == (0, None, None)
        reply = await policy(long_call(4))
        check(folders, [reply], 4)
        await policy.weights.publish(folders[1], version=1)
        with pytest.raises(ConfigError, match="version 1 was published already"):
            await policy.weights.publish(folders[1], version=1)
        with pytest.raises(Unsupported, match="no sleep"):
            await policy.weights.pause(sleep=1)
        await policy.aclose()


async def test_a_server_of_another_kind_is_refused_by_name(folders):
    async with serving(folders[0]) as (_, _, url):
        policy = ry.policy.tokens(url, renderer="bytes", kind="llamacpp")
        with pytest.raises(Unsupported, match="llamacpp takes no new weights"):
            await policy.weights.publish(folders[1], version=1)
        await policy.aclose()
        # It has no /collective_rpc: a vLLM without its dev mode
        old = ry.policy.tokens(url, renderer="bytes", kind="vllm")
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
            await old.weights.publish(folders[1], version=1)
        await old.aclose()
