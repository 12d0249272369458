"""Rollouts, runs and reports in notebooks and as data frames."""

import html.parser
import subprocess
import sys
import textwrap
from contextlib import AsyncExitStack

import pytest

import rollyard as ry
from rollyard.core.rollout import Failure, Rollout, Verdict
from rollyard.core.task import Task
from rollyard.runs.report.report import summarise
from rollyard.store.data_frames import RolloutList
from rollyard.tasks.scaffold import new_script, new_task
from tests.store.builders import full

METHOD = "_repr_html_"  # what a notebook asks a value for
HOSTILE = "</pre></td><script>alert(1)</script><img src=x onerror='alert(2)'> & \"quoted\" \ud800"
TAGS = {"div", "b", "table", "tr", "th", "td", "details", "summary", "pre", "progress"}
pytestmark = pytest.mark.anyio


class Page(html.parser.HTMLParser):
    """The tags, attributes and words that a browser would see."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.attributes, self.words = set(), set(), ""
        source.encode()  # can be sent
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_data(self, data):
        self.words += data + "\n"


def shown(value):
    page = Page(getattr(value, METHOD)())
    assert page.tags <= TAGS and page.attributes <= {"style", "class", "value", "max"}
    return page.words


def failed(**fields):
    failure = Failure(
        boundary="agent", cause="AgentError", message=HOSTILE, stage="agent", retry=False, grade=True, trainable=True,
        hint=HOSTILE,
    )  # fmt: skip
    return Rollout(
        id="ro_1", run_id="run_1", task=Task(id=f"t{HOSTILE}", instruction="fix"), agent=HOSTILE, status="agent_error",
        failure=failure, verdict=Verdict(reward=0.25, parts={HOSTILE: 0.5}), log_tail=HOSTILE, diff=HOSTILE,
        usage={"prompt_tokens": 7}, **fields,
    )  # fmt: skip


def test_a_rollout_in_a_notebook_shows_what_was_said_as_text():
    words = shown(failed(trajectory=full("ro_1")[0]))
    assert words.count("<script>alert(1)</script>") == 7
    assert "0.25" in words and "looking" in words and 'sh {"cmd": "ls"}' in words


def test_a_trajectory_in_a_notebook_shows_its_calls():
    words = shown(full("ro_1")[0])
    assert "7 calls" in words and "upstream said 500" in words and "A title" in words


def test_a_list_of_rollouts_and_a_report_are_tables_in_a_notebook():
    done = RolloutList([failed(), Rollout(id="ro_2", run_id="run_1", task=Task(id="t2", instruction=""), agent="pi")])
    assert "2 rollouts, 1 scored, mean reward 0.250" in shown(done)
    words = shown(summarise("run_1", done))
    assert "2 attempts, 1 scored" in words and "<script>" in words and "pi" in words
    assert "0 rollouts" in shown(RolloutList())


def test_long_texts_and_lists_are_cut_and_it_says_so():
    many = RolloutList(failed() for _ in range(300))
    assert "100 more" in shown(many)
    rollout = Rollout(id="r", task=Task(id="t", instruction=""), log_tail="x" * 10_000)
    assert "6000 more characters" in shown(rollout)


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_rollouts_and_reports_are_data_frames(package):
    pytest.importorskip(package, reason=f"the extra `{package}` is not installed")
    done = RolloutList(
        [failed(), Rollout(id="ro_2", run_id="run_1", task=Task(id="t2", instruction=""), agent="pi", wall_s=2)]
    )
    frame = getattr(done, f"to_{package}")()
    assert list(frame["id"]) == ["ro_1", "ro_2"] and list(frame["wall_s"]) == [0, 2]
    sent = HOSTILE.replace("\ud800", r"\ud800")
    assert list(frame["error"])[0] == sent and frame[f"part.{sent}"][0] == 0.5
    assert frame["reward"].mean() == 0.25  # what was never scored is no zero
    lines = getattr(summarise("run_1", done), f"to_{package}")()
    assert len(lines) == 2 and {"name", "reward", "reward_low", "pass@1", "cost"} <= set(lines.columns)
    empty = getattr(RolloutList(), f"to_{package}")()
    assert len(empty) == 0 and "reward" in empty.columns


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_missing_package_is_named_with_what_to_install(package):
    code = f"""
        import sys
        sys.modules[{package!r}] = None
        from rollyard.core.errors import MissingExtra
        from rollyard.store.data_frames import RolloutList
        try:
            RolloutList().to_{package}()
        except MissingExtra as error:
            print(error, error.hint)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert f"to_{package} needs the package '{package}'" in done.stdout and f"rollyard[{package}]" in done.stdout


async def test_a_run_shows_how_far_it_is_and_its_rollouts_come_back_as_a_table(tmp_path, backend):
    new_task(tmp_path / "hello")
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(ry.Store.open(tmp_path / "runs.db"))
        gate = await stack.enter_async_context(ry.Gate(ry.policy.scripted([]), log=store))
        run = ry.Run(ry.Taskset.load(tmp_path / "hello"), store=store, gate=gate, agent="nop", sandbox=backend)
        async with run:
            assert "0/1 attempts" in shown(run)
            async for _ in run:
                words = shown(run)
        assert run.id in words and "1/1 attempts, mean reward 0.000, completed 1" in words
        kept = await store.all_rollouts(run.id)
    assert list(kept.to_pandas()["task_id"]) == ["hello"]


CELL = """
import rollyard as ry
done = await ry.run("hello", agent="shell-agent", policy="scripted:script.yaml", attempts=2, progress="auto")
done
"""


@pytest.mark.slow
def test_a_run_in_a_real_notebook_draws_its_progress_and_its_table(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    import nbformat

    new_task(tmp_path / "hello")
    new_script(tmp_path / "script.yaml")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    drawn = [output["data"]["text/html"] for output in book.cells[0].outputs if "data" in output]
    assert len(drawn) == 2
    assert "2/2 attempts, mean reward 1.000" in drawn[0] and "2 rollouts, 2 scored" in drawn[1]
