"""Exports of a run: what every format must carry, and what is refused."""

import asyncio
import json
import os
import subprocess
import sys
import zipfile
from array import array
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select, update

from rollyard.core.cache import cache_home, make_once
from rollyard.core.errors import ConfigError, StoreError
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.store import Store, schema
from rollyard.store.check import check_run
from rollyard.store.exports import export
from rollyard.trajectory.samples import samples
from tests.memory import trace_memory
from tests.store.builders import keep

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(tmp_path):
    async with Store.open(tmp_path / "runs.db") as store:
        await store.create_run({}, id="run1")
        yield store


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_jsonl_has_a_line_for_each_attempt_and_unknown_is_null(store, tmp_path):
    await keep(store, "r1", attempt=0)
    await store.commit_rollout(
        Rollout(id="r2", run_id="run1", attempt=1, task=Task(id="t1", instruction=""), status="infra_error")
    )
    done = await export(store, "run1", tmp_path / "out.jsonl")
    assert (done.format, done.rollouts, done.rows) == ("jsonl", 2, 2)
    first, second = lines(tmp_path / "out.jsonl")
    assert {k: first[k] for k in ("task_id", "attempt", "status", "reward", "calls")} == {
        "task_id": "t1",
        "attempt": 0,
        "status": "completed",
        "reward": 0.5,
        "calls": 7,
    }
    assert (second["reward"], second["status"], second["attempt"]) == (None, "infra_error", 1)


async def test_turns_carry_messages_tokens_as_text_ids_logprobs_and_finish(store, tmp_path):
    """R1."""
    await keep(store, "r1")
    done = await export(store, "run1", tmp_path / "turns.jsonl", format="turns")
    found = {line["call_id"]: line for line in lines(tmp_path / "turns.jsonl")}
    assert done.rows == len(found) == 6
    turn = found["r1-c2"]
    assert [message["role"] for message in turn["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    assert turn["prompt_ids"] == [1, 2, 3, 4, 5, 6]
    assert (turn["completion_ids"], turn["completion_tokens"]) == ([7, 8], ["<7>", "<8>"])
    assert turn["logprobs"] == [-0.25, -0.25]
    assert (turn["finish_reason"], turn["reward"], turn["task_id"]) == ("stop", 0.5, "t1")


async def test_samples_and_parquet_hold_the_same_rows(store, tmp_path):
    import pyarrow.parquet

    for n in range(5):
        reward = None if n == 4 else n / 4
        await keep(store, f"r{n}", attempt=n, verdict=Verdict(reward=reward), temperature=None if n == 1 else 1.0)
    written = await export(store, "run1", tmp_path / "rows.jsonl", format="samples")
    packed = await export(store, "run1", tmp_path / "rows.parquet")
    rows = lines(tmp_path / "rows.jsonl")
    table = pyarrow.parquet.read_table(tmp_path / "rows.parquet")
    assert written.rows == packed.rows == len(rows) == table.num_rows == 4 * 4
    assert table.to_pylist() == rows
    assert [row["temperatures"] is None for row in rows].count(True) == 1
    first = next(row for row in rows if row["kind"] == "agent")
    assert first["input_ids"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert first["loss_mask"] == [0, 0, 0, 1, 1, 0, 1, 1]
    assert first["temperatures"] == [1.0] * 8
    assert (first["reward"], first["n_samples"], first["prompt_len"]) == (0.0, 4, 3)
    for row in rows:
        above = next(
            (r for r in rows if (r["rollout_id"], r["sample_index"]) == (row["rollout_id"], row["parent_index"])), {}
        )
        shared = row["shared_tokens"]
        assert row["input_ids"][:shared] == above.get("input_ids", [])[:shared]
        assert (row["parent_index"] is None) == (shared == 0)
    refused = lines(Path(written.refused_at))
    assert written.refused == len(refused) == 4 + 5
    assert {reason for line in refused for reason in line["reasons"]} == {
        "auxiliary branches are not asked for",
        "the rollout has no reward",
    }
    again = await export(store, "run1", tmp_path / "all.parquet", unscored=True)
    assert again.rows == 20


async def test_a_run_without_rows_is_an_empty_file_with_the_columns(store, tmp_path):
    import pyarrow.parquet

    await export(store, "run1", tmp_path / "none.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "none.parquet")
    assert table.num_rows == 0 and "input_ids" in table.column_names


async def test_what_a_format_does_not_know_is_refused(store, tmp_path):
    for name in ("a.jsonl", "a.turns.jsonl", "a.eval"):
        with pytest.raises(ConfigError, match="without a reward in any case"):
            await export(store, "run1", tmp_path / name, format="turns" if "turns" in name else None, unscored=True)
    with pytest.raises(ConfigError, match="has no suffix to tell its format by"):
        await export(store, "run1", tmp_path / "noext")


async def test_an_export_that_fails_leaves_no_file(store, tmp_path):
    await keep(store, "r1")
    with pytest.raises(ConfigError):
        await export(store, "run1", tmp_path / "out.unknown")
    with pytest.raises(StoreError):
        await export(store, "run9", tmp_path / "out.jsonl")
    await store.database.write(
        lambda c: c.exec_driver_sql("UPDATE calls SET nodes = X'00' WHERE nodes IS NOT NULL AND rollout_id = 'r1'")
    )
    with pytest.raises(StoreError, match="damaged"):
        await export(store, "run1", tmp_path / "out.parquet")
    assert [p.name for p in tmp_path.iterdir() if "out" in p.name] == []


def harbor_models():
    """Harbor's own ATIF models, out of its wheel: it asks for a newer Python than ours, its models do not."""
    return make_once(cache_home() / "packages" / "harbor-0.25.0", unpack_harbor)


def unpack_harbor(folder):
    get = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--ignore-requires-python", "harbor==0.25.0"]
    got = subprocess.run([*get, "-d", str(folder)], capture_output=True, text=True)
    if got.returncode:
        pytest.skip("harbor's wheel cannot be downloaded here")
    with zipfile.ZipFile(next(folder.glob("harbor-*.whl"))) as wheel:
        wheel.extractall(folder)


VALIDATE = """
import sys, json
from harbor.models.trajectories import Trajectory
for path in sys.argv[1:]:
    document = Trajectory.model_validate(json.load(open(path)))
    print(document.schema_version, len(document.steps), len(document.subagent_trajectories or []))
"""


async def test_atif_documents_are_valid_for_harbor_itself(store, tmp_path):
    models = harbor_models()
    await keep(store, "r1")
    out = tmp_path / "atif"
    out.mkdir()
    done = await export(store, "run1", out)
    assert (done.format, done.rows) == ("atif", 1)
    checked = subprocess.run(
        [sys.executable, "-c", VALIDATE, str(out / "r1.json")],
        env={**os.environ, "PYTHONPATH": str(models)},
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.split() == ["ATIF-v1.8", "8", "2"]


async def test_atif_carries_ids_observations_and_subagents(store, tmp_path):
    await keep(store, "r1")
    await export(store, "run1", tmp_path / "run.json")
    (document,) = lines(tmp_path / "run.json")
    steps = document["steps"]
    assert [(step["source"], step.get("is_copied_context")) for step in steps] == [
        ("system", None),
        ("user", None),
        ("agent", None),
        ("agent", None),
        ("user", None),
        ("agent", None),
        ("user", None),
        ("agent", None),
    ]
    asking, answering = steps[2], steps[3]
    assert asking["reasoning_content"] == "hm"
    assert asking["tool_calls"][0]["arguments"] == {"cmd": "ls"}
    assert asking["tool_calls"][1]["extra"] == {"raw_arguments": "not json"}
    assert [r["source_call_id"] for r in asking["observation"]["results"]] == ["a", "b"]
    assert asking["observation"]["results"][0]["subagent_trajectory_ref"] == [{"trajectory_id": "r1-s1"}]
    assert answering["metrics"]["prompt_token_ids"] == [1, 2, 3, 4, 5, 6]
    assert answering["metrics"]["completion_token_ids"] == [7, 8]
    assert answering["metrics"]["logprobs"] == [-0.25, -0.25]
    assert steps[1]["message"][1]["source"]["media_type"] == "image/png"
    assert {part["trajectory_id"]: part["extra"]["kind"] for part in document["subagent_trajectories"]} == {
        "r1-title": "auxiliary",
        "r1-s1": "subagent",
    }
    assert document["agent"]["tool_definitions"][0]["function"]["name"] == "sh"
    assert document["final_metrics"]["total_completion_tokens"] == 6
    assert document["extra"]["reward"] == 0.5


async def test_a_checked_run_shows_its_laws_counts_and_independent_proofs(store):
    for n in range(3):
        await keep(store, f"r{n}")
    found = await check_run(store, "run1")
    assert found.ok, found.findings
    assert (found.rollouts, found.calls, found.failed_calls, found.rows) == (3, 21, 3, 12)
    assert found.proved_prompts == 18
    assert (found.calls_per_row, found.row_tokens, found.tree_tokens) == (1.25, 48, 48)
    assert found.edges == {"root": 9, "spawned_by": 3, "retry_of": 3, "compacted_from": 3}
    assert found.breaks == {"compaction": 6}
    assert found.refused == {"auxiliary branches are not asked for": 3}


async def test_a_changed_token_or_body_is_found(store):
    await keep(store, "r1")

    def damage(connection):
        of_first = (schema.calls.c.rollout_id == "r1") & (schema.calls.c.seq == 0)
        packed = connection.execute(select(schema.calls.c.nodes, schema.calls.c.bodies).where(of_first)).one()
        nodes, bodies = map(msgspec.msgpack.decode, packed)
        (answer,) = [node for node in nodes if node[3]]
        answer[6] = array("i", [9]).tobytes()  # its ids
        bodies[0][1] = b"x"
        changed = {"nodes": msgspec.msgpack.encode(nodes), "bodies": msgspec.msgpack.encode(bodies)}
        connection.execute(update(schema.calls).where(of_first).values(**changed))

    await store.database.write(damage)
    laws = {finding.law for finding in (await check_run(store, "run1")).findings}
    assert {"the graph has the engine's answer", "a body has its digest"} <= laws


async def test_samples_of_a_stored_rollout_are_those_of_the_live_one(store):
    live = await keep(store, "r1")
    assert samples(await store.get_rollout("r1")) == samples(live)


@pytest.mark.slow
async def test_an_export_takes_the_memory_of_a_few_rollouts_however_many_there_are(store, tmp_path):
    """Not of an Inspect log, which ends with a summary of every sample."""
    few, many = 500, 960  # more than are read at once
    await store.create_run({}, id="run2")
    for start in range(0, many, 40):
        await asyncio.gather(*(keep(store, f"m{n}", run_id="run2", attempt=n) for n in range(start, start + 40)))
    await asyncio.gather(*(keep(store, f"f{n}", attempt=n) for n in range(few)))
    for name in ("out.jsonl", "turns", "samples", "out.parquet", "lines.json"):
        format = name if "." not in name else None
        peaks = {}
        await export(store, "run1", tmp_path / name, format=format)  # what is imported and cached stays
        for run, count in (("run1", few), ("run2", many)):
            with trace_memory() as traced:
                done = await export(store, run, tmp_path / name, format=format)
                peaks[run] = traced()[1]
            assert done.rollouts == count
        # A rollout's calls take ten times as much
        assert peaks["run2"] - peaks["run1"] < 1000 * (many - few), (name, peaks)
