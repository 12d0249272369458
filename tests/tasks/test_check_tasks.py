"""`check tasks`: what it accepts, and each kind of bad task that it must find."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rollyard.tasks.harbor.load import load_folder
from rollyard.tasks.lint import lint
from rollyard.testing.tasks import CheckOptions, check_tasks

SEALED = '[metadata.rollyard]\ngrade = "sealed"\n[environment]\ndocker_image = "host"\nworkdir = "/app"\n'


async def check(source, backend, **options):
    return {outcome.task_id: outcome async for outcome in check_tasks(str(source), backend, CheckOptions(**options))}


@pytest.mark.anyio
async def test_good_and_bad_tasks_are_told_apart(folders, backend, tmp_path):
    test = "#!/bin/sh\n{}\n"
    folders.simple(tmp_path / "good", SEALED)
    folders.simple(tmp_path / "free", SEALED, **{"tests/test.sh": test.format("echo 1 > /logs/verifier/reward.txt")})
    folders.simple(tmp_path / "unsolved", SEALED, **{"solution/solve.sh": test.format("true")})
    folders.simple(tmp_path / "mute", SEALED, **{"tests/test.sh": test.format(": reward")})
    flaky = "date +%N | sed 's/^0*//;s/^/0./' > /logs/verifier/reward.txt"
    folders.simple(tmp_path / "flaky", SEALED, **{"tests/test.sh": test.format(flaky)})
    folders.simple(tmp_path / "broken", "[environment]\ncpuz = 1\n")
    found = await check(tmp_path, backend, repeats=2)
    assert {name for name, outcome in found.items() if outcome.ok} == {"good"}
    errors = {name: " ".join(f.message for f in o.findings if f.level == "error") for name, o in found.items()}
    assert "doing nothing" in errors["free"]
    assert "own solution gets 0" in errors["unsolved"]
    assert "no reward in 2 of 2" in errors["mute"]
    assert "neither /logs/verifier/reward.json" in errors["mute"]
    assert "different rewards" in errors["flaky"]
    assert found["flaky"].flaky
    assert "cpuz" in errors["broken"]
    good = found["good"]
    assert [(p.agent, p.rewards) for p in good.proofs] == [("nop", (0.0, 0.0)), ("oracle", (1.0, 1.0))]
    assert all(second > 0 for proof in good.proofs for second in (*proof.seconds, *proof.verify_seconds))
    assert (good.files, good.bytes > 0) == (4, True)
    assert await backend.list() == []


def findings(task):
    return [(finding.level, finding.where, finding.message) for finding in lint(task)]


@pytest.mark.anyio
async def test_a_task_that_the_backend_cannot_run_is_one_outcome_of_many(folders, backend, tmp_path):
    folders.simple(tmp_path / "good", SEALED)
    folders.simple(tmp_path / "tpu", SEALED + '[environment.tpu]\ntype = "v5e"\ntopology = "2x2"\n')
    found = await check(tmp_path, backend, repeats=1, trivial=True)
    assert {name: outcome.ok for name, outcome in found.items()} == {"good": True, "tpu": False}
    assert "asks for accelerators" in found["tpu"].findings[-1].message


def test_lint_says_what_reading_shows(folders, tmp_path):
    good = load_folder(folders.simple(tmp_path / "a", SEALED))
    assert [f for f in findings(good) if f[0] == "error"] == []
    script = "pip install pytest\necho 1 > /logs/verifier/rewards.json\n"
    bad = load_folder(folders.simple(tmp_path / "b", "", **{"tests/test.sh": script, "instruction.md": "see /tests"}))
    said = " ".join(message for _, _, message in findings(bad))
    for part in ("rewards.json", "no #! line", "no network", "own files", "hardly anything", "own file system"):
        assert part in said
    bare = msgspec.structs.replace(good, verifier=None, solution=None)
    assert ("error", "verifier", "there is no verifier, so there is never a reward") in findings(bare)
    assert any("can be solved" in message for _, _, message in findings(bare))
    wrong = msgspec.structs.replace(good, verifier=msgspec.structs.replace(good.verifier, layers=("pip:pytest",)))
    assert any("one version exactly" in message for _, _, message in findings(wrong))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import ranges\n", "import of ranges"),
        ("def test():\n    from ranges.deep import merge\n", "import of ranges.deep"),
        ("import sys\nsys.path.insert(0, '/app')\n", "/app on sys.path"),
        ("exec(open('/app/ranges.py').read())\n", "exec of a file in /app"),
        ("import runpy\nrunpy.run_path('/app/x.py')\n", "run_path of a file in /app"),
        ("import importlib.util as u\nu.spec_from_file_location('r', '/app/r.py')\n", "spec_from_file_location"),
        ("import json, subprocess\nsubprocess.run(['python3', '/app/ranges.py'])\n", None),
        ("PROGRAM = 'from ranges import merge'\n", None),
    ],
)
def test_lint_warns_of_tests_that_import_the_agents_code(folders, tmp_path, code, said):
    files = {"tests/test_it.py": code, "instruction.md": "Repair `/app/ranges.py` so that it merges ranges."}
    task = load_folder(folders.simple(tmp_path / "a", SEALED, **files))
    found = [message for _, where, message in findings(task) if where == "tests/test_it.py"]
    assert [said in message for message in found] == ([True] if said else []), found
    assert not [f for f in findings(task) if "own process" in f[2] and not said]


@pytest.mark.slow
def test_the_examples_are_proved_by_the_command():
    root = Path(__file__).parents[2]
    rollyard = Path(sys.executable).with_name("rollyard")
    command = [rollyard, "check", "tasks", root / "examples" / "tasks", "--json", "-n", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads(done.stdout)
    assert len(checks) == 10
    assert all(check["ok"] for check in checks)
    assert all(finding["level"] == "warning" for check in checks for finding in check["findings"])
