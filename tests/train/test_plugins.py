"""What each trainer loads is run by that trainer: agents of a real server, a tiny model that answers their calls, and where the
trainer has one for a CPU, a step of its own loss. Where a package cannot be had here the test says why it is skipped."""

import os

import anyio
import pytest

from tests.train.foreign_python import foreign
from tests.train.served import HELLO, server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TORCH = ("torch==2.13.0", "transformers==5.17.0")
VERL = [
    "verl==0.9.1",
    "torch==2.13.0",
    "tensordict==0.15.3",
    "hydra-core==1.3.8",
    "ray==2.60.0",
    "pillow==13.0.0",
    "transformers==5.22.2",
    "datasets==5.2.0",
    "codetiming==1.4.0",
    "peft==0.21.2",
    "orjson==3.13.0",
    "uvicorn==0.54.0",
    "fastapi==0.162.4",
    "cachetools==8.0.0",
    "torchdata==0.11.0",
]
SKYRL = [
    "skyrl==0.3.0",
    "torch==2.13.0",
    "ray==2.56.0",
    "hydra-core",
    "loguru",
    "jaxtyping",
    "tensordict",
    "aiohttp",
    "skyrl-gym==0.4.0",
    "torchdata==0.11.0",
]
ATROPOS = ("atroposlib==0.4.0", "fastapi==0.162.4", "httpx==0.28.1", "numpy==2.4.6", "zstandard==0.25.0")


async def told(tmp_path, run, script, *words, answers=None):
    """What a script says of rollouts whose calls its engine answers, or `answers` do."""
    queue = ("--policy", "queue#renderer=bytes")
    async with server(tmp_path, "--jobs", "8", *(() if answers else queue), script=answers) as (url, _):
        return await anyio.to_thread.run_sync(run, script, *words, url)


def source(variable, name):
    """A checkout of a trainer that no package index has."""
    if not os.environ.get(variable):
        pytest.skip(f"{name} is on no package index: {variable} names a checkout of it")
    return os.environ[variable]


@pytest.mark.parametrize("part", ["step", "own_generation"])
async def test_trl_trains_on_rollouts_of_a_server(tmp_path, part):
    run = foreign("trl-1.16.0", "trl==1.16.0", *TORCH, "requests")
    assert await told(tmp_path, run, "plugin_trl.py", part) == "ok"


async def test_verls_worker_runs_our_loop_and_its_loss_moves_the_model(tmp_path):
    assert await told(tmp_path, foreign("verl-0.9.1", *VERL, alone=True), "plugin_verl.py") == "ok"


async def test_skyrl_checks_what_our_generator_gives_and_masks_what_nobody_judged(tmp_path):
    assert await told(tmp_path, foreign("skyrl-0.3.0", *SKYRL), "plugin_skyrl.py") == "ok"


async def test_openrlhf_loads_our_executor(tmp_path):
    needs = ("openrlhf==0.11.2", *TORCH, "pylatexenc", "ray==2.60.0", "datasets==5.2.0")
    assert await told(tmp_path, foreign("openrlhf-0.11.2", *needs, alone=True), "plugin_openrlhf.py") == "ok"


async def test_areals_loss_takes_the_episodes_of_our_workflow(tmp_path):
    assert await told(tmp_path, foreign("areal-1.0.4", "areal==1.0.4", "torch==2.13.0"), "plugin_areal.py") == "ok"


@pytest.mark.parametrize("variable", ["ROLLYARD_SLIME", "ROLLYARD_OPENCLAW_SLIME"])
async def test_slime_and_its_fork_call_our_rollout_function(tmp_path, variable):
    checkout = source(variable, "slime")
    run = foreign("trl-1.16.0", "trl==1.16.0", *TORCH, "requests")
    assert await told(tmp_path, run, "plugin_slime.py", checkout) == "ok"


async def test_tinkers_sampler_answers_and_its_data_have_advantages(tmp_path):
    assert await told(tmp_path, foreign("tinker-0.36.0", "tinker==0.36.0"), "plugin_tinker.py") == "ok"


async def test_art_gathers_groups_of_a_server(tmp_path):
    run = foreign("art-0.5.18", "openpipe-art==0.5.18")
    assert await told(tmp_path, run, "plugin_art.py", answers=HELLO) == "ok"


async def test_atropos_server_gets_groups_of_our_environment(tmp_path):
    run = foreign("atropos-0.4.0", *ATROPOS, alone=True)
    assert await told(tmp_path, run, "plugin_atropos.py", answers=HELLO) == "ok"


def test_rllms_engine_runs_our_flow():
    checkout = source("ROLLYARD_RLLM", "rLLM")
    run = foreign("trl-1.16.0", "trl==1.16.0", *TORCH, "requests")
    assert run("plugin_rllm.py", checkout) == "ok"


def test_agent_lightnings_runner_runs_our_agent():
    run = foreign("agentlightning-0.3.0", "agentlightning==0.3.0")
    assert run("plugin_agent_lightning.py") == "ok"


def test_the_agentcore_app_runs_our_entry_point():
    run = foreign("agentcore-0.2.0", "agentcore-rl-toolkit==0.2.0", "bedrock-agentcore==1.25.0")
    assert run("plugin_agentcore.py") == "ok"
