"""The verbs on a real store, in a real process."""

import json
import subprocess
import sys

import pytest

from rollyard.core.events import Event
from rollyard.core.rollout import Verdict
from rollyard.store import Store
from tests.store.builders import keep


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
    assert "stage.finished" in shown and "the log" in shown and "+ line" in shown and "reward 0.5" in shown
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
