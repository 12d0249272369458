"""The model of many machines: shares add up to what the formula says, and the slowest part is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.scale_model import Constants, Site, simulate

KEPT = Path(__file__).parents[1] / "docs" / "capacity.json"
SITE = Site(turns=4, answer_s=2.0, tool_s=1.0, rollouts_per_node=64, node_cores=16)


def constants():
    return msgspec.json.decode(KEPT.read_bytes(), type=Constants)


def test_use_of_a_resource_is_its_demand_times_the_rate():
    known = constants()
    found = simulate(known, SITE, 256, rounds=6)
    per_node = found.rollouts_per_s / found.nodes
    demand = known.node_rollout_s + SITE.turns * known.node_call_s
    assert found.used["node CPU"] == pytest.approx(per_node * demand / SITE.node_cores, rel=0.3)
    assert found.rollouts_per_s == pytest.approx(found.unhindered_per_s, rel=0.2)  # nothing is short here


def most_rollouts_per_s():
    """Where the database needs half a second for each write of a rollout: its claim, session, calls, and end."""
    return SITE.store_cores / (0.5 * (4 + SITE.turns))


def test_the_part_that_is_short_is_named_and_bounds_the_rate():
    slow = msgspec.structs.replace(constants(), store_write_s=0.5)
    found = simulate(slow, SITE, 256, rounds=30)
    assert found.bottleneck == "database CPU"
    assert found.rollouts_per_s <= 1.15 * most_rollouts_per_s()
    assert found.wall_s > 1.5 * SITE.turns * (SITE.answer_s + SITE.tool_s)


def test_writes_share_transactions_that_are_slow():
    slow = msgspec.structs.replace(constants(), store_txn_s=0.5)
    found = simulate(slow, SITE, 256, rounds=30)
    assert found.rollouts_per_s > 1.5 * most_rollouts_per_s()
