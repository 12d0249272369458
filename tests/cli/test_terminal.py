"""The first hour of a stranger, on a terminal: every verb is started as a person starts it, and read as a person reads it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import CTRL_C, ROLLYARD, Terminal, environment, on_terminal

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "examples" / "tasks"
SCRIPTED = f"scripted:{ROOT / 'examples' / 'scripts' / 'bug-fix.yaml'}"
RUN = ("run", TASKS, "--filter", "bug-fix", "--agent", "shell-agent")

LOOKS = {
    "80 columns in colour": {"columns": 80},
    "80 columns without colour": {"columns": 80, "NO_COLOR": "1"},
    "160 columns in colour": {"columns": 160},
    "a terminal that cannot move its cursor": {"columns": 80, "TERM": "dumb"},
}
OFTEN = ("80 columns in colour", "a terminal that cannot move its cursor")
looks = pytest.mark.parametrize(
    "look",
    [pytest.param(look, id=name, marks=() if name in OFTEN else pytest.mark.slow) for name, look in LOOKS.items()],
)
widths = pytest.mark.parametrize("columns", [80, 160])


def assert_readable(shown, code=0):
    assert shown.code == code, shown.screen
    assert "Traceback" not in shown.written, shown.screen
    assert shown.wide_lines == [], shown.screen


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with a finished run of two attempts in a.db."""
    folder = tmp_path_factory.mktemp("kept")
    shown = on_terminal(*RUN, "--policy", SCRIPTED, "--attempts", "2", "--store", "a.db", cwd=folder)
    assert_readable(shown)
    return folder, re.search(r"run_\w+", shown.screen)[0]


@looks
@pytest.mark.ordinary("80 columns in colour")
def test_a_run_shows_each_attempt_and_a_report_that_fit(tmp_path, look):
    shown = on_terminal(*RUN, "--policy", SCRIPTED, "--attempts", "2", "--store", "a.db", cwd=tmp_path, **look)
    assert_readable(shown)
    assert shown.screen.count("bug-fix  #") == 2 and "completed  reward 1" in shown.screen
    assert "1 task, 2 attempts, 2 scored" in shown.screen
    assert "rollyard show run_" in shown.screen and "--store a.db" in shown.screen
    assert shown.coloured == ("NO_COLOR" not in look and "TERM" not in look)
    assert ("2 attempts to do" in shown.screen) == ("TERM" in look)  # plain lines
    assert "in flight" not in shown.screen  # what was drawn while it went on is gone


def test_a_run_draws_its_progress_while_it_goes_on(tmp_path):
    (tmp_path / "slow.yaml").write_text("- sleep: 600\n- text: done\n")
    argv = [ROLLYARD, *map(str, RUN), "--policy", "scripted:slow.yaml"]
    with Terminal(argv, cwd=tmp_path, env=environment(tmp_path)) as terminal:
        terminal.wait_for("in flight: wait 1")
        assert "0/1 attempts  starting" in terminal.screen


def test_the_hint_of_a_finished_run_works_as_it_is_written(kept):
    folder, run_id = kept
    shown = on_terminal("show", run_id, "--store", "a.db", cwd=folder)
    assert shown.code == 0 and run_id in shown.screen


@pytest.mark.slow
def test_an_evaluation_is_shown_like_a_run(tmp_path):
    (tmp_path / "e.toml").write_text(
        f'tasks = "{TASKS}"\nfilter = ["bug-fix"]\nagents = ["shell-agent", "oracle"]\n[policies]\nfirst = "{SCRIPTED}"\n'
    )
    shown = on_terminal("eval", "e.toml", "--store", "e.db", cwd=tmp_path)
    assert_readable(shown)
    assert "bug-fix  #0  oracle" in shown.screen and "rollyard show run_" in shown.screen
    assert "--store e.db" in shown.screen


@widths
@pytest.mark.parametrize("display", ["rich", "plain"])
@pytest.mark.ordinary("rich-80")
def test_watch_shows_a_run_that_is_over(kept, columns, display):
    folder, run_id = kept
    shown = on_terminal("watch", run_id, "--store", "a.db", "--display", display, cwd=folder, columns=columns)
    assert_readable(shown)
    assert shown.screen.count("bug-fix  #") == 2


def test_watch_opens_its_table_and_q_leaves_it(kept):
    folder, run_id = kept
    argv = [ROLLYARD, "watch", run_id, "--store", "a.db"]
    with Terminal(argv, cwd=folder, env=environment(folder), columns=100) as terminal:
        terminal.wait_for("bug-fix")
        terminal.press(b"q")
        assert terminal.end().code == 0


@widths
@pytest.mark.ordinary("80")
def test_list_fits(kept, columns):
    folder, run_id = kept
    for argv in (["list"], ["list", run_id]):
        shown = on_terminal(*argv, "--store", "a.db", cwd=folder, columns=columns)
        assert_readable(shown)
        assert (run_id[-8:] if len(argv) == 1 else "bug-fix") in shown.screen
        assert "run_" not in shown.screen and "ro_" not in shown.screen  # a person is shown short ids, which verbs take
        assert shown.screen.splitlines()[0].split()[-1] in ("attempts", "s")  # and no column is pushed out by them


def test_a_terminal_that_does_not_know_its_width_has_one(tmp_path):
    """Those of continuous integration and of containers say 0; a report of no width would be no report."""
    ours, theirs = os.openpty()
    code = "from rollyard.runs.run.command import terminal_width; print(terminal_width())"
    subprocess.run([sys.executable, "-c", code], stdout=theirs, cwd=tmp_path, check=True)
    assert os.read(ours, 100).split() == [b"80"]
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("argv", [["grep", "def"], ["show"], ["why"]], ids=lambda argv: argv[0])
def test_what_is_read_of_a_run_is_broken_between_words_and_has_no_spelling_of_python(kept, argv):
    folder, run_id = kept
    verb, *text = argv
    shown = on_terminal(verb, *text, run_id[-8:], "--store", "a.db", cwd=folder)
    assert_readable(shown)
    assert not any(word in shown.screen for word in ("['", "{'", "None", "True")), shown.screen


def test_the_demo_is_told_in_lines_that_are_broken_between_words(tmp_path):
    shown = on_terminal("demo", cwd=tmp_path)
    assert_readable(shown)
    assert "completed, reward 1" in shown.screen


def test_a_rollout_is_shown_by_its_short_id_without_raw_events(kept):
    folder, run_id = kept
    short = on_terminal("list", run_id, "--store", "a.db", cwd=folder).screen.splitlines()[1].split()[0]
    shown = on_terminal("show", short, "--store", "a.db", cwd=folder)
    assert shown.code == 0 and "status completed  reward 1" in shown.screen and "stage.started" not in shown.screen
    events = on_terminal("show", short, "--part", "events", "--store", "a.db", cwd=folder)
    assert re.search(r"^\d\d:\d\d:\d\d\.\d{3}  stage.started  stage=provision", events.screen, re.MULTILINE)


@pytest.mark.parametrize("group", ["init", "check", "datasets", "image", "store", "plane", "serve"])
def test_a_group_of_verbs_says_of_each_a_whole_sentence(tmp_path, group):
    shown = on_terminal(group, "--help", cwd=tmp_path)
    assert_readable(shown)
    assert "..." not in shown.screen.partition("Commands:")[2] and "completion" not in shown.screen


def test_doctor_goes_on_below_itself_where_a_line_is_too_long(tmp_path):
    shown = on_terminal("doctor", cwd=tmp_path)
    assert "Traceback" not in shown.written and "…" not in shown.screen
    assert all(len(line.split()) == 1 for line in shown.wide_lines), shown.screen  # a path stays whole


def test_the_forms_of_datasets_are_told_whole(tmp_path):
    shown = on_terminal("datasets", "list", cwd=tmp_path)
    assert_readable(shown)
    assert "…" not in shown.screen and "polyglot benchmark, six languages. Get" in " ".join(shown.screen.split())


@pytest.mark.parametrize("agent", ["oracle", "nop"])
@pytest.mark.ordinary("nop")
def test_an_agent_that_calls_no_model_needs_no_policy(tmp_path, agent):
    shown = on_terminal("run", TASKS, "--filter", "bug-fix", "--agent", agent, cwd=tmp_path)
    assert_readable(shown)
    assert f"reward {1 if agent == 'oracle' else 0}" in shown.screen


# what is wrong, the words of the command, what a person reads
REFUSED = {
    "no policy": ([*RUN], "no policy answers the model calls of shell-agent"),
    "no such folder": (
        ["run", "nosuchfolder", "--policy", SCRIPTED],
        "no task folder, file or taskset named 'nosuchfolder'",
    ),
    "no such policy": ([*RUN, "--policy", "skripted:x"], "did you mean 'scripted'?"),
    "no such script": ([*RUN, "--policy", "scripted:nowhere.yaml"], "nowhere.yaml"),
    "a script that is spelt otherwise": (
        [*RUN, "--policy", f"scripted:{ROOT / 'examples' / 'scripts' / 'bug-fx.yaml'}"],
        "bug-fix.yaml?",
    ),
    "no such column": (["list", "last", "--sort", "rewrd"], "did you mean 'reward'?"),
    "no such status": (["list", "--status", "complete"], "did you mean 'completed'?"),
    "no such option": ([*RUN, "--policy", f"{SCRIPTED}#temperature=1"], "takes no option 'temperature'"),
    "no such renderer": ([*RUN, "--policy", f"{SCRIPTED}#renderer=nonsuch"], "nonsuch"),
    "an option of another type": ([*RUN, "--policy", "upstream:http://127.0.0.1:9/v1#top_logprobs=x"], "top_logprobs"),
    "a key in the text": ([*RUN, "--policy", "upstream:http://127.0.0.1:9/v1#key=sesame"], "key_env"),
    "a queue": ([*RUN, "--policy", "queue"], "rollyard serve gate --policy queue"),
    "a queue with options": ([*RUN, "--policy", "queue#renderer=bytes"], "rollyard serve gate --policy queue"),
    "a queue for one rollout": (
        ["run", "--instruction", "x", "--agent", "shell-agent", "--policy", "queue"],
        "rollyard serve gate",
    ),
    "two that answer": ([*RUN, "--policy", SCRIPTED, "--base-url", "http://127.0.0.1:9/v1"], "--base-url"),
    "a port that cannot be": (["view", "a.db", "--port", "99999"], "99999"),
    "a gate's port that cannot be": (["serve", "gate", "--mode", "interception_gate", "--port", "99999"], "99999"),
    "a plane's port that cannot be": (["serve", "plane", "--port", "65536"], "65536"),
}


@pytest.mark.parametrize(("argv", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_is_refused_in_words_and_exit_code_2(tmp_path, argv, words):
    shown = on_terminal(*argv, cwd=tmp_path)
    assert shown.code == 2, shown.screen
    assert "Traceback" not in shown.written
    assert words in " ".join(shown.screen.split()), shown.screen
    assert "sesame" not in shown.screen


def test_a_refusal_is_broken_between_words(tmp_path):
    shown = on_terminal(*RUN, "--policy", "queue", cwd=tmp_path)
    assert_readable(shown, 2)


@pytest.mark.slow
def test_replay_answers_from_the_store_of_the_run_or_the_one_that_is_named(kept, tmp_path):
    folder, run_id = kept
    listed = on_terminal("list", run_id, "--store", "a.db", cwd=folder, columns=160)
    rollout_id = listed.screen.splitlines()[1].split()[0]
    own = on_terminal(*RUN, "--policy", f"replay:{rollout_id}", "--store", "a.db", cwd=folder)
    assert_readable(own)
    other = on_terminal(*RUN, "--policy", f"replay:{rollout_id}#store={folder / 'a.db'}", cwd=tmp_path)
    assert_readable(other)
    for shown in (own, other):
        assert "completed  reward 1  4 calls" in shown.screen
    nowhere = on_terminal(*RUN, "--policy", f"replay:{rollout_id}#store=nowhere.db", cwd=tmp_path)
    assert nowhere.code == 3 and "no store at nowhere.db" in nowhere.screen
    assert not (tmp_path / "nowhere.db").exists()
    missing = on_terminal(*RUN, "--policy", "replay:ro_nonsuch", "--store", "a.db", cwd=folder)
    assert missing.code == 3 and "ro_nonsuch" in missing.screen and "Traceback" not in missing.written


@pytest.mark.parametrize("verb", [["list", "--store"], ["show", "run_x", "--store"], ["view"]], ids=" ".join)
@pytest.mark.ordinary("view")
def test_a_verb_that_reads_never_makes_a_store(tmp_path, verb):
    shown = on_terminal(*verb, "missing.db", cwd=tmp_path)
    assert shown.code == 3 and "no store at missing.db" in shown.screen
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_script_speaks_in_the_tokens_of_a_renderer_by_name(tmp_path):
    assert_readable(on_terminal(*RUN, "--policy", f"{SCRIPTED}#renderer=bytes", cwd=tmp_path))


@pytest.mark.parametrize("verb", [["view", "a.db"], ["serve", "gate", "--mode", "interception_gate"]], ids=" ".join)
@pytest.mark.ordinary("view a.db")
def test_a_port_in_use_is_told_in_one_line(kept, verb):
    folder, _ = kept
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shown = on_terminal(*verb, "--port", port, cwd=folder, columns=160)
    assert_readable(shown, 3)
    assert shown.screen.startswith(f"rollyard: cannot listen on 127.0.0.1:{port}: another program listens there")


SLOW = [*map(str, RUN), "--policy", "scripted:slow.yaml", "--attempts", "3", "--store", "c.db"]


@pytest.fixture
def slow_run(tmp_path):
    """A terminal with three rollouts whose model does not answer."""
    (tmp_path / "slow.yaml").write_text("- sleep: 600\n- text: done\n")
    with Terminal([ROLLYARD, *SLOW], cwd=tmp_path, env=environment(tmp_path)) as terminal:
        terminal.wait_for("in flight: wait 3")
        yield terminal


@pytest.mark.parametrize(
    ("end", "code"),
    [(lambda terminal: terminal.press(CTRL_C), 130), (lambda terminal: terminal.signal(signal.SIGTERM), 143)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_run_that_is_stopped_says_what_is_done_and_owed_and_the_command_that_goes_on(slow_run, tmp_path, end, code):
    end(slow_run)
    shown = slow_run.end()
    assert_readable(shown, code)
    assert "stopped: 0 of 3 attempts are done, 3 are owed." in shown.screen
    command = re.search(r"^  rollyard (run --resume run_\w+ --store c.db)$", shown.screen, re.MULTILINE)[1]
    (tmp_path / "slow.yaml").write_text((ROOT / "examples/scripts/bug-fix.yaml").read_text())
    resumed = on_terminal(*command.split(), cwd=tmp_path)
    assert_readable(resumed)
    assert resumed.screen.count("completed  reward 1") == 3


def test_a_run_whose_terminal_is_closed_gives_its_attempts_back(slow_run, tmp_path):
    assert slow_run.hang_up() == 129
    listed = subprocess.run(
        [ROLLYARD, "list", "--store", "c.db", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    (run,) = json.loads(listed.stdout)
    assert run["attempts"] == {"owed": 3}


def test_ctrl_c_during_one_rollout_says_that_it_was_not_finished(tmp_path):
    argv = [ROLLYARD, "run", "--instruction", "x", "--agent", "nop", "--setup", "sleep 600"]
    with Terminal(argv, cwd=tmp_path, env=environment(tmp_path)) as terminal:
        terminal.wait_for("in flight: prepare 1")
        terminal.press(CTRL_C)
        shown = terminal.end()
    assert_readable(shown, 130)
    assert "stopped before any attempt was done" in shown.screen
