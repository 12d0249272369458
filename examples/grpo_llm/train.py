"""GRPO on SmolLM2-135M: every rollout is a real agent process in a local sandbox, and every token is the trainer's own.

    python examples/grpo_llm/train.py --seed 0 --device cuda --out out/grpo_llm/seed0
    python examples/grpo_llm/plot.py out/grpo_llm/*/result.json --out out/grpo_llm/curve.png

`shell-agent` starts in a sandbox and asks its gate, the gate holds the call, the sampler answers with ids and logprobs, the
verifier looks at a file after the agent is dead. Held-out chores are run before the first update and after the last. See
README.md beside this for what is disclosed. `--model tiny` is a small random model over bytes, for a look on any machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import rollyard as ry
from examples.grpo_llm.chores import KINDS, SYSTEM, Split, Writer, is_done, task
from examples.grpo_llm.learn import RATE, SKILL, Learner, warm_up
from examples.grpo_llm.llama import Llama, LlamaConfig
from examples.grpo_llm.plot import interval
from examples.grpo_llm.sampler import SlotSampler
from examples.grpo_llm.weights import load_llama
from rollyard.policy.held_call import HeldCall
from rollyard.policy.renderers.bytelevel import VOCABULARY, ByteRenderer
from rollyard.runs.rollout.provision import Provision
from rollyard.trajectory.samples import Sample, samples
from tests.servers import smollm

TINY = LlamaConfig(vocabulary=VOCABULARY, width=48, layers=2, heads=3, key_heads=1, inner=96)
MAX_CALLS = 4


class Options(msgspec.Struct, frozen=True, kw_only=True):
    model: str = "smollm2"
    device: str = "cpu"
    seed: int = 0
    warm: int = 96
    skill: float = SKILL
    steps: int = 30
    prompts: int = 8
    group: int = 8
    held_out: int = 128
    parallel: int = 32
    rate: float = RATE
    seconds: float | None = None
    out: str = "out/grpo_llm"


HELP = {
    "model": "smollm2, a GGUF file of a small Llama, or tiny",
    "warm": "supervised steps before",
    "skill": "how often the demonstrator of the warm-up is right at a command",
    "prompts": "chores of one step",
    "group": "attempts at each chore",
    "held_out": "held-out chores, run before and after",
    "parallel": "rollouts at a time",
    "rate": "learning rate of the first step",
    "seconds": "no step begins that would leave too little of this time for the last evaluation",
}


def load(source: str) -> tuple[Llama, Writer, int, int]:
    """The model, its renderer, the most tokens of an answer, and of a conversation."""
    if source == "tiny":
        return Llama(TINY), ByteRenderer(tools="omit"), 128, 1024
    path = smollm.weights() if source == "smollm2" else Path(source)
    renderer = ry.policy.renderer(path, parser="hermes", tools="omit")  # its template has no place for tools
    assert hasattr(renderer, "completion_of"), "a template's renderer"
    return load_llama(path), renderer, 64, 640  # pyright: ignore[reportReturnType]


class Rollouts:
    """Groups of attempts through one gate and one backend, answered by one sampler."""

    def __init__(self, sampler: SlotSampler, queue: ry.policy.Queue, parts: dict[str, Any], options: Options) -> None:
        self.sampler = sampler
        self.failures: list[str] = []
        self._queue = queue
        self._parts = parts
        self._slots = asyncio.Semaphore(options.parallel)

    async def answer(self, max_tokens: int) -> None:
        """The trainer's side of the gate: held calls of all live rollouts, answered with the ids that were sampled."""

        async def one(held: HeldCall) -> None:
            assert held.call.prompt_ids is not None
            try:
                got = await self.sampler.sample(held.call.prompt_ids, max_tokens)
            except ValueError as error:  # the conversation is full: the agent's doing, and judged
                await held.fail(str(error), status=400)
            else:
                await held.reply(got.ids, got.logprobs, version=got.version)

        async with asyncio.TaskGroup() as group:
            while batch := await self._queue.take(max=64, wait=0.002):
                for held in batch:
                    group.create_task(one(held))

    async def run(self, seeds: Sequence[int], split: Split, attempts: int) -> list[ry.Rollout]:
        """Those that have a reward. One that failed for another reason than the model's is listed, and teaches nothing."""
        done: list[ry.Rollout] = []

        async def attempt(seed: int, number: int) -> None:
            async with self._slots:
                rollout = await ry.run_rollout(
                    task(seed, split), agent="shell-agent", system_prompt=SYSTEM, verifier=is_done, max_calls=MAX_CALLS,
                    limits=ry.Limits(agent=900, verify=60), seed=number, **self._parts,
                )  # fmt: skip
            if rollout.reward is None:
                self.failures.append(str(rollout.failure))
            else:
                done.append(rollout)

        async with asyncio.TaskGroup() as group:
            for seed in seeds:
                for number in range(attempts):
                    group.create_task(attempt(seed, number))
        return done


def rows_of(rollouts: Sequence[ry.Rollout], version: int) -> list[Sample]:
    rows = [row for rollout in rollouts for row in samples(rollout).rows]
    refuse_stale(rows, version)
    return rows


def refuse_stale(rows: Sequence[Sample], version: int) -> None:
    """The present weights sampled every token that trains: an older one would be a bug of this loop."""
    stale = [row.rollout_id for row in rows if set(row.versions) - {-1, version}]
    if stale:
        raise ValueError(f"sampled by other weights than version {version}: {stale}")


async def evaluate(rollouts: Rollouts, count: int) -> dict[str, Any]:
    """The held-out chores, one attempt at each, sampled like those of training. They are the same for every seed."""
    done = await rollouts.run(range(count), "held-out", 1)
    if not done:
        raise SystemExit(f"no rollout has a reward: {rollouts.failures[:3]}")
    rewards = [rollout.reward or 0.0 for rollout in done]
    low, high = interval(fmean(rewards), len(rewards))
    kinds = {kind: [r.reward or 0.0 for r in done if r.task.metadata["kind"] == kind] for kind in KINDS}
    return {
        "reward": round(fmean(rewards), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "rollouts": len(rewards),
        "kinds": {kind: round(fmean(found), 4) for kind, found in kinds.items() if found},
    }


async def learn(rollouts: Rollouts, learner: Learner, options: Options, until: float | None) -> list[dict[str, Any]]:
    """Sample, update, sample with the new weights: nothing that an older version said is trained on."""
    curve: list[dict[str, Any]] = []
    began = time.monotonic()
    for step in range(options.steps):
        if until is not None and time.monotonic() > until:
            print(f"time is up after {step} steps", flush=True)
            break
        rollouts.sampler.version = step
        first = options.seed * 1_000_003 + step * options.prompts
        done = await rollouts.run(range(first, first + options.prompts), "train", options.group)
        sampled = time.monotonic() - began
        rows = rows_of(done, step)
        if not rows:
            raise SystemExit(f"step {step} has no rows to train on: {rollouts.failures[-3:]}")
        report = await asyncio.to_thread(learner.step, rows)
        mean = fmean(rollout.reward or 0.0 for rollout in done)
        point = {"step": step, "reward": round(mean, 4), "rollouts": len(done), **msgspec.structs.asdict(report)}
        curve.append(point | {"seconds": round(time.monotonic() - began, 1)})
        print(
            f"step {step:3d}  reward {mean:.3f}  rollouts {len(done)}  gap {report.gap_max:.1e}  taught {report.rows}  "
            f"divergence {report.divergence:.4f}  rate {report.rate:.1e}  {sampled:.0f} s, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    return curve


async def train(options: Options) -> dict[str, Any]:
    began = time.monotonic()
    torch.manual_seed(options.seed)
    model, renderer, max_tokens, length = load(options.model)
    model.to(options.device)
    losses = await asyncio.to_thread(
        warm_up, model, renderer, steps=options.warm, seed=options.seed, skill=options.skill
    )
    print(f"warm-up: {len(losses)} steps, loss {losses[-1:]}, {time.monotonic() - began:.0f} s", flush=True)
    queue = ry.policy.Queue(renderer=renderer)
    async with (
        SlotSampler(model, stop_ids=renderer.stop_ids, slots=options.parallel, length=length) as sampler,
        ry.sandbox.backend("local") as backend,
        ry.Gate(queue) as gate,
    ):
        parts = {"sandbox": backend, "gate": gate, "policy": queue, "provision": Provision()}
        rollouts = Rollouts(sampler, queue, parts, options)
        answering = asyncio.create_task(rollouts.answer(max_tokens))
        started = time.monotonic()
        before = await evaluate(rollouts, options.held_out)
        took = time.monotonic() - started
        print(f"held-out before: {before}, {took:.0f} s", flush=True)
        # the last evaluation takes about as long as the first one, and a step about as long as its share of it
        left = took * (1 + options.prompts * options.group / options.held_out) * 1.3 + 5
        until = None if options.seconds is None else began + options.seconds - left
        curve = await learn(rollouts, Learner(model, rate=options.rate, seed=options.seed), options, until)
        sampler.version = len(curve)
        after = await evaluate(rollouts, options.held_out)
        print(f"held-out after:  {after}", flush=True)
        await queue.aclose()
        await answering
    return {
        "options": msgspec.structs.asdict(options),
        "machine": torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU",
        "torch": torch.__version__,
        "warm_up_loss": losses,
        "before": before,
        "after": after,
        "gap_max": max((point["gap_max"] for point in curve), default=None),
        "failures": rollouts.failures,
        "tokens": sampler.tokens,
        "seconds": round(time.monotonic() - began, 1),
        "curve": curve,
    }


def read_options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in msgspec.structs.fields(Options):
        kind = {"model": str, "device": str, "out": str, "rate": float, "skill": float, "seconds": float}
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind.get(field.name, int),
            default=field.default,
            help=HELP.get(field.name),
        )
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = read_options()
    sys.setswitchinterval(0.001)  # the sampler's thread waits for its turn after every token
    result = asyncio.run(train(options))
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps(result, indent=1))
    print(f"written to {out / 'result.json'}")


if __name__ == "__main__":
    main()
