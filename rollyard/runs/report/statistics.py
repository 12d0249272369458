"""Numbers about rewards, as plain functions: pass@k, intervals, paired differences, learnability, separation.

An attempt that was never scored is not here at all: callers pass only real rewards, so it can never count as a zero. Everything
random takes a seed, so a report says the same thing twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from statistics import NormalDist, fmean, pvariance

import msgspec

PassEstimate = Callable[[int, int, int], float]

_DRAWS = 2000
_RESAMPLED = 100  # beyond so many values the resampling distribution is known well enough to be computed
_WORK = 4_000_000  # signs flipped at most; fewer draws for very many pairs


class Interval(msgspec.Struct, frozen=True):
    """All three are None when there was nothing to measure; the ends alone when one measurement says nothing of its spread."""

    value: float | None
    low: float | None
    high: float | None


NOTHING = Interval(None, None, None)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k attempts drawn without replacement from n (c of them correct) is correct."""
    _check(n, c, k)
    return 1.0 if n - c < k else 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Chance that all k of them are correct."""
    _check(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def _check(n: int, c: int, k: int) -> None:
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= correct <= n and 1 <= k <= n, got n={n} correct={c} k={k}")


def wilson(c: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval for a proportion; it never leaves [0, 1] and is honest at 0 and n successes."""
    if n == 0:
        return NOTHING
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = c / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = 0.0 if c == 0 else max(0.0, centre - half)
    return Interval(p, low, 1.0 if c == n else min(1.0, centre + half))


def bootstrap_mean(values: Sequence[float], *, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Percentile bootstrap of the mean. Give it one value per task, so that tasks, not attempts, are resampled.

    Up to 100 values are resampled; for more, the quantiles of the same distribution come from its first four moments."""
    if not values:
        return NOTHING
    mean = fmean(values)
    if len(values) == 1:
        return Interval(mean, None, None)
    if min(values) == max(values):
        return Interval(mean, mean, mean)
    tails = (1 - confidence) / 2, (1 + confidence) / 2
    if len(values) > _RESAMPLED:
        return Interval(mean, *(_expand(values, mean, tail) for tail in tails))
    random = Random(seed)
    n = len(values)
    means = sorted(math.fsum(random.choices(values, k=n)) / n for _ in range(_DRAWS))
    return Interval(mean, *(_quantile(means, tail) for tail in tails))


def mean_over_tasks(values: Sequence[float]) -> Interval:
    """The mean of one number per task. One task says nothing of others and has no interval; where every task is solved, or none,
    resampling finds no spread, and Wilson's interval says what so few tasks leave open."""
    if len(values) > 1 and min(values) == max(values) and values[0] in (0.0, 1.0):
        return wilson(sum(value == 1.0 for value in values), len(values))
    return bootstrap_mean(values)


def _expand(values: Sequence[float], mean: float, q: float) -> float:
    """A quantile of the mean of n draws from `values`, by Cornish and Fisher's expansion."""
    n = len(values)
    second, third, fourth = (math.fsum((v - mean) ** power for v in values) / n for power in (2, 3, 4))
    skew = third / second**1.5 / math.sqrt(n)
    excess = (fourth / second**2 - 3) / n
    z = NormalDist().inv_cdf(q)
    bent = z + (z * z - 1) * skew / 6 + (z**3 - 3 * z) * excess / 24 - (2 * z**3 - 5 * z) * skew * skew / 36
    return min(max(mean + bent * math.sqrt(second / n), min(values)), max(values))


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between order statistics."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


class Paired(msgspec.Struct, frozen=True, kw_only=True):
    """Two sides on the same tasks. `means` are those of each shared task: (task, before, after); `flips` those of them whose
    majority outcome changed."""

    tasks: int
    difference: Interval
    p_value: float
    better: tuple[str, ...]
    worse: tuple[str, ...]
    means: tuple[tuple[str, float, float], ...]
    flips: tuple[tuple[str, float, float], ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]


def _difference(differences: Sequence[float], seed: int) -> Interval:
    """Where every task differs by the same, resampling finds no spread, and an interval of no width would claim certainty."""
    found = bootstrap_mean(differences, seed=seed)
    return Interval(found.value, None, None) if found.low == found.high else found


def compare_pairs(
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]], *, seed: int = 0
) -> Paired:
    """Compare mean reward task by task; the test flips the signs of the differences."""
    shared = sorted(task for task in first if first[task] and second.get(task))
    before = {task: fmean(first[task]) for task in shared}
    after = {task: fmean(second[task]) for task in shared}
    differences = [after[task] - before[task] for task in shared]
    return Paired(
        tasks=len(shared),
        difference=_difference(differences, seed),
        p_value=sign_flip(differences, seed=seed),
        better=tuple(t for t in shared if after[t] > before[t]),
        worse=tuple(t for t in shared if after[t] < before[t]),
        means=tuple((t, before[t], after[t]) for t in shared),
        flips=tuple((t, before[t], after[t]) for t in shared if (before[t] >= 0.5) != (after[t] >= 0.5)),
        only_first=tuple(sorted(t for t in first if first[t] and not second.get(t))),
        only_second=tuple(sorted(t for t in second if second[t] and not first.get(t))),
    )


def sign_flip(differences: Sequence[float], *, seed: int = 0) -> float:
    """Two-sided permutation test that the mean difference is 0: exact up to 14 pairs that differ, sampled beyond."""
    moved = [d for d in differences if d]
    if not moved:
        return 1.0
    observed = abs(math.fsum(moved)) - 1e-12
    if len(moved) <= 14:
        total = 1 << len(moved)
        extreme = sum(
            abs(math.fsum(-d if mask >> i & 1 else d for i, d in enumerate(moved))) >= observed for mask in range(total)
        )
        return extreme / total
    random = Random(seed)
    draws = max(500, min(10_000, _WORK // len(moved)))
    extreme = sum(abs(math.fsum(d if random.random() < 0.5 else -d for d in moved)) >= observed for _ in range(draws))
    return (extreme + 1) / (draws + 1)


def learnability(rewards: Sequence[float], *, seed: int = 0) -> Interval:
    """Variance of the reward over attempts: 0 teaches nothing, 0.25 is the most for 0/1.

    The interval of 0/1 rewards comes from Wilson's for the rate of success, so that eight successes out of eight do not prove
    that the variance is 0; that of other rewards is a bootstrap."""
    if not rewards:
        return NOTHING
    value = pvariance(rewards)
    if all(reward in (0, 1) for reward in rewards):
        return Interval(value, *_variance_range(wilson(sum(reward == 1 for reward in rewards), len(rewards))))
    if len(rewards) == 1 or value == 0.0:
        return Interval(value, value, value)
    random = Random(seed)
    n = len(rewards)
    drawn = sorted(pvariance(random.choices(rewards, k=n)) for _ in range(_DRAWS // 2))
    return Interval(value, _quantile(drawn, 0.025), _quantile(drawn, 0.975))


def _variance_range(rate: Interval) -> tuple[float, float]:
    """The least and the most p(1-p) for p in the interval."""
    assert rate.low is not None and rate.high is not None
    ends = rate.low * (1 - rate.low), rate.high * (1 - rate.high)
    return min(ends), 0.25 if rate.low <= 0.5 <= rate.high else max(ends)


class Separation(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a task tells two models apart: difference of means, Cohen's d (None where nothing varies), p value."""

    first: str
    second: str
    difference: float
    effect_size: float | None
    p_value: float


def separation(first: str, a: Sequence[float], second: str, b: Sequence[float], *, seed: int = 0) -> Separation:
    """Permutation test on the difference of means, exact where the number of splits is small."""
    difference = fmean(a) - fmean(b)
    pooled = (pvariance(a) * len(a) + pvariance(b) * len(b)) / max(1, len(a) + len(b) - 2)
    effect = difference / math.sqrt(pooled) if pooled > 0 else None
    return Separation(
        first=first,
        second=second,
        difference=difference,
        effect_size=effect,
        p_value=_permutation(a, b, abs(difference) - 1e-12, seed),
    )


def _permutation(a: Sequence[float], b: Sequence[float], observed: float, seed: int) -> float:
    from itertools import combinations

    everything = [*a, *b]
    total, n, m = math.fsum(everything), len(a), len(b)

    def extreme(left: float) -> bool:
        return abs(left / n - (total - left) / m) >= observed

    if math.comb(n + m, n) <= 20_000:
        splits = [math.fsum(split) for split in combinations(everything, n)]
        return sum(map(extreme, splits)) / len(splits)
    random = Random(seed)
    hits = sum(extreme(math.fsum(random.sample(everything, n))) for _ in range(10_000))
    return (hits + 1) / 10_001


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """What GRPO would see: groups of attempts at one task. A group without variance gives no gradient."""

    groups: int
    zero_variance: int
    all_solved: int
    none_solved: int
    mean_variance: float | None


def groups(rewards: Mapping[str, Sequence[float]]) -> Groups:
    real = [values for values in rewards.values() if values]
    variances = [pvariance(values) for values in real]
    return Groups(
        groups=len(real),
        zero_variance=sum(v == 0.0 for v in variances),
        all_solved=sum(min(values) >= 1.0 for values in real),
        none_solved=sum(max(values) <= 0.0 for values in real),
        mean_variance=fmean(variances) if variances else None,
    )
