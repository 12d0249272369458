"""`rollyard doctor --capacity`: how many agents a machine carries, by measuring some."""

from __future__ import annotations

import json

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rollyard.cli.main import app
from rollyard.core.errors import ConfigError
from rollyard.core.sandbox import MemoryUse
from rollyard.runs.doctor_capacity import MB, AgentCapacity, examine_capacity, weigh_asleep, weigh_awake
from rollyard.sandbox.local.memory import MachineMemory

pytestmark = pytest.mark.anyio

BEFORE = MemoryUse(total=10_000 * MB, available=9_000 * MB, swap=20_000 * MB, swap_free=20_000 * MB)
ROW = AgentCapacity(agent="a")


def use(held: int, swapped: int = 0, files: int = 0) -> MemoryUse:
    def each(mb: int) -> dict[str, int]:
        return dict.fromkeys(("s1", "s2"), mb * MB)

    return MemoryUse(total=0, available=0, sandboxes=each(held), files=each(files), swapped=each(swapped))


def test_a_tenth_of_the_machine_stays_free():
    found = weigh_awake(ROW, BEFORE, use(100), 2)
    assert (found.awake_mb, found.awake) == (100.0, 80)


def test_what_agents_of_one_kind_hold_together_counts_once():
    found = weigh_awake(ROW, BEFORE, use(200, files=100), 2)
    assert (found.shared_mb, found.awake_mb, found.awake) == (200.0, 100.0, 78)
    found = weigh_asleep(found, BEFORE, use(120, 80, files=100), 2, zram=0)
    assert (found.asleep_mb, found.asleep) == (20.0, 250 + (7800 - 250 * 20) // 100)


def test_pages_of_files_are_told_apart_in_what_a_sandbox_holds(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\n")
    for pid, child in ((1, "2"), (2, "")):
        (tmp_path / f"{pid}/task/{pid}").mkdir(parents=True)
        (tmp_path / f"{pid}/task/{pid}/children").write_text(child)
        (tmp_path / f"{pid}/smaps_rollup").write_text(
            f"Pss: {40 * pid} kB\nPss_File: {10 * pid} kB\nSwapPss: {pid} kB\n"
        )
    found = MachineMemory(tmp_path).read({"s": 1})
    assert (found.sandboxes, found.files, found.swapped) == ({"s": 120 << 10}, {"s": 30 << 10}, {"s": 3 << 10})


def test_asleep_what_zram_holds_counts_as_memory():
    found = weigh_asleep(weigh_awake(ROW, BEFORE, use(100), 2), BEFORE, use(20, 80), 2, zram=2 * 30 * MB)
    assert (found.asleep_mb, found.paged_out_mb, found.asleep) == (50.0, 80.0, 160)


def test_those_for_whom_there_is_no_swap_count_awake():
    little = MemoryUse(total=10_000 * MB, available=9_000 * MB, swap=800 * MB, swap_free=800 * MB)
    found = weigh_asleep(weigh_awake(ROW, little, use(100), 2), little, use(20, 80), 2, zram=0)
    assert found.asleep == 10 + (8000 - 10 * 20) // 100


def test_an_agent_that_could_only_not_be_put_to_sleep_was_measured_awake():
    found = weigh_awake(AgentCapacity(agent="a", problem="it is gone"), BEFORE, use(100), 2)
    assert found.missing == "a asleep: not measured. it is gone"
    assert AgentCapacity(agent="a", problem="it is gone").missing == "a: not measured. it is gone"


async def test_agents_are_measured_where_they_wait_for_a_model():
    found = await examine_capacity(("shell-agent",), count=2)
    (row,) = found.agents
    assert row.problem == ""
    assert row.awake_mb is not None and 3 < row.awake_mb < 100
    assert row.shared_mb is not None and 0 <= row.shared_mb < 100
    room_mb = found.available_mb - found.head_room_mb - row.shared_mb
    assert row.awake == pytest.approx(room_mb / row.awake_mb, rel=0.1)
    assert (row.asleep is None) == bool(found.no_sleep)


async def test_an_agent_that_does_not_get_that_far_is_a_row_that_says_why(tmp_path):
    file = tmp_path / "broken.toml"
    file.write_text('name = "broken"\nargv = ["false"]\n[wires.chat]\n')
    found = await examine_capacity((str(file),), count=1)
    assert found.agents[0].awake is None
    assert "broken" in found.agents[0].problem


def doctor(*words: str) -> Result:
    return CliRunner().invoke(app, ["doctor", "--capacity", *words], prog_name="rollyard")


@pytest.mark.parametrize(
    "words", [("--image", "x"), ("--model", "m"), ("--key-env", "KEY")], ids=lambda words: words[0]
)
def test_what_says_nothing_of_capacity_is_refused(words):
    assert isinstance(doctor("--agent", "nop", *words).exception, ConfigError)


@pytest.mark.slow
def test_an_agent_that_only_runs_with_a_tasks_tools_is_no_fault_of_the_machine_unless_it_is_asked_for(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path))
    found = doctor("--json")
    rows = {row["agent"]: row for row in json.loads(found.stdout)["agents"]}
    assert rows["shell-agent"]["awake"] and rows["tool-agent"]["problem"] and found.exit_code == 0
    assert doctor("--agent", "tool-agent").exit_code == 3
