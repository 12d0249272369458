"""What is wrong with the files an agent leaves is the agent's: it is noted, what is there is judged, and nothing runs again."""

from __future__ import annotations

import pytest

import rollyard as ry
from rollyard.core.task import Step, Task, VerifierSpec
from tests.runs.conftest import CHECK

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]

WORK = "echo hello > out.txt"
LEFT = {
    "a file in place of the working directory": ("cd / && rm -rf /work/app && echo hello > /work/app", 0.0),
    "no working directory": ("cd / && rm -rf /work/app", 0.0),
    "a link in place of the working directory": ("cd / && rm -rf /work/app && ln -s /etc /work/app", 0.0),
    "a link with a name that is no UTF-8": (f"{WORK}; ln -s x \"$(printf 'a\\377b')\"", 1.0),
    "a link to a name that is no UTF-8": (f"{WORK}; ln -s \"$(printf 'a\\377b')\" link", 1.0),
    "a file with a name that is no UTF-8": (f"{WORK}; echo x > \"$(printf 'a\\377b')\"", 1.0),
    "a link with a newline and a quote in its name": (f"{WORK}; ln -s x \"$(printf 'a\\n\\047b')\"", 1.0),
    "a link in a directory that is closed": (f"{WORK}; mkdir d; ln -s x d/l; chmod 0 d", 1.0),
    "60 directories with names of 255 characters": (
        f"{WORK}; python3 -c \"import os\nfor _ in range(60): os.mkdir('n' * 255); os.chdir('n' * 255)\n"
        "os.symlink('x', 'l'); open('f', 'w').close()\"",
        1.0,
    ),
    "1,500 directories in the working directory": (
        f"{WORK}; python3 -c \"import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\n"
        "os.symlink('x', 'l'); open('f', 'w').close()\"",
        1.0,
    ),
    "1,500 directories where the tests go": (
        f"{WORK}; python3 -c \"import os\nos.makedirs('/tests', exist_ok=True); os.chdir('/tests')\n"
        "for _ in range(1500): os.mkdir('d'); os.chdir('d')\"",
        1.0,
    ),
    "a file where the tests go": (f"{WORK}; rm -rf /tests /logs; echo x > /tests; echo x > /logs", 1.0),
    "30,000 links": (f"{WORK}; python3 -c \"import os\nfor n in range(30000): os.symlink('x', 'l%d' % n)\"", 1.0),
    "a pipe and a socket": (
        f"{WORK}; mkfifo p; python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('s')\"",
        1.0,
    ),
}


def task(grade: str) -> Task:
    judge = VerifierSpec(kind="commands", grade=grade, options={"commands": [CHECK]})
    return Task(id="t", instruction="x", workdir="/work/app", verifier=judge, limits=ry.Limits(verify=60))


@pytest.mark.parametrize("grade", ["sealed", "shared"])
@pytest.mark.parametrize(
    "left", [pytest.param(left, marks=pytest.mark.slow) if "30,000" in left else left for left in LEFT]
)
async def test_what_an_agent_leaves_is_judged(tmp_path, backend, left, grade):
    command, reward = LEFT[left]
    async with ry.Store.open(tmp_path / "runs.db") as store:
        done = await ry.run_rollout(
            task(grade),
            agent="shell-agent",
            policy=ry.policy.scripted({"steps": [{"shell": command}, {"text": "done"}]}),
            sandbox=backend,
            store=store,
            collect=["*"],
        )
        assert (done.status, done.failure, done.reward) == ("completed", None, reward), (done.verdict, done.failure)
        kept = await store.get_rollout(done.id)
    assert kept.reward == reward and kept.diff is not None
    deep = "60 directories" in left
    assert kept.diff.endswith("[entries left out that lie deeper than a path can name: 1]\n") is deep
    assert ("/work/app: entries left out that lie deeper than a path can name: 1" in kept.verdict.log) is (
        deep and grade == "sealed"
    )


async def test_a_step_that_leaves_a_file_in_place_of_the_working_directory_costs_only_its_own_work(backend):
    script = {"steps": [{"shell": "cd / && rm -rf /work/app && echo x > /work/app"}, {"text": "done"}]}
    judge = VerifierSpec(kind="commands", grade="shared", options={"commands": ["test -f /work/app"]})
    steps = tuple(Step(name=name, instruction=name, verifier=judge) for name in ("one", "two"))
    done = await ry.run_rollout(
        Task(id="t", instruction="", workdir="/work/app", steps=steps),
        agent="shell-agent",
        policy=ry.policy.scripted(script),
        sandbox=backend,
    )
    assert (done.failure, done.reward, done.calls) == (None, 1.0, 4)
