"""Finding runs and rollouts again: by name, by `last`, by what they said, and why they ended as they did."""

import contextlib
import json
import sqlite3
import subprocess

import anyio
import pytest

from rollyard.core.lease import Attempt
from rollyard.store import Store
from tests.cli.terminal import ROLLYARD, environment

pytestmark = pytest.mark.xdist_group("finding")  # one store for all of them


def rollyard(*words, cwd, code=0, **env):
    done = subprocess.run(
        [ROLLYARD, *map(str, words)],
        cwd=cwd, env={**environment(cwd), **env}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """`runs.db` with two runs: `first` is solved, `second` is not."""
    folder = tmp_path_factory.mktemp("kept")
    rollyard("init", "task", "hello", cwd=folder)
    rollyard("init", "script", "right", cwd=folder)
    (folder / "wrong.yaml").write_text("- shell: echo unheard of > other.txt\n- text: Surely done.\n")
    for name, script in (("first", "right"), ("second", "wrong")):
        words = ("run", "hello", "--agent", "shell-agent", "--policy", f"scripted:{script}.yaml", "--name", name)
        rollyard(*words, cwd=folder)
    return folder


def test_a_run_is_found_by_its_name_and_the_newest_by_last(kept):
    rewards = {
        name: json.loads(rollyard("list", name, "--json", cwd=kept).stdout)["rows"][0]["reward"]
        for name in ("first", "second", "last")
    }
    assert rewards == {"first": 1.0, "second": 0.0, "last": 0.0}
    listed = rollyard("list", cwd=kept).stdout
    assert "first" in listed and "shell-agent / scripted:right.yaml" in listed


@pytest.mark.slow
def test_of_two_runs_with_one_name_the_newer_is_meant(kept, tmp_path):
    words = ("--agent", "nop", "--name", "again", "--store", tmp_path / "s.db")
    ids = [json.loads(rollyard("run", "hello", *words, "--json", cwd=kept).stdout)["run_id"] for _ in range(2)]
    shown = json.loads(rollyard("show", "again", "--store", tmp_path / "s.db", "--json", cwd=kept).stdout)
    assert shown["run"]["id"] == ids[1]


def test_a_name_that_means_something_else_is_refused(kept):
    done = rollyard("run", "hello", "--agent", "nop", "--name", "last", cwd=kept, code=2)
    assert "'last' is no name for a run" in done.stderr


def test_last_of_a_store_without_runs_says_so(kept, tmp_path):
    rollyard("run", "--instruction", "x", "--agent", "nop", "--store", tmp_path / "s.db", cwd=kept)
    done = rollyard("show", "last", "--store", tmp_path / "s.db", cwd=kept, code=3)
    assert "there is no run yet" in done.stderr


def test_the_variable_names_the_store_for_every_verb_and_hints_leave_it_out(kept, tmp_path):
    store = {"ROLLYARD_STORE": str(kept / "runs.db")}
    assert "second" in rollyard("list", cwd=tmp_path, **store).stdout
    done = rollyard("run", kept / "hello", "--agent", "nop", "--name", "third", cwd=tmp_path, **store)
    assert "--store" not in done.stdout and not (tmp_path / "runs.db").exists()


def test_resume_takes_a_name(kept):
    assert "1 task, 1 attempt, 1 scored" in rollyard("run", "--resume", "first", cwd=kept).stdout


def test_grep_finds_each_place_once_and_tells_by_its_exit_code_when_there_is_none(kept):
    lines = rollyard("grep", "unheard of", "second", cwd=kept).stdout.splitlines()
    assert sum("tool call of call 0: shell" in line for line in lines) == 1
    assert rollyard("grep", "unheard of", "first", cwd=kept, code=1).stdout == ""
    words = ("grep", "SURELY", "second", "-i", "--in", "message", "--json")
    found = [json.loads(line) for line in rollyard(*words, cwd=kept).stdout.splitlines()]
    assert [(one["place"], one["line"], one["call"]) for one in found] == [("message", "Surely done.", 1)]


@pytest.mark.slow
def test_grep_takes_expressions_and_gives_names_alone(kept):
    ids = rollyard("grep", "-e", "unh[a-z]+d", "-l", cwd=kept).stdout.split()
    (row,) = json.loads(rollyard("list", "second", "--json", cwd=kept).stdout)["rows"]
    assert ids == [row["id"]]
    assert "is no regular expression" in rollyard("grep", "-e", "(", cwd=kept, code=2).stderr
    assert "did you mean 'message'?" in rollyard("grep", "x", "--in", "mesage", cwd=kept, code=2).stderr


def test_grep_stops_at_its_limit_and_says_so(kept):
    done = rollyard("grep", "e", "second", "--limit", "2", cwd=kept)
    assert len(done.stdout.splitlines()) == 2 and "the first 2 are shown" in done.stderr


def test_rollouts_of_every_run_are_listed_by_status_agent_policy_and_task(kept):
    rows = json.loads(rollyard("list", "--status", "completed", "--agent", "shell-agent", "--json", cwd=kept).stdout)[
        "rows"
    ]
    assert len({row["run_id"] for row in rows}) > 1
    shown = rollyard("list", "--task", rows[0]["task_id"], cwd=kept).stdout
    assert shown.split()[:2] == ["rollout", "run"] and rows[0]["run_id"][-8:] in shown
    for option in ("--status", "--agent", "--policy", "--task"):
        word = "budget" if option == "--status" else "nothing"
        assert json.loads(rollyard("list", option, word, "--json", cwd=kept).stdout)["rows"] == []


def test_the_end_of_an_id_names_a_run_or_a_rollout(kept):
    (row,) = json.loads(rollyard("list", "second", "--json", cwd=kept).stdout)["rows"]
    assert json.loads(rollyard("show", row["id"][-8:], "--json", cwd=kept).stdout)["rollout"]["id"] == row["id"]
    assert json.loads(rollyard("show", row["run_id"][-8:], "--json", cwd=kept).stdout)["run"]["id"] == row["run_id"]
    assert "no run or rollout" in rollyard("show", row["id"][-5:], cwd=kept, code=3).stderr


@pytest.mark.slow
def test_notes_labels_and_scores_are_kept_printed_and_exported(kept):
    (row,) = json.loads(rollyard("list", "second", "--json", cwd=kept).stdout)["rows"]
    words = ("edits the test", "--label", "reward hack", "--score", "style=0.5", "--author", "ann")
    said = rollyard("note", row["id"][-8:], *words, cwd=kept).stdout
    assert said == "note   edits the test  (ann)\nlabel  reward hack  (ann)\nscore  style = 0.5  (ann)\n"
    assert len(json.loads(rollyard("note", row["id"], "--json", cwd=kept).stdout)) == 3
    rollyard("export", "second", "--out", "second.jsonl", cwd=kept)
    (line,) = [json.loads(line) for line in (kept / "second.jsonl").read_text().splitlines()]
    assert [(n["kind"], n["name"], n["text"], n["score"]) for n in line["notes"]] == [
        ("note", "", "edits the test", None), ("label", "reward hack", "", None), ("score", "style", "", 0.5),
    ]  # fmt: skip
    assert "is no score" in rollyard("note", row["id"], "--score", "style", cwd=kept, code=2).stderr
    assert "is a run" in rollyard("note", "second", "x", cwd=kept, code=2).stderr


def test_why_names_the_cause_the_evidence_and_what_to_do(kept):
    said = rollyard("why", "second", cwd=kept).stdout
    assert "hello  shell-agent  completed, reward 0" in said
    assert "cause   the verifier gave 0" in said
    assert "--- the model's last words\nSurely done." in said
    assert "remedy  `rollyard show ro_" in said
    assert rollyard("why", "first", cwd=kept).stdout == "every rollout of the run has the reward 1\n"


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (("owed", "owed"), "no rollout of the run has ended; still owed: 2\n"),
        (("done", "owed"), "1 of 2 attempts have ended, each with the reward 1; still owed: 1\n"),
    ],
)
def test_why_of_a_run_that_owes_attempts_says_how_many(kept, tmp_path, states, said):
    store = tmp_path / "owed.db"
    anyio.run(begin_run, store, len(states))
    with contextlib.closing(sqlite3.connect(store)) as written, written:
        for number, state in enumerate(states):
            written.execute("UPDATE attempts SET state = ? WHERE id = ?", (state, f"att_{number}"))
    assert rollyard("why", "last", "--store", store, cwd=kept).stdout == said


async def begin_run(path, count):
    async with Store.open(path) as store:
        run = await store.create_run({})
        each = {"run_id": run, "task_id": "t", "task_digest": "", "agent": "nop", "policy": ""}
        await store.add_attempts(run, [Attempt(id=f"att_{n}", number=n, **each) for n in range(count)])


def test_why_shows_the_command_that_failed(kept):
    words = (
        "--instruction",
        "x",
        "--agent",
        "nop",
        "--setup",
        "echo broken pipe >&2; exit 3",
        "--store",
        "w.db",
        "--json",
    )
    rollout = json.loads(rollyard("run", *words, cwd=kept, code=1).stdout)["id"]
    (found,) = json.loads(rollyard("why", rollout, "--store", "w.db", "--json", cwd=kept).stdout)
    assert found["cause"].startswith("CommandFailed in prepare, at the sandbox")
    assert {"title": "setup: echo broken pipe >&2; exit 3 (exit code 3)", "text": "broken pipe"} in found["evidence"]


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (("lst",), "UnknownName", "did you mean 'list'?"),
        (("list", "--stauts", "x"), "ConfigError", "No such option: --stauts"),
        (("show", "nothing"), "StoreError", "no run or rollout is named nothing"),
    ],
)
def test_with_json_an_error_is_an_object_too(kept, words, kind, said):
    done = rollyard(*words, "--json", cwd=kept, code=3 if kind == "StoreError" else 2)
    found = json.loads(done.stdout)
    assert found["error"] == kind and said in found["message"] and done.stderr == ""


def test_a_verb_that_is_almost_right_is_guessed(kept):
    assert "did you mean 'list'?" in rollyard("lst", cwd=kept, code=2).stderr


def test_the_shell_completes_verbs_and_options(kept):
    asked = {"_ROLLYARD_COMPLETE": "complete_bash", "COMP_WORDS": "rollyard gr", "COMP_CWORD": "1"}
    assert rollyard(cwd=kept, **asked).stdout.split() == ["grep"]


def test_what_init_makes_runs_as_it_is(tmp_path):
    made = rollyard("init", "eval", "mine", cwd=tmp_path)
    assert "next: rollyard eval mine/eval.toml --out report" in made.stdout
    report = json.loads(rollyard("eval", "mine/eval.toml", "--json", cwd=tmp_path).stdout)
    assert {line["name"]: line["reward"]["value"] for line in report["lines"]} == {
        "nop": 0.0,
        "oracle": 1.0,
        "shell-agent": 1.0,
    }
    rollyard("init", "verifier", "mine/hello/judge", cwd=tmp_path)
    toml = tmp_path / "mine" / "hello" / "task.toml"
    words = 'verifier = "python"\noptions = { ref = "judge.py:judge" }\n'
    toml.write_text(toml.read_text().replace("[metadata.rollyard]\n", "[metadata.rollyard]\n" + words))
    rows = rollyard("run", "mine/hello", "--agent", "oracle,nop", "--json", "--trust-tasks", cwd=tmp_path)
    assert {line["name"]: line["reward"]["value"] for line in json.loads(rows.stdout)["lines"]} == {
        "nop": 0.0,
        "oracle": 1.0,
    }
