"""The verbs on a real store, in a real process."""

import json
import subprocess
import sys
import time

import msgspec
import pytest
from sqlalchemy import text

from rollyard.core.events import Event
from rollyard.core.lease import Attempt
from rollyard.core.protocols import SessionRecord
from rollyard.core.rollout import Verdict
from rollyard.store import Store
from tests.store.builders import full, keep


def rollyard(*args, code=0):
    done = subprocess.run(
        [sys.executable, "-c", "from rollyard.cli.main import main; main()", *args], capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
async def kept(tmp_path):
    async with Store.open(tmp_path / "runs.db") as store:
        await store.create_run({"parallel": 2}, id="run_a")
        for n in range(3):
            await keep(store, f"ro_{n}", run_id="run_a", attempt=n, log_tail="the log", diff="+ line")
        await store.event(Event(at=1.0, name="stage.finished", rollout_id="ro_1", fields={"stage": "launch"}))
    return str(tmp_path / "runs.db")


@pytest.mark.anyio
async def test_list_show_export_and_check_read_one_store(kept, tmp_path):
    runs = json.loads(rollyard("list", "--store", kept, "--json"))
    assert [(r["id"], r["rollouts"], r["mean_reward"]) for r in runs] == [("run_a", 3, 0.5)]
    assert "run_a" in rollyard("list", "--store", kept)
    page = json.loads(rollyard("list", "run_", "--store", kept, "--limit", "2", "--json"))
    assert (page["total"], page["next"], len(page["rows"])) == (3, 2, 2)
    shown = rollyard("show", "ro_1", "--store", kept)
    assert "the log" in shown and "+ line" in shown and "reward 0.5" in shown
    assert "stage.finished" in rollyard("show", "ro_1", "--part", "events", "--store", kept)
    document = json.loads(rollyard("show", "ro_1", "--store", kept, "--json"))
    assert document["rollout"]["task"]["id"] == "t1" and len(document["calls"]) == 7
    assert len(json.loads(rollyard("show", "ro_1", "--part", "calls", "--store", kept, "--json"))) == 7
    assert "[tool] file" in rollyard("show", "ro_1", "--part", "messages", "--store", kept)
    assert "ro_2" in rollyard("show", "run_a", "--store", kept)
    out = tmp_path / "x.jsonl"
    done = json.loads(rollyard("export", "run_a", "--out", str(out), "--store", kept, "--json"))
    assert done["rows"] == 3 and len(out.read_text().splitlines()) == 3
    rollyard("export", "run_a", "--format", "atif", "--out", str(tmp_path / "y.jsonl"), "--store", kept)
    assert "every law holds" in rollyard("check", "run", "run_a", "--store", kept)
    assert json.loads(rollyard("check", "run", "run_a", "--store", kept, "--json"))["ok"] is True


def test_looking_at_a_store_that_is_not_there_does_not_make_one(tmp_path):
    missing = tmp_path / "no.db"
    assert "no store" in rollyard("list", "--store", str(missing), code=3)
    assert not missing.exists()


@pytest.mark.adversarial
@pytest.mark.anyio
async def test_hostile_output_cannot_steer_the_terminal(tmp_path):
    hostile = "\x1b]0;owned\x07\x1b[2J\x9b2J\r"
    async with Store.open(tmp_path / "runs.db") as store:
        verdict = Verdict(reward=1.0, log=hostile)
        await keep(store, "ro_1", log_tail=hostile, diff=hostile, verdict=verdict, stop_reason=hostile)
    for part in ("all", "log", "diff", "verdict", "messages", "calls"):
        shown = rollyard("show", "ro_1", "--part", part, "--store", str(tmp_path / "runs.db"))
        assert not set(shown) & set("\x1b\x07\x9b\r")


@pytest.mark.anyio
async def test_prune_removes_finished_runs_that_are_old_with_all_that_is_theirs(tmp_path):
    where, now = str(tmp_path / "runs.db"), time.time()
    ages = {"run_old": 40, "run_owing": 50, "run_young": 1, "run_newest": 0.5}
    for name, days in ages.items():
        async with Store.open(where, clock=lambda days=days: now - days * 86400) as store:
            await store.create_run({}, id=name)
            await keep(store, f"ro_{name}", run_id=name, diff=f"+ {name}")
            await store.event(Event(at=1.0, name="x", rollout_id=f"ro_{name}", run_id=name))
    async with Store.open(where) as store:
        attempt = Attempt(id="at_1", run_id="run_owing", task_id="t", task_digest="d", agent="pi", number=1)
        await store.add_attempts("run_owing", [attempt])
        # a worker that died in an attempt of the old run: calls and an open session, and no rollout
        lost = msgspec.structs.replace(attempt, id="at_2", run_id="run_old", number=2)
        await store.add_attempts("run_old", [lost])
        lease = await store.claim("run_old", owner="w", ttl_s=60)
        dead = SessionRecord(
            rollout_id="ro_dead", key_hash=b"k", created_at=1.0, attempt_id=lease.attempt.id, fence=lease.fence
        )
        await store.save_session(dead)
        added = full("ro_dead")[1][0]
        await store.commit(added.record, added.nodes, added.blobs)
        await store.put_blob(b"a file that nothing names any more")
    args = ("store", "prune", "--store", where, "--older-than", "30", "--json")
    assert json.loads(rollyard(*args, "--dry-run"))["runs"] == []  # both of the old ones owe attempts
    asked = json.loads(rollyard(*args, "--dry-run", "--unfinished"))
    assert asked["runs"] == ["run_owing", "run_old"] and asked["rollouts"] == 0
    assert len(json.loads(rollyard("list", "--store", where, "--json"))) == 4
    done = json.loads(rollyard(*args, "--unfinished"))
    assert (done["runs"], done["rollouts"], done["left"]) == (["run_owing", "run_old"], 2, None)
    assert done["bodies"] == 1  # the others' are those of the young runs too
    names = {run["id"] for run in json.loads(rollyard("list", "--store", where, "--json"))}
    assert names == {"run_young", "run_newest"}
    assert "every law holds" in rollyard("check", "run", "run_young", "--store", where)
    async with Store.open(where) as store:
        assert await store.session("ro_dead") is None
        left = await store.database.read(_count_rollouts)
    assert all(count <= {"ro_run_young", "ro_run_newest"} for count in left.values()), left
    kept = json.loads(rollyard("store", "prune", "--store", where, "--older-than", "0", "--keep", "1", "--json"))
    assert kept["runs"] == ["run_young"]


def _count_rollouts(connection):
    tables = ("calls", "verdicts", "artifacts", "sessions", "texts", "events")
    return {t: set(connection.execute(text(f"SELECT rollout_id FROM {t}")).scalars()) for t in tables}  # noqa: S608
