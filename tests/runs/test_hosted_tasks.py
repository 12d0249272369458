"""The example tasks on every backend: the same rewards everywhere, or a reason by name. The outcomes are those that the docs
show; `ROLLYARD_WRITE_DOCS=1` records them anew, and writes the page."""

import json
import os
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.sandbox import backend
from rollyard.sandbox.local.backend import LocalBackend
from tests.plane.e2b_server import serving as e2b_serving
from tests.sandbox.remote_servers import serving

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
TASKS = ROOT / "examples" / "tasks"
PLACE = ROOT / "docs" / "sandboxes" / "tasks"
HOSTED = ("local", "e2b", "hf", "daytona", "prime")
NAMES = sorted(path.parent.name for path in TASKS.glob("*/task.toml"))
PI = "pi: bug-fix"  # the row of a real agent
PAGE = PLACE.with_suffix(".md")
HEAD = """# The example tasks on every backend

The reward of each task of `examples/tasks`: of the oracle, and in the row `pi` of that agent with a scripted model. Hosted
backends run with their real SDKs against servers on the loopback, with local sandboxes behind them; what a backend cannot do is
said by name.
"""
KEY = "e2b_" + "0" * 40


@asynccontextmanager
async def hosted_backend(name, tmp_path):
    """The backend, through its real SDK where it has one, with local sandboxes behind it."""
    async with LocalBackend(root=tmp_path / "home") as local:
        if name == "local":
            yield local
        elif name == "e2b":
            pytest.importorskip("e2b", reason="the e2b SDK is not installed")
            options = {"key": KEY, "isolation": "namespace"}
            async with e2b_serving(local) as url, backend(name, url=url, **options) as made:
                yield made
        else:
            async with serving(name, local) as server, backend(name, **server.options) as made:
                yield made


async def outcome_of(task_name, agent, made):
    (task,) = ry.Taskset.load(TASKS / task_name)
    policy = ry.policy.scripted(str(TASKS.parent / "scripts" / "bug-fix.yaml"))  # the oracle asks no model
    done = await ry.run_rollout(task, agent=agent, policy=policy, sandbox=made)
    if done.failure is not None:
        return f"{done.failure.boundary}: {done.failure.message}"
    return str(done.reward)


def hold(name, row, found):
    """Every outcome is the one on record, and the record is that of local sandboxes but for reasons."""
    file = PLACE / f"{name}.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    if os.environ.get("ROLLYARD_WRITE_DOCS"):
        PLACE.mkdir(exist_ok=True)
        file.write_text(json.dumps({**known, row: found}, indent=1, sort_keys=True) + "\n")
        known = {row: found}
    assert known[row] == found


def render():
    """The page of what is on record."""
    known = {file.stem: json.loads(file.read_text()) for file in sorted(PLACE.glob("*.json"))}
    rows = sorted({row for found in known.values() for row in found})
    lines = [HEAD, "| task | " + " | ".join(known) + " |", "|---" * (len(known) + 1) + "|"]
    lines += [f"| {row} | " + " | ".join(found.get(row, "not run") for found in known.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def test_the_page_shows_what_is_on_record():
    if os.environ.get("ROLLYARD_WRITE_DOCS"):
        PAGE.write_text(render())
    assert PAGE.read_text() == render()


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTED)
@pytest.mark.parametrize("task", NAMES)
async def test_the_oracle_earns_the_same_on_every_backend(name, task, tmp_path):
    async with hosted_backend(name, tmp_path) as made:
        hold(name, task, await outcome_of(task, "oracle", made))


@pytest.mark.slow
@pytest.mark.agent
@pytest.mark.parametrize("name", HOSTED)
async def test_a_real_agent_earns_the_same_on_every_backend(name, tmp_path):
    async with hosted_backend(name, tmp_path) as made:
        hold(name, PI, await outcome_of("bug-fix", "pi", made))


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("task", NAMES)
async def test_the_oracle_earns_the_same_on_an_engine(task, engine):
    kind, host = engine
    async with backend(kind, host=host) as made:
        hold(kind, task, await outcome_of(task, "oracle", made))


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.agent
async def test_a_real_agent_earns_the_same_on_an_engine(engine):
    kind, host = engine
    async with backend(kind, host=host) as made:
        hold(kind, PI, await outcome_of("bug-fix", "pi", made))
