"""The trainers themselves take what the adapters make, each package in an environment of its own."""

import json
import shutil
import subprocess
import sys

import pytest

from rollyard.trajectory.samples import samples
from tests.train.foreign_python import HERE, ROOT, foreign
from tests.train.rollouts import branchy, linear

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("part", ["two_steps", "worker"])
def test_trl_trains_on_our_rows_and_its_queue_takes_our_workers_samples(part):
    run = foreign("trl-1.16.0", "trl==1.16.0", "torch==2.13.0", "transformers==5.17.0", "requests")
    assert run("trl_side.py", part) == "ok"


OPENENV_PARTS = ("golden", "session", "failing", "unjudged", "closing", "intercepted", "harness")


@pytest.mark.agent
@pytest.mark.parametrize("part", OPENENV_PARTS)
def test_openenv_validates_our_traces_and_drives_our_sessions(part):
    """T7, X6: a session judged, one whose creation fails, one without a verifier and started by hand, one closed in the middle of
    a command, one whose calls the trainer answers, and their own rollout function over our harness."""
    assert foreign("openenv-0.10.0", "openenv==0.10.0")("openenv_side.py", HERE / "golden", part) == "ok"


def install_together(folder, package):
    """The interpreter of one `pip install` of both, with nothing said about versions that they share."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=120)
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", ROOT, package]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    checked = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stdout
    return python


def run_together(python, folder, script, *words):
    command = [python, HERE / "foreign" / script, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=480)
    said = done.stdout + done.stderr
    assert (done.returncode, done.stdout.strip().splitlines()[-1:]) == (0, ["ok"]), said[-3000:]


@pytest.mark.agent
def test_rollyard_and_openenv_install_together_and_run_pi(tmp_path):
    python = install_together(tmp_path, "openenv==0.10.0")
    for part in ("session", "intercepted", "harness"):
        run_together(python, tmp_path, "openenv_side.py", HERE / "golden", part, "pi")


@pytest.mark.agent
def test_verifiers_runs_our_rollouts_as_its_environment():
    """X4: a verdict and weighted functions, hooks per rollout, and no zero where nobody judged"""
    assert foreign("verifiers-0.4.0", "verifiers==0.4.0")("verifiers_env.py") == "ok"


def harbor_tasks(folder):
    """Words for `verifiers_agents.py`: a folder with one Harbor task, the script that mends it, and a folder to write to."""
    shutil.copytree(ROOT / "examples" / "tasks" / "bug-fix", folder / "tasks" / "bug-fix")
    return folder / "tasks", ROOT / "examples" / "scripts" / "bug-fix.yaml", folder / "out"


@pytest.mark.agent
@pytest.mark.parametrize("agent", ["opencode", "pi"])
def test_verifiers_runs_real_agents_on_harbor_tasks(agent, tmp_path):
    run = foreign("verifiers-0.4.0", "verifiers==0.4.0")
    assert run("verifiers_agents.py", "environment", agent, *harbor_tasks(tmp_path)) == "ok"


@pytest.mark.agent
def test_rollyard_and_verifiers_install_together_and_its_command_runs_opencode(tmp_path):
    python = install_together(tmp_path, "verifiers==0.4.0")
    run_together(python, tmp_path, "verifiers_agents.py", "command", "opencode", *harbor_tasks(tmp_path))


def test_verifiers_sees_the_branches_we_see():
    made = json.loads(foreign("verifiers-0.4.0", "verifiers==0.4.0")("verifiers_side.py", HERE / "golden"))
    for rollout, trace in zip((linear(), branchy()), made, strict=True):
        rows = samples(rollout).rows
        assert [branch["ids"] for branch in trace["branches"]] == [list(row.ids) for row in rows]
        assert all(branch["trainable"] for branch in trace["branches"])
        assert trace["reward"] == rollout.reward
        for row, branch in zip(rows, trace["branches"], strict=True):
            mine = [p for p, bit in zip(row.logprobs, row.mask, strict=True) if bit]
            theirs = [p for p, bit in zip(branch["logprobs"], row.mask, strict=True) if bit]
            assert mine == theirs


def trained(row):
    """(id, logprob) of every token of a row that trains."""
    return [
        [id, logprob] for id, logprob, bit in zip(row.ids, row.logprobs, row.mask, strict=True) if bit
    ]  # fmt: skip


def test_tinkers_data_hold_each_target_beside_what_it_is_predicted_from():
    made = json.loads(foreign("tinker-0.36.0", "tinker==0.36.0")("tinker_side.py", HERE / "golden"))
    rows = [row for rollout in (linear(), branchy()) for row in samples(rollout).rows]
    for row, datum in zip(rows, made, strict=True):
        assert datum["input"] == list(row.ids[:-1])
        assert datum["target_tokens"] == ["int64", list(row.ids[1:])]
        assert {datum[name][0] for name in ("logprobs", "advantages")} == {"float32"}
        assert all(bit or not advantage for bit, advantage in zip(datum["mask"], datum["advantages"][1], strict=True))
        marked = zip(datum["target_tokens"][1], datum["logprobs"][1], datum["mask"], strict=True)
        assert [[id, logprob] for id, logprob, bit in marked if bit] == trained(row)


def test_atropos_own_server_gives_our_group_to_a_trainer():
    packages = ("atroposlib==0.4.0", "fastapi==0.162.4", "httpx==0.28.1", "numpy==2.4.6", "zstandard==0.25.0")
    run = foreign("atropos-0.4.0", *packages, alone=True)
    made = json.loads(run("atropos_side.py", HERE / "golden"))
    assert made["status"] == "received"
    (group,) = made["batch"]
    rows = [row for rollout in (linear(), branchy()) for row in samples(rollout).rows]
    assert group["tokens"] == [list(row.ids) for row in rows]
    kept = zip(group["masks"], group["inference_logprobs"], strict=True)
    seen = [[[id, p] for id, p in zip(mask, logprobs, strict=True) if id != -100] for mask, logprobs in kept]
    assert seen == [trained(row) for row in rows]
    assert group["scores"] == [row.reward for row in rows]


def test_art_finds_a_choice_wherever_we_train_and_nowhere_else():
    made = json.loads(foreign("art-0.5.18", "openpipe-art==0.5.18")("art_side.py", HERE / "golden"))
    for rollout, trajectory in zip((linear(), branchy()), made, strict=True):
        rows = samples(rollout).rows
        assert trajectory["reward"] == rollout.reward
        found = [[pair for choice in history for pair in choice] for history in trajectory["choices"]]
        assert sorted(found) == sorted(trained(row) for row in rows)
        assert all("assistant" in roles for roles in trajectory["roles"])


def test_verls_own_output_makes_the_tensors_we_mean():
    needs = "torch==2.13.0 tensordict==0.15.3 hydra-core==1.3.8 ray==2.60.0 pillow==13.0.0 transformers==5.22.2 datasets==5.2.0"
    rest = "codetiming==1.4.0 peft==0.21.2 orjson==3.13.0 uvicorn==0.54.0 fastapi==0.162.4 cachetools==8.0.0 torchdata==0.11.0"
    run = foreign("verl-0.9.1", "verl==0.9.1", *needs.split(), *rest.split(), alone=True)
    made = json.loads(run("verl_side.py", HERE / "golden"))
    rows = [row for rollout in (linear(), branchy()) for row in samples(rollout).rows]
    for row, output in zip(rows, made, strict=True):
        assert output["unknown"] == []
        assert output["prompts"] + output["responses"] == list(row.ids)
        marked = zip(output["responses"], output["rollout_log_probs"], output["response_mask"], strict=True)
        assert [[id, logprob] for id, logprob, bit in marked if bit] == trained(row)
