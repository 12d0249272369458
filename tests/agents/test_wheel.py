"""What users install is complete: the wheel, alone in a fresh environment, runs an agent with the prompt that ships in it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, pathlib, sys
import rollyard as ry

assert pathlib.Path(ry.__file__).is_relative_to(sys.prefix), ry.__file__

async def main():
    policy = ry.policy.scripted([{"shell": "echo hello > out.txt"}, {"text": "done"}])
    prompt = ry.agents.default_prompt()
    done = await ry.run_rollout(
        "write out.txt", agent="shell-agent", policy=policy, system_prompt=prompt, verify=['test "$(cat out.txt)" = hello']
    )
    first = done.trajectory.messages(done.trajectory.records[0].id)
    print(done.status, done.reward, first[0].text == prompt)

asyncio.run(main())
"""


@pytest.mark.agent
def test_an_agent_runs_from_the_built_wheel_with_the_prompt_inside_it(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "rollyard/py.typed" in names  # type checkers read its annotations
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", fresh], check=True, timeout=60)
    (packages,) = fresh.glob("lib/python3*/site-packages")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        fresh / "bin/python",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, wheel], check=True, timeout=60)
    # what it depends on is found where these tests found it; the package itself is not
    (packages / "dependencies.pth").write_text(str(Path(msgspec.__file__).parents[1]) + "\n")
    done = subprocess.run(
        [fresh / "bin/python", "-c", PROGRAM], cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, check=False,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["completed", "1.0", "True"], done.stderr
