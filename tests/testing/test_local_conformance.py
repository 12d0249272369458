"""The local backend against the sandbox conformance suite, as whoever runs the tests and as an ordinary user."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rollyard
from rollyard.sandbox import backend
from rollyard.testing.pytest_adapter import conformance, expect_passed
from rollyard.testing.sandbox import SandboxFixture, cases, missing
from rollyard.testing.sandbox.verdict import examine_backend
from rollyard.testing.suite import run_case

pytestmark = pytest.mark.anyio
NOBODY = 65534
CAN_RUN = "import subprocess, sys, rollyard.cli.main; subprocess.check_call([sys.executable, '-c', ''])"


@conformance(cases())
async def test_local(case, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    mounts = [str(tmp_path / "shared")]
    async with backend("local", mounts=mounts) as local:
        fixture = SandboxFixture(backend=local, name="local", options={"mounts": mounts}, mount=mounts[0])
        expect_passed(await run_case(case, fixture, missing=missing(fixture), slow=True))


async def test_a_layer_of_the_backends_store_opens():
    async with examine_backend("local") as examination:
        (outcome,) = [outcome async for outcome in examination.outcomes(only="S5")]
    expect_passed(outcome)


@pytest.mark.parametrize("level", ["no_cgroups", "no_proc", "landlock", "none"])
@pytest.mark.parametrize("only", ["F", pytest.param(None, marks=pytest.mark.slow)], ids=["files", "all"])
async def test_weaker_levels_do_all_they_promise(level, only):
    async with examine_backend("local", [f"level={level}"]) as examination:
        found = [outcome async for outcome in examination.outcomes(only=only)]
    failed = [f"{outcome.id} {outcome.title}: {outcome.why}" for outcome in found if outcome.result == "failed"]
    assert not failed, "\n".join(failed)
    assert sum(outcome.result == "passed" for outcome in found) > (12 if only else 75)


def ordinary_python():
    """A Python that an ordinary user may run, with this one's packages: the interpreter may lie in root's home."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (os.path.realpath(sys.executable), f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        argv = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", candidate]
        package = str(Path(rollyard.__file__).parents[1])
        path = os.pathsep.join([package, *(entry for entry in sys.path if "site-packages" in entry)])
        tried = subprocess.run([*argv, "-c", CAN_RUN], env={"PYTHONPATH": path}, cwd="/", capture_output=True)
        if tried.returncode == 0:
            return argv, path
    return None


@pytest.mark.skipif(os.geteuid() != 0, reason="already an ordinary user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv to become an ordinary user with")
@pytest.mark.parametrize("only", [["--only", "E"], pytest.param([], marks=pytest.mark.slow)], ids=["exec", "all"])
def test_local_as_an_ordinary_user(only):
    found = ordinary_python()
    if found is None:
        pytest.skip("no Python here that an ordinary user may run")
    argv, path = found
    home = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    try:
        os.chown(home, NOBODY, NOBODY)
        env = {"HOME": str(home), "PATH": os.defpath, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [
            *argv,
            "-c",
            "from rollyard.cli.main import main; main()",
            "check",
            "sandbox",
            "local",
            "--json",
            *only,
        ]
        done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=500)
        assert done.returncode in (0, 3), done.stderr[-2000:]
        totals = json.loads(done.stdout)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    failed = [f"{o['id']} {o['title']}: {o['why']}" for o in totals["outcomes"] if o["result"] == "failed"]
    assert not failed, "\n".join(failed)
    assert totals["passed"] > (20 if only else 80)
