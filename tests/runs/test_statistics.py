"""The statistics agree with scipy and statsmodels, and with counting, on random inputs."""

import itertools
import math
from random import Random

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from rollyard.runs.report import statistics

counts = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


@given(counts)
def test_pass_at_k_and_pass_hat_k_are_what_counting_all_draws_gives(case):
    n, c, k = case
    outcomes = [1] * c + [0] * (n - c)
    draws = list(itertools.combinations(outcomes, k))
    assert statistics.pass_at_k(n, c, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))
    assert statistics.pass_hat_k(n, c, k) == pytest.approx(sum(all(d) for d in draws) / len(draws))


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_statsmodels_wilson(case):
    c, n = case
    low, high = proportion_confint(c, n, alpha=0.05, method="wilson")
    ours = statistics.wilson(c, n)
    assert (ours.low, ours.high) == (pytest.approx(low, abs=1e-9), pytest.approx(high, abs=1e-9))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("size", "rate"), [(30, 0.5), (60, 0.5), (150, 0.1), (500, 0.5), (1000, 0.02)])
def test_bootstrap_is_close_to_scipys(seed, size, rate):
    random = Random(seed)
    values = [float(random.random() < rate) if size > 100 else random.random() for _ in range(size)]
    theirs = stats.bootstrap(
        (numpy.array(values),), numpy.mean, method="percentile", n_resamples=4000, rng=seed
    ).confidence_interval
    ours = statistics.bootstrap_mean(values, seed=seed)
    assert ours.value == pytest.approx(numpy.mean(values))
    width = theirs.high - theirs.low
    assert ours.low == pytest.approx(theirs.low, abs=0.07 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.07 * width)


@pytest.mark.parametrize("seed", range(5))
def test_sign_flip_is_scipys_paired_permutation_test(seed):
    random = Random(seed)
    differences = [random.choice([-0.5, 0.25, 0.5, 1.0]) for _ in range(9)]
    theirs = stats.permutation_test(
        (numpy.array(differences),), numpy.sum, permutation_type="samples", n_resamples=numpy.inf
    ).pvalue
    assert statistics.sign_flip(differences) == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_separation_is_scipys_permutation_test_and_cohens_d(seed):
    random = Random(seed)
    a = [float(random.random() < 0.8) for _ in range(7)]
    b = [float(random.random() < 0.3) for _ in range(6)]
    ours = statistics.separation("a", a, "b", b)
    theirs = stats.permutation_test(
        (a, b),
        lambda x, y, axis=-1: numpy.round(abs(numpy.mean(x, axis) - numpy.mean(y, axis)), 9),
        vectorized=True,
        n_resamples=numpy.inf,
        alternative="greater",
    ).pvalue
    assert ours.p_value == pytest.approx(theirs, abs=1e-9)
    pooled = math.sqrt(
        (numpy.var(a, ddof=1) * (len(a) - 1) + numpy.var(b, ddof=1) * (len(b) - 1)) / (len(a) + len(b) - 2)
    )
    if pooled:
        assert ours.effect_size == pytest.approx((numpy.mean(a) - numpy.mean(b)) / pooled)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_learnability_is_the_variance_and_its_interval_follows_statsmodels_wilson(case):
    c, n = case
    found = statistics.learnability([1.0] * c + [0.0] * (n - c))
    assert found.value == pytest.approx(numpy.var([1.0] * c + [0.0] * (n - c)))
    rates = numpy.linspace(*proportion_confint(c, n, alpha=0.05, method="wilson"), 2001)
    assert found.low == pytest.approx((rates * (1 - rates)).min(), abs=1e-6)
    assert found.high == pytest.approx((rates * (1 - rates)).max(), abs=1e-5)
    assert found.low <= found.value + 1e-9
    assert found.value <= found.high + 1e-9


def test_solving_it_every_time_does_not_prove_that_a_task_teaches_nothing():
    assert statistics.learnability([1.0] * 4).high > 0.2
    assert statistics.learnability([1.0] * 400).high < 0.01


def test_learnability_of_partial_rewards_has_a_bootstrap_interval():
    found = statistics.learnability([0.5, 0.1, 0.9, 0.4, 0.6, 0.2])
    assert found.value == pytest.approx(numpy.var([0.5, 0.1, 0.9, 0.4, 0.6, 0.2]))
    assert 0 < found.low < found.value < found.high


def test_a_comparison_counts_only_shared_tasks_and_lists_flips():
    before = {"a": [1, 1], "b": [0, 0], "c": [1], "gone": [1], "unscored": []}
    after = {"a": [0, 0], "b": [0, 0], "c": [1], "new": [0], "unscored": [1]}
    found = statistics.compare_pairs(before, after)
    assert (found.tasks, found.worse, found.better) == (3, ("a",), ())
    assert found.flips == (("a", 1, 0),)
    assert (found.only_first, found.only_second) == (("gone",), ("new", "unscored"))


def test_groups_count_those_that_teach_nothing():
    found = statistics.groups({"a": [1, 1], "b": [0, 0], "c": [0, 1], "d": []})
    assert (found.groups, found.zero_variance, found.all_solved, found.none_solved) == (3, 2, 1, 1)


def test_one_task_alone_has_no_interval_of_the_mean():
    assert statistics.bootstrap_mean([0.5]) == statistics.Interval(0.5, None, None)
    assert statistics.bootstrap_mean([0.5, 0.5]).low == 0.5


def test_one_task_has_no_interval_and_tasks_that_agree_leave_open_what_wilson_says():
    assert statistics.mean_over_tasks([1.0]) == statistics.Interval(1.0, None, None)
    assert statistics.mean_over_tasks([1.0] * 4) == statistics.wilson(4, 4)
    assert statistics.mean_over_tasks([0.0] * 4) == statistics.wilson(0, 4)
    assert statistics.mean_over_tasks([0.0, 1.0, 1.0]) == statistics.bootstrap_mean([0.0, 1.0, 1.0])


def test_a_difference_that_is_the_same_on_every_task_claims_no_certainty():
    pair = statistics.compare_pairs({"a": [0.0], "b": [0.0]}, {"a": [1.0], "b": [1.0]})
    assert pair.difference == statistics.Interval(1.0, None, None)
