"""The training example: its reward has no hole, its learner does not wander, and real rollouts teach the model (R2)."""

from __future__ import annotations

import argparse
import asyncio
from array import array
from statistics import fmean

import pytest

pytest.importorskip("torch", reason="torch is not installed (make torch)")

import torch

import rollyard as ry
from examples.grpo.curves import ends, table
from examples.grpo.learn import WARM, Learner, token_logprobs
from examples.grpo.train import train
from examples.grpo.tree import compare, summarize
from examples.grpo.world import NAMES, SYSTEM, answered, renderer, task
from rollyard.core.call import floats
from rollyard.policy.renderers.bytelevel import END
from rollyard.train.sampler import Sampler, SampleRequest
from rollyard.train.tiny import TinyConfig, TinyModel
from rollyard.trajectory.samples import Sample

pytestmark = [pytest.mark.anyio, pytest.mark.agent]
SMALL = TinyConfig(width=32, layers=1, context=64)


@pytest.fixture(autouse=True)
def one_thread():
    """A small model is slower on many threads, far slower where other tests want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def question_about(name: str):
    return next(q for q in map(task, range(1000)) if q.metadata["asked"] == name)


async def rollout_of(question, says: str) -> float | None:
    """A model that says one line whatever it is asked, in a real sandbox."""
    queue = ry.policy.Queue(renderer=renderer())
    line = array("i", [*says.encode(), END])
    async with ry.sandbox.backend("local") as backend, ry.Gate(queue) as gate:

        async def reply() -> None:
            while batch := await queue.take():
                for held in batch:
                    await held.reply(line, floats([-0.1] * len(line)), version=0)

        async with asyncio.TaskGroup() as group:
            group.create_task(reply())
            done = await ry.run_rollout(
                question, agent="shell-agent", system_prompt=SYSTEM, verifier=answered, max_calls=2,
                limits=ry.Limits(agent=60, verify=30), sandbox=backend, gate=gate, policy=queue,
            )  # fmt: skip
            await queue.aclose()
    assert done.failure is None, done.failure
    return done.reward


@pytest.mark.parametrize("name", NAMES)
async def test_who_does_nothing_gets_nothing_whatever_is_asked(name):
    assert await rollout_of(question_about(name), ".") == 0.0


async def test_the_answer_in_its_file_is_paid():
    question = question_about("a")
    assert await rollout_of(question, f"$echo {question.metadata['answer']} >x") == 1.0


def row(number: int, reward: float, model: TinyModel) -> Sample:
    ids = array("i", [257, 113, 258, 97, 65 + number, 66, 261])
    with torch.no_grad():
        said = token_logprobs(model, torch.tensor([ids.tolist()]))[0].tolist()
    mask = bytes([0, 0, 0, 0, 1, 1, 1])
    return Sample(
        rollout_id=f"r{number}", run_id=None, group_id=None, task_id="q", attempt=number, index=0, count=1, kind="agent",
        call_ids=(), spans=(), ids=ids, mask=mask, logprobs=floats([p * m for p, m in zip(said, mask, strict=True)]),
        versions=array("q", [0] * len(ids)), temperatures=None, prompt_len=4, truncated=False, reward=reward,
    )  # fmt: skip


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_group_with_equal_rewards_moves_no_weight(reward):
    torch.manual_seed(0)
    model = TinyModel(SMALL)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Learner(model).step([row(number, reward, model) for number in range(8)])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_model_that_wandered_is_drawn_back_to_its_reference():
    torch.manual_seed(0)
    model = TinyModel(SMALL)
    learner = Learner(model, rate=1e-3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    ids = torch.tensor([row(number, 0.0, model).ids.tolist() for number in range(8)])

    def apart() -> float:
        with torch.no_grad():
            return float((token_logprobs(model, ids) - token_logprobs(learner.reference, ids))[:, 4:].abs().mean())

    before = apart()
    for _ in range(20):
        learner.step([row(number, 0.0, model) for number in range(8)])
    assert apart() < before / 2


def test_the_better_attempts_of_a_group_become_likelier():
    torch.manual_seed(0)
    model = TinyModel(SMALL)
    rows = [row(number, float(number < 2), model) for number in range(8)]
    learner = Learner(model)
    for _ in range(5):
        learner.step(rows)
    with torch.no_grad():
        after = [float(token_logprobs(model, torch.tensor([r.ids.tolist()]))[0, 4]) for r in rows]
    rose = [late - early.logprobs[4] for late, early in zip(after, rows, strict=True)]
    assert min(rose[:2]) > 0 > fmean(rose[2:])


async def test_sampling_without_a_seed_leaves_torchs_own_generator_alone():
    async with Sampler(TinyModel(SMALL)) as sampler:
        torch.manual_seed(5)
        expected = torch.rand(4)
        torch.manual_seed(5)
        await sampler.sample(SampleRequest(prompt=array("i", [257, 113]), max_tokens=2))
        assert torch.equal(torch.rand(4), expected)


def result_of(seed: int, *values: float | None) -> dict:
    return {"seed": seed, "seconds": 90.0, "curve": [{"step": n, "reward": value} for n, value in enumerate(values)]}


def test_the_table_compares_the_first_six_steps_with_the_last_fifteen():
    result = result_of(3, *[0.2] * 6, *[0.5] * 20, *[0.9] * 15)
    assert ends(result) == pytest.approx((0.2, 0.9))
    assert table([result, result_of(4, None)]).splitlines() == [
        "seed  first 6  last 15   rise  minutes",
        "   3     0.20     0.90  +0.70      1.5",
        "   4  no rollout had a reward",
    ]


@pytest.mark.slow
async def test_the_trainer_recomputes_the_samplers_logprobs_exactly_and_learns_from_rows(tmp_path):
    result = await train(seed=0, steps=3, warm=40, prompts=1, parallel=4, out=tmp_path)
    assert result["logprob_gap"] < 1e-4
    assert [point["step"] for point in result["curve"]] == [0, 1, 2]
    assert all(point["rollouts"] == 8 for point in result["curve"])
    assert (tmp_path / "curve.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [21, 22])
async def test_half_a_training_on_real_rollouts_raises_the_reward(seed, tmp_path):
    result = await train(seed=seed, steps=30, warm=WARM, prompts=4, parallel=8, out=tmp_path)
    first, last = ends(result)
    assert last - first > 0.15, table([result])


@pytest.mark.slow
async def test_a_tree_has_as_many_attempts_as_a_flat_group_from_fewer_sampled_tokens():
    found = await compare(0, argparse.Namespace(steps=2, warm=WARM, prompts=2, parallel=4))
    assert [point["rollouts"] for point in (*found["flat"], *found["tree"])] == [18] * 4
    assert summarize(found["tree"])[1] > 1.1 * summarize(found["flat"])[1]
