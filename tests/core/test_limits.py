"""`Limits` is the one place deadlines come from."""

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError


def test_defaults_are_the_documented_ones_and_ttl_outlives_judging():
    limits = ry.Limits()
    assert (limits.boot, limits.install, limits.setup, limits.agent, limits.verify) == (15, 240, 300, 600, 600)
    assert limits.ttl_s > limits.total_s >= limits.agent + limits.verify


@pytest.mark.parametrize("field", ["boot", "install", "setup", "agent", "verify", "idle"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_limit_that_is_no_time_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"limits.{field}"):
        ry.Limits(**{field: value})


def test_a_total_without_room_for_verify_is_refused():
    with pytest.raises(ConfigError, match="limits.verify"):
        ry.Limits(total=10, verify=20)
