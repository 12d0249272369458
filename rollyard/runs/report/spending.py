"""What a run has used, in tokens and in money, and when that is enough.

Money needs prices, which are the caller's: per million tokens, by policy name, in any currency. Without one, cost is None and
never 0. A budget ends the handing out of attempts; those in flight finish and count, so a run may end a little above it, and no
score is of a rollout that was cut short for money.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import msgspec


class Used(Protocol):
    """Tokens of a call, or of a rollout."""

    @property
    def prompt_tokens(self) -> int | None: ...
    @property
    def completion_tokens(self) -> int | None: ...
    @property
    def cached_tokens(self) -> int | None: ...


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Money per million tokens, in the caller's own currency. `cached` is that of prompt tokens that the server had in its
    cache; without it they cost what others do."""

    prompt: float
    completion: float
    cached: float | None = None

    def __post_init__(self) -> None:
        for price in (self.prompt, self.completion, self.cached or 0.0):
            if not 0.0 <= price < math.inf:
                raise ValueError(f"a price is a number that is not below 0, got {price}")

    def of(self, used: Used) -> float:
        prompt, cached = used.prompt_tokens or 0, 0
        if self.cached is not None:
            cached = min(used.cached_tokens or 0, prompt)
        spent = (prompt - cached) * self.prompt + cached * (self.cached or 0.0)
        return (spent + (used.completion_tokens or 0) * self.completion) / 1e6


Prices = Mapping[str, Price]


class UsedBy(Used, Protocol):
    """What is asked of a rollout's line."""

    @property
    def policy(self) -> str | None: ...


def cost(prices: Prices, line: UsedBy) -> float | None:
    """None without a price."""
    price = find_price(prices, line.policy)
    return None if price is None else price.of(line)


def find_price(prices: Prices, policy: str | None) -> Price | None:
    """Where a run has one policy only, its rollouts do not name it, and the only price is theirs."""
    if policy is not None:
        return prices.get(policy)
    return next(iter(prices.values())) if len(prices) == 1 else None


def money(value: float, currency: str = "") -> str:
    """Four digits that matter; the currency is the one that the run names, a sign before and letters behind."""
    shown = f"{value:.2f}" if value >= 1 else f"{value:.4f}"
    return f"{shown} {currency}" if currency.isalpha() else f"{currency}{shown}"


class Spending:
    """The sum so far. `over` once either budget is used up."""

    def __init__(self, prices: Prices, *, max_cost: float | None, max_tokens: int | None) -> None:
        self._prices, self._max_cost, self._max_tokens = prices, max_cost, max_tokens
        self.cost = 0.0
        self.tokens = 0

    def add(self, line: UsedBy) -> None:
        self.cost += cost(self._prices, line) or 0.0
        self.tokens += line.completion_tokens or 0

    @property
    def over(self) -> bool:
        if self._max_cost is not None and self.cost >= self._max_cost:
            return True
        return self._max_tokens is not None and self.tokens >= self._max_tokens
