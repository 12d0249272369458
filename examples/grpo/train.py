"""GRPO where every rollout is a real agent process in a local sandbox, and every token is the trainer's own.

    python examples/grpo/train.py --seed 0 --out out/grpo          (or `make train`, SEEDS=5 for five)

A model of about a million weights speaks bytes. It is warmed up on a noisy demonstrator that is right only 40 % of the time at
each step, so it can talk but mostly answers wrong; this is disclosed and needed: from random weights a sparse reward teaches
nothing. Then each step runs groups of eight attempts at four questions: `shell-agent` starts in a sandbox and asks its gate, the
gate holds the call, the trainer samples and answers with ids and logprobs, the verifier looks at the answer file, and one
clipped policy-gradient update follows. Written: `curve.json` of each seed, and `curve.png` with all of them.

A seed fixes the warm-up and the questions. What is sampled is new each time: agents run side by side and ask in any order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import rollyard as ry
from examples.grpo.curves import draw, table
from examples.grpo.learn import WARM, Learner, warm_up
from examples.grpo.world import SYSTEM, answered, renderer, task
from rollyard.policy.renderers.bytelevel import END
from rollyard.runs.rollout.provision import Provision
from rollyard.train.sampler import Sampler, SampleRequest
from rollyard.train.tiny import TinyConfig, TinyModel
from rollyard.trajectory.samples import Sample, samples

GROUP, PROMPTS = 8, 4
MAX_TOKENS = 16


async def answer(queue: ry.policy.Queue, sampler: Sampler) -> None:
    """The trainer's side of the gate: held calls of all live rollouts, answered with the ids that were sampled."""

    async def one(held) -> None:
        request = SampleRequest(prompt=held.call.prompt_ids, max_tokens=MAX_TOKENS, stop_ids=(END,))
        got = await sampler.sample(request)
        await held.reply(got.ids, got.logprobs, version=got.spans[0].version if got.spans else 0)

    async with asyncio.TaskGroup() as group:
        while batch := await queue.take(max=64, wait=0.005):
            for held in batch:
                group.create_task(one(held))


async def collect(step: int, seed: int, parts: dict, prompts: int, parallel: int) -> tuple[list[Sample], list[float]]:
    """One step's rollouts. One that failed for another reason than the model gives no row and no reward."""
    slots = asyncio.Semaphore(parallel)
    rows: list[Sample] = []
    rewards: list[float] = []

    async def attempt(question: int, number: int) -> None:
        async with slots:
            done = await ry.run_rollout(
                task(question), agent="shell-agent", system_prompt=SYSTEM, verifier=answered, max_calls=4,
                limits=ry.Limits(agent=60, verify=30), labels={"step": str(step)}, seed=number, **parts,
            )  # fmt: skip
        if done.reward is not None:
            rewards.append(done.reward)
            rows.extend(samples(done).rows)

    async with asyncio.TaskGroup() as group:
        for prompt in range(prompts):
            question = seed * 1_000_003 + step * prompts + prompt
            for number in range(GROUP):
                group.create_task(attempt(question, number))
    return rows, rewards


async def train(seed: int, steps: int, warm: int, prompts: int, parallel: int, out: Path) -> dict:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = TinyModel(TinyConfig(context=256))
    began = time.monotonic()
    loss = warm_up(model, steps=warm, seed=seed)
    print(f"warm-up: {warm} steps in {time.monotonic() - began:.0f} s, loss {loss:.3f}", flush=True)
    learner = Learner(model)
    curve, gap = [], None
    queue = ry.policy.Queue(renderer=renderer())
    async with (
        Sampler(TinyModel(model.config)) as sampler,
        ry.sandbox.backend("local") as backend,
        ry.Gate(queue) as gate,
    ):
        answering = asyncio.create_task(answer(queue, sampler))
        parts = {"sandbox": backend, "gate": gate, "policy": queue, "provision": Provision()}
        for step in range(steps):
            await sampler.load({k: v.clone() for k, v in model.state_dict().items()}, step)
            rows, rewards = await collect(step, seed, parts, prompts, parallel)
            if gap is None and rows:
                gap = learner.gap(rows)
                print(f"step 0: sampler and trainer logprobs differ by at most {gap:.2e}", flush=True)
            if rows:
                await asyncio.to_thread(learner.step, rows)
            mean = sum(rewards) / len(rewards) if rewards else None
            curve.append({"step": step, "reward": mean, "rollouts": len(rewards)})
            print(
                f"step {step:3d}  reward {mean if mean is None else round(mean, 3)}  {time.monotonic() - began:.0f} s",
                flush=True,
            )
        await queue.aclose()
        await answering
    result = {"seed": seed, "curve": curve, "logprob_gap": gap, "seconds": round(time.monotonic() - began, 1)}
    out.mkdir(parents=True, exist_ok=True)
    (out / "curve.json").write_text(json.dumps(result, indent=1))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, one after the other")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm", type=int, default=WARM, help="supervised steps before")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="groups of eight per step")
    parser.add_argument("--parallel", type=int, default=8, help="rollouts at a time")
    parser.add_argument("--out", type=Path, default=Path("out/grpo"))
    args = parser.parse_args()
    results = []
    for seed in range(args.seed, args.seed + args.seeds):
        folder = args.out if args.seeds == 1 else args.out / f"seed{seed}"
        results.append(asyncio.run(train(seed, args.steps, args.warm, args.prompts, args.parallel, folder)))
    draw(results, args.out / "curve.png", rollouts=args.prompts * GROUP)
    print(table(results))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
