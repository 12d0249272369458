"""A move's answer as JSON: what it cannot carry is refused, never changed."""

from __future__ import annotations

import msgspec
import pytest

from rollyard.envs.results import EnvRefused, EnvResult


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_cannot_carry_is_refused_wherever_it_is(number):
    for value in (number, [number], {"a": {"b": [1, None, number]}}, {"null": "null", "x": (number,)}):
        with pytest.raises(EnvRefused, match="JSON cannot carry"):
            EnvResult.of(value)


@pytest.mark.parametrize("value", [None, {"a": None}, "null", {"null": [1.5, "NaN"]}, [], {"x": 1e308}])
def test_what_json_can_carry_stays(value):
    result = EnvResult.of(value)
    assert result.value == value == msgspec.json.decode(result.raw)
