"""Judging a whole task through the one lifecycle, and what each grade needs of a backend."""

import msgspec
import pytest

from rollyard.core.errors import ConfigError, Unsupported, VerifierError
from rollyard.core.rollout import Rollout
from rollyard.core.sandbox import Capabilities, SandboxSpec
from rollyard.core.task import Artifact, CollectHook, Site, Step
from rollyard.images.layers import layer_prefix
from rollyard.policy.scripted_policy import scripted
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.tasks.grade import Judging, judge
from rollyard.tasks.harbor.load import load_folder
from rollyard.tasks.requirements import refuse, refuse_history
from rollyard.tasks.rows import as_task
from rollyard.tasks.verifiers import verifier_for


async def run(task, backend, agent="oracle", **options):
    return await run_rollout(task, agent=agent, policy=scripted([]), sandbox=backend, **options)


@pytest.mark.anyio
async def test_collect_hooks_run_while_the_services_still_live(folders, backend, tmp_path):
    toml = (
        '[metadata.rollyard]\ngrade = "sealed"\n[environment]\ndocker_image = "host"\nworkdir = "/app"\n'
        '[[verifier.collect]]\ncommand = "cat /proc/$(cat /tmp/pid)/comm > state"\n[[verifier.collect]]\ncommand = "exit 3"\n'
    )
    files = {
        "solution/solve.sh": "#!/bin/sh\n(setsid sleep 600 >/dev/null 2>&1 & echo $! > /tmp/pid)\n"
        'until [ "$(cat /proc/$(cat /tmp/pid)/comm)" = sleep ]; do sleep 0.05; done\n',
        "tests/test.sh": "#!/bin/sh\ngrep -c sleep state > /logs/verifier/reward.txt\n",
    }
    done = await run(load_folder(folders.simple(tmp_path / "t", toml, **files)), backend)
    assert done.reward == 1.0, done.verdict
    assert [record.exit_code for record in done.verdict.commands] == [0, 3]


@pytest.mark.anyio
async def test_a_verifier_of_its_own_image_gets_the_artifacts_and_nothing_else(folders, backend, tmp_path):
    toml = (
        'artifacts = ["out"]\n[environment]\ndocker_image = "host"\nworkdir = "/app"\n'
        '[verifier]\nenvironment_mode = "separate"\n[verifier.environment]\nworkdir = "/grade"\n'
    )
    files = {
        "solution/solve.sh": "#!/bin/sh\nmkdir out; echo x > out/x; echo y > other\n",
        "tests/Dockerfile": "FROM host\nRUN echo pristine > /mark\nCOPY . /tests/\n",
        "tests/test.sh": (
            "#!/bin/sh\ntest -e /mark && test -e /app/out/x && test ! -e /app/other && test $(pwd) = /grade\n"
            "echo $((1 - $?)) > /logs/verifier/reward.txt\n"
        ),
    }
    task = load_folder(folders.simple(tmp_path / "t", toml, **files))
    done = await run(task, backend)
    assert (done.reward, done.verdict.grade) == (1.0, "sealed"), done.verdict


@pytest.mark.anyio
async def test_a_solution_gets_its_env_and_templates_are_resolved(folders, backend, tmp_path, monkeypatch):
    monkeypatch.setenv("TASK_SECRET", "from the host")
    toml = (
        '[environment]\ndocker_image = "host"\nworkdir = "/app"\nenv = { PLACE = "${TASK_SECRET}" }\n'
        '[solution.env]\nANSWER = "${NO_SUCH_VARIABLE:-42}"\n[verifier.env]\nWANTED = "${TASK_SECRET}"\n'
    )
    files = {
        "solution/solve.sh": '#!/bin/sh\necho "$ANSWER $PLACE" > said\n',
        "tests/test.sh": '#!/bin/sh\n[ "$(cat said)" = "42 $WANTED" ]\necho $((1 - $?)) > /logs/verifier/reward.txt\n',
    }
    task = load_folder(folders.simple(tmp_path / "t", toml, **files))
    assert "from the host" not in str(msgspec.to_builtins(task))
    assert (await run(task, backend)).reward == 1.0


@pytest.mark.anyio
async def test_skills_reach_the_agents_home(folders, backend, tmp_path):
    toml = '[environment]\nworkdir = "/app"\nskills_dir = "/skills"\n'
    files = {
        "environment/Dockerfile": "FROM host\nWORKDIR /app\nCOPY SKILL.md /skills/greet/SKILL.md\n",
        "environment/SKILL.md": "say hello\n",
        "solution/solve.sh": "#!/bin/sh\ncat $HOME/.claude/skills/greet/SKILL.md $HOME/.agents/skills/greet/SKILL.md > got\n",
        "tests/test.sh": "#!/bin/sh\n[ $(grep -c hello got) = 2 ]\necho $((1 - $?)) > /logs/verifier/reward.txt\n",
    }
    assert (await run(load_folder(folders.simple(tmp_path / "t", toml, **files)), backend)).reward == 1.0


@pytest.mark.anyio
async def test_a_missed_minimum_ends_a_task_with_steps(folders, backend, tmp_path):
    root = folders.steps(tmp_path / "t")
    toml = (
        (root / "task.toml").read_text().replace('user = "dev"', "").replace('strategy = "final"', 'strategy = "mean"')
    )
    (root / "task.toml").write_text(toml)
    low = "#!/bin/sh\necho 0.25 > /logs/verifier/reward.txt\n"
    folders.write(root, {"tests/test.sh": low, "steps/second/solution/solve.sh": "#!/bin/sh\ntouch /second-ran\n"})
    done = await run(load_folder(root), backend)
    assert done.reward == 0.25
    assert "first" in done.stop_reason
    assert sum(stage.name == "verify" for stage in done.stages) == 1


@pytest.mark.anyio
async def test_the_next_steps_agent_finds_no_tests_and_no_results(folders, backend, tmp_path):
    root = folders.steps(tmp_path / "t")
    toml = (root / "task.toml").read_text().replace('user = "dev"', "").replace('environment_mode = "separate"', "")
    folders.write(
        root,
        {
            "task.toml": toml,
            "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
            "steps/second/tests/test.sh": "#!/bin/sh\n! grep -q . /seen\necho $((1 - $?)) > /logs/verifier/reward.txt\n",
            "steps/second/solution/solve.sh": "#!/bin/sh\nls -d /tests /logs/verifier* > /seen 2>/dev/null\ntrue\n",
        },
    )
    done = await run(load_folder(root), backend)
    assert (done.reward, done.verdict.grade) == (1.0, "shared"), done.verdict


@pytest.mark.anyio
async def test_a_ready_image_is_taken_before_its_dockerfile_and_declared_artifacts_are_kept(folders, backend, tmp_path):
    toml = 'artifacts = ["/srv/out"]\n[environment]\ndocker_image = "acme/ready:1"\nworkdir = "/app"\n'
    files = {
        "environment/Dockerfile": "FROM host\nRUN echo built > /mark\n",
        "solution/solve.sh": "#!/bin/sh\nmkdir -p /srv/out; cat /mark > /srv/out/mark\n",
        "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
    }
    task = load_folder(folders.simple(tmp_path / "t", toml, **files))
    built = await run(task, backend)
    assert built.files["/srv/out/mark"] == b"built\n"
    async with backend.open(SandboxSpec()) as sandbox:
        await sandbox.write("/mark", "ready\n")
        await backend.images.add(await sandbox.snapshot(), names=["acme/ready:1"])
    ready = await run(task, backend)
    assert ready.files["/srv/out/mark"] == b"ready\n"


async def layered(attempt, backend, **case):
    layer = await backend.images.layer(pip=["pytest==9.2.0"])
    row = {"instruction": "x", "verify": ["pytest --version", "test -e work"]}
    async with attempt(row) as it:
        await it.act("touch work; ! command -v pytest-of-the-agent")
        gone = []

        async def forget(image):
            gone.append(image)
            await backend.images.remove(image)

        spec = msgspec.structs.replace(it.task.verifier, grade="shared")
        described = Judging(
            spec=spec,
            rollout=Rollout(id="r", task=it.task),
            place=it.place,
            workdir=it.workdir,
            layers=(layer,),
            tools=(f"{layer_prefix(layer)}/bin",),
            timeout_s=60,
        )
        return await judge(described, it.sandbox, backend, verifier_for(spec), forget=forget), gone


@pytest.mark.anyio
async def test_shared_is_reopened_for_the_verifiers_own_tools_and_leaves_no_snapshot(attempt, backend):
    verdict, gone = await layered(attempt, backend)
    assert (verdict.reward, verdict.grade) == (1.0, "shared"), verdict
    assert len(gone) == 1
    with pytest.raises(ConfigError):
        await backend.images.resolve(gone[0])


@pytest.mark.anyio
async def test_sealed_needs_a_working_directory(attempt):
    async with attempt({"instruction": "x", "verify": "true"}, workdir="/") as it:
        with pytest.raises(VerifierError, match="working directory"):
            await it.verdict(grade="sealed")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"os": "windows"}, "Windows"),
        ({"compose": "/x/compose.yaml"}, "several services"),
        ({"resources": {"gpus": 1}}, "accelerators"),
        ({"network": "allowlist", "allowed_hosts": ["a.b"]}, "single hosts"),
        ({"image": "other"}, "image 'other'"),
        ({"build": "/b"}, "/b"),
        ({"layers": ["ly_1"]}, "layers"),
        ({"steps": [Step(name="s", instruction="x", network="none")], "network": "allowlist"}, "single hosts"),
        ({"artifacts": [Artifact(source="/a", service="db")]}, "'db'"),
        ({"verifier": {"kind": "harbor", "site": Site(os="windows")}}, "Windows"),
        ({"verifier": {"kind": "harbor", "collect": [CollectHook(command="x", service="db")]}}, "'db'"),
    ],
)
def test_what_a_backend_cannot_give_is_refused_by_name(fields, said):
    task = as_task({"instruction": "x", **fields})
    with pytest.raises(ConfigError, match=said):
        refuse(task, "small", Capabilities(isolation="container"))


def test_what_it_can_give_is_not_refused():
    task = as_task(
        {
            "instruction": "x",
            "image": "other",
            "layers": ["ly_1"],
            "steps": [Step(name="s", instruction="x", network="none")],
        }
    )
    refuse(task, "big", Capabilities(isolation="container", images=True, layers=True))
    with pytest.raises(Unsupported, match=r"trajectory\.json"):
        refuse_history(as_task({"instruction": "x", "history": "{}"}), "pi")
    different = as_task(
        {"instruction": "x", "network": "host", "steps": [Step(name="s", instruction="x", network="none")]}
    )
    with pytest.raises(Unsupported, match="share one sandbox"):
        refuse(different, "big", Capabilities(isolation="container"))


COMPOSE = "services:\n  main:\n    build: .\n    environment:\n      A: 1\n    working_dir: /srv\n    command: sleep infinity\n"


def test_a_compose_file_with_one_plain_service_is_only_an_image(folders, tmp_path):
    root = folders.simple(
        tmp_path / "t", **{"environment/docker-compose.yaml": COMPOSE, "environment/Dockerfile": "FROM host\n"}
    )
    task = load_folder(root)
    assert (task.compose, task.env, task.workdir) == (None, {"A": "1"}, "/srv")
    assert task.build == str(root / "environment")
    for more in ("  db:\n    image: x\n", "    volumes: [a:/b]\n", "volumes: {}\n"):
        folders.write(root, {"environment/docker-compose.yaml": COMPOSE + more})
        assert load_folder(root).compose == str(root / "environment" / "docker-compose.yaml")
    folders.write(root, {"environment/docker-compose.yaml": "services:\n  web:\n    image: x\n"})
    with pytest.raises(ConfigError, match="no service named 'main'"):
        load_folder(root)


@pytest.mark.anyio
async def test_a_rollout_that_may_not_be_graded_is_not_judged():
    from rollyard.core.rollout import Failure, Rollout
    from rollyard.core.sandbox import SandboxSpec
    from rollyard.core.task import Task, VerifierSpec
    from rollyard.tasks import grade

    away = Failure(boundary="policy", cause="E", message="away", stage="wait", retry=True, grade=False, trainable=False)
    rollout = Rollout(id="r", task=Task(id="t", instruction="x"), failure=away)
    case = grade.Judging(spec=VerifierSpec(kind="commands"), rollout=rollout, place=SandboxSpec(), workdir="/w")
    verdict = await grade.judge(case, None, None, None)  # nothing is touched
    assert (verdict.reward, verdict.status) == (None, "skipped") and "away" in verdict.error
