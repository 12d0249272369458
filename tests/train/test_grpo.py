"""Three steps of the training example: real agents in real sandboxes, and a sampler that says what the trainer computes (R2)."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed (make torch)")

pytestmark = [pytest.mark.anyio, pytest.mark.agent]


async def test_the_trainer_recomputes_the_samplers_logprobs_exactly_and_learns_from_rows(tmp_path):
    from examples.grpo.train import train

    result = await train(seed=0, steps=3, warm=40, prompts=1, parallel=4, out=tmp_path)
    assert result["logprob_gap"] < 1e-4
    assert [point["step"] for point in result["curve"]] == [0, 1, 2]
    assert all(point["rollouts"] == 8 for point in result["curve"])
    assert (tmp_path / "curve.json").exists()
