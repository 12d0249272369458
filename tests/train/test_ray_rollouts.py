"""A trainer's handle on rollouts that run on Ray: every attempt comes out exactly once, with rows or with a reason."""

from __future__ import annotations

import time

import pytest

import rollyard as ry
from rollyard.core.task import Task, VerifierSpec

pytest.importorskip("ray", reason="the package ray is not installed (pip install 'rollyard[ray]')")
pytestmark = pytest.mark.xdist_group("ray")

SCRIPT = """
steps: []
cases:
  - match: quick
    steps:
      - shell: echo hello > out.txt
      - text: done
  - match: slow
    steps:
      - sleep: 60
"""


@pytest.fixture(scope="module")
def cluster():
    from tests.servers.ray_cluster import RayCluster

    with RayCluster(nodes=1) as made:
        yield made


@pytest.fixture
def rollouts(cluster, tmp_path):
    script = tmp_path / "script.yaml"
    script.write_text(SCRIPT)
    made = ry.train.RayRollouts(
        store=str(tmp_path / "runs.db"), policy=f"scripted:{script}", agent="shell-agent", parallel=4, max_staleness=1,
        lease_s=3.0,
        ray=ry.train.RayOptions(address=cluster.address),
    )  # fmt: skip
    yield made
    made.close()
    assert cluster.list_left_actors() == []


def task(kind, command="grep -q hello out.txt"):
    return Task(id=kind, instruction=kind, verifier=VerifierSpec(kind="commands", options={"commands": [command]}))


def take(rollouts, count):
    found, end = [], time.monotonic() + 120
    while len(found) < count and time.monotonic() < end:
        found += rollouts.take(timeout=5)
    assert len(found) == count
    return found


@pytest.mark.slow
def test_groups_come_back_as_rows_and_what_has_none_says_why(rollouts):
    first = rollouts.submit(task("quick"), size=3, seed=7)
    again = rollouts.submit(task("quick"), size=1)  # the same task, another group
    found = take(rollouts, 4)
    assert sorted((s.group_id, s.number) for s in found) == sorted([*((first, n) for n in range(3)), (again, 0)])
    assert {s.reward for s in found} == {1.0} and {s.why for s in found} == {None}
    assert all(row.trained and row.rollout_id == s.rollout_id for s in found for row in s.rows) and found[0].rows
    assert [s.left for s in found if s.group_id == first] == [2, 1, 0]
    assert rollouts.waiting() == {}

    slow, other = rollouts.submit(task("slow"), size=2), rollouts.submit(task("slow"), size=1)
    assert rollouts.update(1) == []  # one version behind is allowed
    assert rollouts.cancel(other) == 1
    assert rollouts.update(2) == [slow]
    ended = take(rollouts, 3)
    assert sorted((s.group_id, s.why) for s in ended) == sorted(
        [(slow, "stale"), (slow, "stale"), (other, "cancelled")]
    )
    assert all(s.rows == () and s.reward is None for s in ended)
    fresh = rollouts.submit(task("quick"), size=1)
    (last,) = take(rollouts, 1)
    assert (last.group_id, last.version, last.reward) == (fresh, 2, 1.0)
