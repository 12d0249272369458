"""`--log-to`: a dashboard gets each rollout as a step, and one that fails costs no rollout."""

import io

import pytest

from rollyard.core.errors import ConfigError, UnknownName
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.runs.display.loggers import LOGGERS, with_loggers
from rollyard.runs.display.progress import display
from tests.plane.venvs import told, venv_or_skip

pytestmark = pytest.mark.anyio
FIELDS = {"task": Task(id="t", instruction="x"), "calls": 2, "usage": {"completion_tokens": 9}, "wall_s": 1.5}
DONE = [
    Rollout(id="r1", verdict=Verdict(reward=1.0), **FIELDS),
    Rollout(id="r2", verdict=None, **FIELDS),
    Rollout(id="r3", verdict=Verdict(reward=0.0), **FIELDS),
]


class Kept:
    def __init__(self, where, run_id):
        self.where, self.run_id, self.lines, self.closed = where, run_id, [], False

    def log(self, numbers, step):
        if self.where == "away" and step == 2:
            raise ConnectionError("no dashboard")
        self.lines.append((step, numbers))

    def close(self):
        self.closed = True


@pytest.fixture
def made(monkeypatch):
    """Loggers that keep what they are told, beside the real ones."""
    found = []
    monkeypatch.setitem(LOGGERS, "kept", lambda *words: found.append(Kept(*words)) or found[-1])
    return found


def run(*texts):
    with with_loggers(display("plain", io.StringIO()), texts) as shown:
        shown.begin("run_1", 3, 0)
        for rollout in DONE:
            shown.rollout(rollout)


def test_each_rollout_is_a_step_and_no_reward_is_no_zero(made):
    run("kept:there")
    (kept,) = made
    assert (kept.where, kept.run_id, kept.closed) == ("there", "run_1", True)
    assert [step for step, _ in kept.lines] == [1, 2, 3]
    first, second, third = (numbers for _, numbers in kept.lines)
    assert first["rollout/reward"] == 1.0 and "rollout/reward" not in second
    assert (second["run/mean_reward"], third["run/mean_reward"], third["run/scored"]) == (1.0, 0.5, 2)
    assert third["rollout/completion_tokens"] == 9


def test_a_dashboard_that_fails_is_told_once_and_left_out(made, capsys):
    run("kept:away")
    assert [step for step, _ in made[0].lines] == [1] and not made[0].closed
    assert capsys.readouterr().err.count("--log-to kept stopped: ConnectionError: no dashboard") == 1


def test_one_that_is_not_known_or_cannot_be_opened_ends_the_command(monkeypatch):
    with pytest.raises(UnknownName, match="did you mean 'wandb'"):
        with_loggers(display("none"), ["wandbb"])

    def refuse(where, run_id):
        raise ConnectionError("no such server")

    monkeypatch.setitem(LOGGERS, "kept", refuse)
    with pytest.raises(ConfigError, match="--log-to kept does not work: ConnectionError: no such server"):
        run("kept")


REAL = """
import contextlib, io, json, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.runs.test_loggers import run
kind, folder = sys.argv[1], Path.cwd()
said = io.StringIO()
with contextlib.redirect_stderr(said):
    run({"wandb": "wandb:proj", "mlflow": f"mlflow:sqlite:///{folder}/ml.db", "tensorboard": f"tensorboard:{folder}/tb"}[kind])
assert "stopped" not in said.getvalue(), said.getvalue()
if kind == "tensorboard":
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray
    read = EventAccumulator(f"{folder}/tb/run_1")
    read.Reload()
    found = [[e.step, float(make_ndarray(e.tensor_proto))] for e in read.Tensors("run/mean_reward")]
elif kind == "mlflow":
    from mlflow.tracking import MlflowClient
    client = MlflowClient(f"sqlite:///{folder}/ml.db")
    (one,) = client.search_runs([client.get_experiment_by_name("rollyard").experiment_id])
    assert one.info.status == "FINISHED" and one.info.run_name == "run_1"
    found = [[m.step, m.value] for m in client.get_metric_history(one.info.run_id, "run/mean_reward")]
else:
    found = None  # its file is whole when the program has ended
print(json.dumps(found))
"""
PACKAGES = {"wandb": "wandb==0.31.0", "mlflow": "mlflow==3.17.2", "tensorboard": "tensorboard==2.21.0"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKAGES)
async def test_the_real_packages_take_it_offline(kind, tmp_path, monkeypatch):
    from tests.test_docs import ROOT

    monkeypatch.chdir(tmp_path)
    python = venv_or_skip(f"logs-{kind}", [PACKAGES[kind], str(ROOT), "pytest", "anyio"])
    program = tmp_path / "real.py"
    program.write_text(REAL)
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    found = await told(python, program, kind, str(ROOT), env=env, timeout=300)
    if kind == "wandb":
        (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        raw = file.read_bytes()  # three steps, two of them with a reward
        assert raw.count(b"run/mean_reward") > raw.count(b"rollout/reward") >= 2
    else:
        assert found == [[1, 1.0], [2, 1.0], [3, 0.5]]
