"""A task's quality: what its scores say, with errors kept apart (V1, V2)."""

import pytest

from rollyard.runs.report.quality import ModelScores, judge_task, same_model


def scores(model, *rewards, errors=()):
    return ModelScores(model=model, rewards=rewards, errors=tuple(errors))


@pytest.mark.parametrize(
    ("rewards", "judgement"),
    [
        ((1, 1, 1, 1), "too easy"),
        ((0, 0, 0, 0), "too hard"),
        ((0, 1, 0, 1), "learnable"),
        ((), "not enough scores"),
        ((0.5, 0.5), "not enough scores"),
        ((0, 7), "broken verifier"),
    ],
)
def test_the_judgement_follows_the_scores(rewards, judgement):
    assert judge_task("t", [scores("m", *rewards)]).judgement == judgement


def test_a_verifier_that_mostly_fails_to_score_is_broken_even_if_the_rest_passed():
    found = judge_task("t", [scores("m", 1.0, errors=["x", "x", "x"])], verifier_errors=3)
    assert found.judgement == "broken verifier"


def test_models_are_separated_pairwise_with_effect_and_test():
    found = judge_task("t", [scores("a", 1, 1, 1, 1, 0), scores("b", 0, 0, 0, 0, 1)])
    (pair,) = found.separation
    assert pair.difference == pytest.approx(0.6)
    assert pair.effect_size is not None
    assert 0 < pair.p_value < 0.3


def test_model_ids_match_with_and_without_a_provider_but_not_across_providers():
    assert same_model("openai/gpt-5", "gpt-5")
    assert same_model("gpt-5", "gpt-5")
    assert not same_model("openai/gpt-5", "azure/gpt-5")
    found = judge_task("t", [scores("anthropic/claude", 1.0)])
    assert found.scores("claude") is found.scores("anthropic/claude") is found.models[0]
    assert found.scores("gpt-5") is None
