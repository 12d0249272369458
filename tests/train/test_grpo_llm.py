"""The training of a language model: its sampler says what its trainer computes, its rewards have no hole, its loop is whole."""

from __future__ import annotations

import asyncio
import random
from array import array
from statistics import fmean

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed (make torch)")

import torch

import rollyard as ry
from examples.grpo_llm.chores import KINDS, SYSTEM, WORDS, chore, command, demonstration, is_done, task
from examples.grpo_llm.learn import Learner, trained_logprobs, warm_up
from examples.grpo_llm.llama import Llama, LlamaConfig
from examples.grpo_llm.plot import apart, draw, interval, table
from examples.grpo_llm.sampler import SlotSampler
from examples.grpo_llm.train import Options, load, refuse_stale, train
from examples.grpo_llm.weights import load_llama, order_heads, read_q4_1, read_q8_0
from rollyard.core.call import floats
from rollyard.core.message import Message, Text
from rollyard.policy.renderers.bytelevel import END, VOCABULARY, ByteRenderer
from rollyard.trajectory.samples import Sample
from tests.servers.smollm import weights

pytestmark = [pytest.mark.anyio, pytest.mark.agent]
SMALL = LlamaConfig(vocabulary=VOCABULARY, width=24, layers=2, heads=4, key_heads=2, inner=48)


@pytest.fixture(autouse=True)
def one_thread():
    """A small model is slower on many threads, far slower where other tests want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    model = Llama(SMALL)
    with torch.no_grad():
        model.embed.weight.mul_(25)  # a model with opinions: a flat one would hide a wrong place or mask
    return model


async def test_the_sampler_says_what_the_trainer_computes_in_any_slot_at_any_length():
    model = small()
    async with SlotSampler(model, stop_ids=(END,), slots=3, length=64) as sampler:
        prompts = [[65 + n, *range(97, 97 + 5 * n)] for n in range(7)]  # more than there are slots
        said = await asyncio.gather(*(sampler.sample(prompt, 20) for prompt in prompts))
    for prompt, got in zip(prompts, said, strict=True):
        assert 1 <= len(got.ids) <= 20 and (len(got.ids) == 20 or got.ids[-1] == END)
        ids = torch.tensor([[*prompt, *got.ids]])
        mask = torch.tensor([[False] * len(prompt) + [True] * len(got.ids)])
        with torch.no_grad():
            own = trained_logprobs(model, ids, mask)
        assert torch.allclose(own, torch.tensor(got.logprobs), atol=1e-4)


async def test_draws_are_those_of_the_distribution():
    model = small()
    with torch.no_grad():
        expected = model.logits(model(torch.tensor([[65, 66]])))[0, -1].softmax(-1)
    async with SlotSampler(model, stop_ids=(END,), slots=64, length=8) as sampler:
        torch.manual_seed(1)
        said = await asyncio.gather(*(sampler.sample([65, 66], 1) for _ in range(2000)))
    likely = int(expected.argmax())
    assert 0.2 < expected[likely] < 0.9
    share = sum(got.ids[0] == likely for got in said) / len(said)
    assert abs(share - float(expected[likely])) < 0.06


async def test_a_prompt_without_room_is_refused():
    async with SlotSampler(small(), stop_ids=(END,), slots=1, length=8) as sampler:
        with pytest.raises(ValueError, match="exceed 8"):
            await sampler.sample([1, 2, 3, 4, 5], 4)


def test_quantised_blocks_are_read_as_llama_cpp_writes_them():
    scale, least = np.array([0.5], np.float16), np.array([-1.0], np.float16)
    packed = np.arange(16, dtype=np.uint8) | (np.arange(16, dtype=np.uint8)[::-1] << 4)
    block = np.concatenate((scale.view(np.uint8), least.view(np.uint8), packed))
    assert read_q4_1(block)[0].tolist() == [n / 2 - 1 for n in [*range(16), *range(15, -1, -1)]]
    signed = np.arange(-16, 16, dtype=np.int8)
    assert read_q8_0(np.concatenate((scale.view(np.uint8), signed.view(np.uint8))))[0].tolist() == (signed / 2).tolist()


def test_pairs_that_turn_together_end_up_half_a_head_apart():
    assert order_heads(torch.arange(12)[:, None], 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_training_and_held_out_chores_share_no_name_and_every_kind_comes_up():
    train_words, held_out_words = (set(WORDS[split].split()) for split in ("train", "held-out"))
    assert not train_words & held_out_words
    assert {task(n, "held-out").metadata["kind"] for n in range(50)} == set(KINDS)
    assert task(3, "train").instruction != task(3, "held-out").instruction
    assert all(task(n, "held-out").files[0].path.removesuffix(".txt") in held_out_words for n in range(50))


async def reward_of(made, steps) -> float | None:
    done = await ry.run_rollout(
        made, agent="shell-agent", policy=ry.policy.scripted({"steps": steps}), system_prompt=SYSTEM, verifier=is_done,
        limits=ry.Limits(agent=60, verify=30), sandbox="local",
    )  # fmt: skip
    assert done.failure is None, done.failure
    return done.reward


@pytest.mark.parametrize(
    "kind", ["note", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "note")]
)
async def test_the_right_command_is_paid_and_nothing_is_not(kind):
    seed = next(n for n in range(100) if task(n, "held-out").metadata["kind"] == kind)
    right = command(chore(random.Random(f"held-out-{seed}"), "held-out"), kind)
    made = task(seed, "held-out")
    assert await reward_of(made, [{"shell": right}, {"text": "done"}]) == 1.0
    assert await reward_of(made, [{"text": "done"}]) == 0.0


def test_a_demonstration_is_a_conversation_as_the_gate_makes_it():
    renderer = ByteRenderer(tools="omit")
    ids, mask = demonstration(random.Random(4), renderer, 1.0)
    text = renderer.decode(array("i", ids))
    spoken = renderer.decode(array("i", [token for token, said in zip(ids, mask, strict=True) if said]))
    assert text.startswith(f"<system>{SYSTEM}<end><user>") and text.endswith("<assistant>done<end>")
    assert spoken.startswith('<tool_call>\n{"name": "shell", "arguments": {"command": "') and spoken.endswith(
        "done<end>"
    )
    assert "<user>" not in spoken and "<tool>" not in spoken


def row(model: Llama, number: int, reward: float) -> Sample:
    ids, mask = array("i", [257, 113, 258, 97, 65 + number, 66, 261]), bytes([0, 0, 0, 0, 1, 1, 1])
    with torch.no_grad():
        said = trained_logprobs(model, torch.tensor([ids.tolist()]), torch.tensor([list(mask)]).bool()).tolist()
    return Sample(
        rollout_id=f"r{number}", run_id=None, group_id=None, task_id="q", attempt=number, index=0, count=1, kind="agent",
        call_ids=(), spans=(), ids=ids, mask=mask, logprobs=floats([0.0] * 4 + said), versions=array("q", [0] * 7),
        temperatures=None, prompt_len=4, truncated=False, reward=reward,
    )  # fmt: skip


def test_the_better_attempts_of_a_group_become_likelier_and_equal_ones_move_no_weight():
    model = small()
    learner = Learner(model, rate=1e-3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert learner.step([row(model, n, 1.0) for n in range(8)]).rows == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    early = [row(model, n, float(n < 2)) for n in range(8)]
    report = learner.step(early)
    assert report.rows == 8 and report.gap_max < 1e-5 and report.divergence > 0
    late = [row(model, n, 0.0) for n in range(8)]
    rose = [b.logprobs[4] - a.logprobs[4] for a, b in zip(early, late, strict=True)]
    assert fmean(rose[:2]) > fmean(rose[2:]) + 0.3


def test_a_step_that_went_far_makes_the_next_one_smaller_and_a_short_one_larger():
    far, near = Learner(small(), rate=3e-2), Learner(small(), rate=1e-6)
    for learner in (far, near):
        learner.step([row(learner.model, n, float(n < 2)) for n in range(8)])
    assert far.rate < 3e-2 and near.rate > 1e-6


def test_the_warm_up_teaches_the_tool_call():
    model = small()
    losses = warm_up(model, ByteRenderer(tools="omit"), steps=3, seed=0)
    assert len(losses) == 3 and losses[-1] < losses[0]


async def test_the_whole_loop_on_a_random_model_through_real_agents(tmp_path):
    options = Options(model="tiny", warm=0, steps=2, prompts=1, group=4, held_out=3, parallel=4, out=str(tmp_path))
    result = await train(options)
    assert result["gap_max"] < 1e-4 and result["failures"] == []
    assert [(point["step"], point["rollouts"]) for point in result["curve"]] == [(0, 4), (1, 4)]
    assert result["before"]["rollouts"] == result["after"]["rollouts"] == 3
    draw([result], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 0


async def test_no_step_begins_when_the_time_is_up(tmp_path):
    options = Options(
        model="tiny", warm=0, steps=5, prompts=1, group=2, held_out=2, parallel=2, seconds=0.0, out=str(tmp_path)
    )
    assert (await train(options))["curve"] == []


def test_rows_of_other_weights_are_not_trained_on():
    model = small()
    stale = msgspec.structs.replace(row(model, 0, 1.0), versions=array("q", [-1, -1, -1, -1, 3, 3, 3]))
    refuse_stale([stale], 3)
    with pytest.raises(ValueError, match="other weights than version 4"):
        refuse_stale([stale], 4)


def test_the_interval_covers_the_mean_and_the_table_says_whether_two_touch():
    assert interval(0.3, 100) == pytest.approx((0.219, 0.396), abs=1e-3)
    assert interval(0.0, 128) == pytest.approx((0.0, 0.029), abs=1e-3)
    ends = {"before": {"reward": 0.3, "rollouts": 100}, "after": {"reward": 0.9, "rollouts": 100}}
    facts = {"options": {"seed": 7}, "curve": [{"rollouts": 64}] * 2, "gap_max": 1e-5, "seconds": 90.0}
    assert apart({**ends, **facts}) and not apart({**ends, **facts, "after": {"reward": 0.4, "rollouts": 100}})
    assert table([{**ends, **facts}]).splitlines()[-1] == (
        "| 7 | 0.30 (0.22 to 0.40) | 0.90 (0.83 to 0.94) | yes | 2 | 128 | 1e-05 | 90 |"
    )


@pytest.mark.slow
def test_the_weights_of_the_wheel_know_a_capital():
    model, renderer, _, _ = load("smollm2")
    ids = renderer.render((Message("user", (Text("What is the capital of France?"),)),))
    with torch.no_grad():
        best = model.logits(model(torch.tensor([list(ids)])))[0, -1].argmax()
    assert renderer.decode(array("i", [int(best)])) == "The"
    assert load_llama(weights()).config.layers == 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_step_of_smollm2_through_real_agents(tmp_path):
    result = await train(Options(warm=0, steps=1, prompts=1, group=2, held_out=1, parallel=2, out=str(tmp_path)))
    assert result["gap_max"] < 1e-3 and result["failures"] == []
    assert [point["rollouts"] for point in result["curve"]] == [2]
