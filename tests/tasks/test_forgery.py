"""Forged rewards: each attack names the grades in which it must fail. The work is never done, so any reward is forged.

Every attack is also run against a naive judge (the tests started in the agent's own sandbox with the agent's own environment),
which it must fool: otherwise it would prove nothing.
"""

import shutil
from pathlib import Path

import msgspec
import pytest

from rollyard.core.rollout import Verdict
from rollyard.images.layers import layer_prefix
from rollyard.tasks.harbor.load import load_folder
from rollyard.tasks.rows import as_task

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]

ALL = ("sealed", "shared", "live")
DEAD = ("sealed", "shared")

TEST_SH = """#!/bin/bash
cd /app
git commit -q --allow-empty -m judged >/dev/null 2>&1
git status >/dev/null 2>&1
/usr/bin/python3 /tests/check.py && bash -l -c 'grep -q "^fixed$" /app/state.txt'
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
sleep 0.2
"""
CHECK_PY = "import json, sys\nsys.exit(json.load(open('/app/answer.json')) != {'answer': 42})\n"


def attacks(folder):
    """Scripts an agent runs, by name; the first line of each says in which grades it must fail."""
    scripts = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / folder).glob("*.sh"))}
    return {name: (text, text.partition("\n")[0].partition("must fail: ")[2].split()) for name, text in scripts.items()}


ATTACKS = attacks("attacks")
PYTEST_ATTACKS = attacks("pytest_attacks")


@pytest.fixture
def task(folders, tmp_path):
    files = {"tests/test.sh": TEST_SH, "tests/check.py": CHECK_PY}
    made = load_folder(folders.simple(tmp_path / "task", **files))
    row = {"instruction": "x", "files": {"state.txt": "broken\n", "answer.json": '{"answer": 0}'}}
    return msgspec.structs.replace(made, files=as_task(row).files)


async def naive(it) -> Verdict:
    """What judging without precautions gives: same sandbox, same environment, nothing killed, nothing removed."""
    sandbox = it.sandbox
    await sandbox.exec("mkdir -p /logs/verifier /tests", timeout=10)
    await sandbox.upload_dir(str(it.task.verifier.tests[0]), "/tests")
    await sandbox.exec("bash -lc /tests/test.sh", cwd="/app", env={"HOME": "/root"}, timeout=30)
    read = await sandbox.exec("cat /logs/verifier/reward.json || cat /logs/verifier/reward.txt", timeout=10)
    return Verdict(reward=float(read.stdout or b"nan"))


def needs(attack):
    if "preload" in attack and shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    if "python3" in ATTACKS[attack][0] and shutil.which("python3", path="/usr/bin") is None:
        pytest.skip("needs /usr/bin/python3")


@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_attack_is_real(attempt, task, attack):
    needs(attack)
    async with attempt(task) as it:
        await it.act(["bash", "-c", ATTACKS[attack][0]])
        assert (await naive(it)).reward == 1.0


@pytest.mark.parametrize(
    ("attack", "grade"), [(name, grade) for name, (_, grades) in ATTACKS.items() for grade in grades]
)
async def test_an_attack_fails(attempt, task, attack, grade):
    needs(attack)
    async with attempt(task) as it:
        await it.act(["bash", "-c", ATTACKS[attack][0]])
        verdict = await it.verdict(grade=grade)
    assert (verdict.reward, verdict.status, verdict.grade) == (0.0, "scored", grade), verdict


@pytest.mark.parametrize("grade", DEAD)
async def test_everything_the_agent_left_running_is_dead_before_the_tests_start(attempt, folders, tmp_path, grade):
    script = "#!/bin/sh\nps -e -o args | grep -q '[s]leep 9876'\necho $? > /logs/verifier/reward.txt\n"
    task = load_folder(folders.simple(tmp_path / "t", **{"tests/test.sh": script}))
    async with attempt(task) as it:
        await it.leave("setsid sh -c 'trap \"\" TERM HUP; sleep 9876; sleep 9876' & wait")
        await it.act("ps -e -o args | grep -q '[s]leep 9876'")
        verdict = await it.verdict(grade=grade)
    assert verdict.reward == 1.0, verdict


@pytest.mark.parametrize("grade", ALL)
async def test_an_agent_of_another_user_cannot_touch_tests_or_reward(attempt, folders, tmp_path, grade):
    """The tests run the agent's program as the agent's user, who must not reach the judge's files."""
    script = (
        "#!/bin/sh\n"
        "setpriv --reuid=1000 --regid=1000 --clear-groups sh -c '"
        "echo 1 > /logs/verifier/reward.json; rm -f /tests/test.sh; mv /logs/verifier /logs/other; mv /tests /tests2'\n"
        "echo 0 > /logs/verifier/reward.txt\n"
    )
    task = load_folder(folders.simple(tmp_path / "t", **{"tests/test.sh": script}))
    async with attempt(task) as it:
        if not it.sandbox.capabilities.users:
            pytest.skip("this machine gives a sandbox one user id only")
        await it.act("mkdir -p /logs /tests && chown -R 1000:1000 /logs /tests && chmod 777 /logs /tests")
        verdict = await it.verdict(grade=grade, agent_user="1000")
    assert verdict.reward == 0.0, verdict


@pytest.fixture(scope="session")
def tests_of_work(tmp_path_factory):
    root = tmp_path_factory.mktemp("pytests")
    (root / "test_work.py").write_text(
        "import pytest\n\ntry:\n    import start  # noqa: F401\nexcept ImportError:\n    pass\n\n\n"
        "def test_less():\n    pass\n\n\n"
        "def test_it():\n    import work\n    assert work.value == 42\n\n\ndef test_more():\n    pass\n\n\n"
        "@pytest.mark.xfail\ndef test_later():\n    import work\n    work.later()\n\n\n"
        "def test_elsewhere():\n    pytest.skip('not here')\n"
    )
    return root


async def pytest_verdict(it, grade, layer):
    tools = (f"{layer_prefix(layer)}/bin",)
    return await it.verdict(grade=grade, layers=() if grade == "sealed" else (layer,), tools=tools)


@pytest.fixture
async def work(attempt, backend, tests_of_work):
    """A task judged by pytest out of a read-only layer; `value` must become 42."""
    layer = await backend.images.layer(pip=["pytest==9.2.0"])
    row = {"instruction": "x", "files": {"work.py": "value = 0\n"}}
    options = {"pythonpath": ["/app"]}
    row["verifier"] = {"kind": "pytest", "options": options, "tests": [str(tests_of_work)], "layers": [layer]}
    async with attempt(row, layers=(layer,)) as it:
        yield it, layer


@pytest.mark.parametrize(
    ("attack", "grade"), [(a, grade) for a, (_, grades) in PYTEST_ATTACKS.items() for grade in grades]
)
@pytest.mark.ordinary("conftest-sealed", "pyproject-shared", "plugin-in-the-user-site-sealed", "replaced-python-shared")
async def test_pytest_is_not_steered_by_what_the_agent_left(work, attack, grade):
    it, layer = work
    await it.act(["bash", "-c", PYTEST_ATTACKS[attack][0]])
    verdict = await pytest_verdict(it, grade, layer)
    assert verdict.reward == 0.0, verdict


@pytest.mark.parametrize("grade", DEAD)
@pytest.mark.ordinary("sealed")
async def test_pytest_rewards_the_work(work, grade):
    it, layer = work
    failed = await pytest_verdict(it, grade, layer)
    assert (failed.reward, failed.checks) == (
        0.0,
        {f"test_work::test_{name}": name != "it" for name in ("less", "it", "more")},
    )
    await it.act("printf 'value = 42\\ndef later(): raise ValueError\\n' > work.py")
    assert (await pytest_verdict(it, grade, layer)).reward == 1.0


async def test_sealed_takes_the_work_along_and_nothing_of_the_system(attempt, backend):
    row = {
        "instruction": "x",
        "verifier": {
            "kind": "commands",
            "options": {"commands": ["cat kept", "test ! -e /opt/out", "cat /srv/art/a", "test ! -e /srv/art/b.tmp"]},
        },
        "artifacts": [{"source": "/srv/art", "exclude": ["*.tmp"]}],
        "files": {"deleted": "x"},
    }
    async with attempt(row) as it:
        await it.act(
            "echo kept > kept; rm deleted; echo x > /opt/out; mkdir -p /srv/art; echo a > /srv/art/a; touch /srv/art/b.tmp"
        )
        verdict = await it.verdict()
    assert verdict.reward == 1.0, verdict


async def test_links_travel_as_links_and_never_carry_a_host_file(attempt, tmp_path):
    """The host has the file a planted link points to; the judge must not see its content."""
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    row = {
        "instruction": "x",
        "verifier": {
            "kind": "commands",
            "options": {"commands": ["test ! -e leak", "! cat leak", "cat ok", "test -L odd\\ name"]},
        },
    }
    async with attempt(row) as it:
        await it.act(
            f"ln -s {secret} leak; echo x > real; ln -s real ok; ln -s '; touch pwned' 'odd name';"
            " echo x > '; touch pwned'; mkfifo pipe; chmod u+s real"
        )
        verdict = await it.verdict()
    assert verdict.reward == 1.0, verdict
    assert "host secret" not in verdict.log


async def test_an_artifact_that_is_a_link_is_left_behind(attempt):
    row = {
        "instruction": "x",
        "verifier": {"kind": "commands", "options": {"commands": ["test ! -e /srv/art/passwd"]}},
        "artifacts": [{"source": "/srv/art"}],
    }
    async with attempt(row) as it:
        await it.act("rm -rf /srv/art; ln -s /etc /srv/art")
        verdict = await it.verdict()
    assert verdict.reward == 1.0
    assert "/srv/art was left behind" in verdict.log
    assert "/logs/artifacts" not in verdict.log  # nobody asked for it
