"""Install is a stage of its own: its failure is infrastructure, is tried again, and keeps what the installer said."""

from __future__ import annotations

import pytest

import rollyard as ry
from rollyard.core.agent import Agent, LayerSpec
from rollyard.core.sandbox import Mount
from rollyard.core.task import Step, Task, VerifierSpec
from tests.runs.conftest import HELLO

pytestmark = pytest.mark.anyio

MISSING = Agent(name="missing", layer=LayerSpec(pip=("rollyard-has-no-such-agent==1",)), argv=("true",))


@pytest.fixture
def closed_index(monkeypatch):
    """pip itself says, at once, that nothing is to be had."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")


async def test_an_install_that_fails_is_infrastructure_and_keeps_exit_code_and_output(backend, closed_index):
    done = await ry.run_rollout("x", agent=MISSING, sandbox=backend)
    failure = done.failure
    assert (done.status, failure.boundary, failure.stage, failure.cause) == (
        "infra_error", "sandbox", "install", "AgentInstallFailed",
    )  # fmt: skip
    assert failure.retry and not failure.grade and not failure.trainable and done.reward is None
    (record,) = done.install
    assert record.exit_code == 1 and "No matching distribution found" in record.stderr
    assert "rollyard-has-no-such-agent" in failure.message and "exit code 1" in failure.message
    assert [stage.name for stage in done.stages] == ["install"] and done.sandbox_id is None


async def test_an_install_that_fails_is_tried_again_by_a_run(backend, closed_index, tmp_path):
    async with ry.Store.open(str(tmp_path / "runs.db")) as store:
        tasks = ry.Taskset([Task(id="t", instruction="x")])
        gate = ry.Gate(ry.policy.scripted(HELLO), log=store)
        async with gate, ry.Run(tasks, agent=MISSING, sandbox=backend, gate=gate, store=store, retries=1) as run:
            (done,) = [rollout async for rollout in run]
        assert done.failure.cause == "AgentInstallFailed"
        assert sum(one.event.name == "stage.started" for one in await store.events(run_id=run.id, limit=1000)) == 2
        kept = await store.get_rollout(done.id)
    assert kept.install == done.install and kept.install[0].exit_code == 1


async def test_a_slow_install_names_its_own_limit_and_number(backend):
    done = await ry.run_rollout("x", agent=MISSING, sandbox=backend, limits=ry.Limits(install=0.02, boot=44))
    assert done.failure.message.startswith("install ran past limits.install (0.02 s)")
    assert done.failure.hint == "raise limits.install" and done.failure.retry
    assert done.failure.boundary == "sandbox"


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (ry.Limits(setup=1.5), "setup command 'sleep 60' ran past limits.setup (1.5 s)"),
        (ry.Limits(total=4, verify=2), "ran past limits.total (4 s"),
    ],
)
async def test_a_late_setup_names_the_limit_that_ended_it(backend, limits, said):
    done = await ry.run_rollout("x", agent="nop", sandbox=backend, setup=["echo one", "sleep 60"], limits=limits)
    assert said in done.failure.message
    assert [(record.exit_code, record.timed_out) for record in done.setup] == [(0, False), (None, True)]


async def test_what_a_command_printed_before_it_was_cut_off_is_kept(backend):
    done = await ry.run_rollout(
        "x", agent="nop", sandbox=backend, setup=["echo before; sleep 60"], limits=ry.Limits(setup=2)
    )
    assert (done.setup[0].stdout, done.setup[0].timed_out) == ("before\n", True)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (ry.Limits(agent=3), "wait ran past limits.agent (3 s)"),
        (ry.Limits(total=7, verify=4), "wait ran past limits.total (7 s, of which limits.verify keeps 4 s)"),
    ],
)
async def test_a_late_agent_names_the_limit_that_ended_it(backend, limits, said):
    policy = ry.policy.scripted({"steps": [{"shell": "sleep 60"}]})
    done = await ry.run_rollout("x", agent="shell-agent", policy=policy, sandbox=backend, limits=limits)
    assert done.failure.message.startswith(said) and done.status == "timeout"


async def test_a_late_step_names_the_steps_own_time(backend):
    step = Step(name="one", instruction="x", agent_timeout_s=3)
    policy = ry.policy.scripted({"steps": [{"shell": "sleep 60"}]})
    task = Task(id="t", instruction="x", steps=(step,))
    done = await ry.run_rollout(task, agent="shell-agent", policy=policy, sandbox=backend)
    assert done.failure.message.startswith("wait ran past the step's agent_timeout_s (3 s)")


@pytest.mark.parametrize(("own", "said"), [(None, "limits.verify (6 s)"), (6.5, "the verifier's timeout_s (6.5 s)")])
async def test_commands_that_a_verifier_ran_are_kept_when_it_runs_out_of_time(backend, own, said):
    commands = {"commands": ["cat out.txt", "echo judged; exit 3", "sleep 60"]}
    task = Task(id="t", instruction="x", verifier=VerifierSpec(kind="commands", options=commands, timeout_s=own))
    done = await ry.run_rollout(
        task, agent="shell-agent", policy=ry.policy.scripted(HELLO), sandbox=backend, limits=ry.Limits(verify=6)
    )
    assert (done.failure.stage, done.reward) == ("verify", None)
    assert done.failure.message.startswith(f"verify ran past {said}")
    ran = [(record.command, record.exit_code, record.stdout, record.timed_out) for record in done.verdict.commands]
    assert ran == [
        ("cat out.txt", 0, "hello\n", False), ("echo judged; exit 3", 3, "judged\n", False), ("sleep 60", None, "", True),
    ]  # fmt: skip
    assert (done.verdict.status, done.verdict.reward, done.verdict.error) == ("failed", None, done.failure.message)


async def test_the_agents_own_setup_is_tried_again_and_every_try_is_recorded(backend):
    flaky = "test -f /tmp/second || { touch /tmp/second; echo away >&2; exit 7; }"
    done = await ry.run_rollout(
        "x",
        agent="nop",
        sandbox=backend,
        agent_setup=["echo first", flaky],
        setup=["test -f /tmp/second"],
        verify="true",
    )
    assert (done.failure, done.reward) == (None, 1.0)
    assert [(one.exit_code, one.stderr) for one in done.install] == [(0, ""), (7, "away\n"), (0, "")]
    assert [record.exit_code for record in done.setup] == [0]


async def test_an_agents_setup_that_never_succeeds_is_infrastructure(backend):
    done = await ry.run_rollout("x", agent="nop", sandbox=backend, agent_setup=["echo why >&2; exit 9"], verify="true")
    failure = done.failure
    assert (failure.stage, failure.boundary, failure.cause, failure.retry) == (
        "install", "sandbox", "AgentInstallFailed", True,
    )  # fmt: skip
    assert [one.exit_code for one in done.install] == [9, 9, 9] and done.reward is None and done.setup == ()


async def test_a_directory_of_this_machine_is_shown_to_the_agent_and_not_to_a_sealed_verdict(tmp_path):
    (tmp_path / "given").write_text("hello")
    mount = Mount(local_dir="/data", remote_dir=str(tmp_path))
    reads = Agent(name="reads", argv=("/bin/cp", "/data/given", "out.txt"))
    done = await ry.run_rollout(
        "x", agent=reads, mounts=[mount], verify=['test "$(cat out.txt)" = hello', "test ! -e /data/given"]
    )
    assert (done.failure, done.reward) == (None, 1.0)


async def test_a_directory_that_a_backend_was_not_given_is_refused(backend, tmp_path):
    mount = Mount(local_dir="/data", remote_dir=str(tmp_path))
    done = await ry.run_rollout("x", agent="nop", sandbox=backend, mounts=[mount])
    assert "not allowed" in done.failure.message and not done.failure.retry and done.sandbox_id is None
