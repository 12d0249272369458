"""What only the model server knows about a policy's settings is asked before anything opens, and told once."""

from __future__ import annotations

import socket
import sys
from contextlib import aclosing

import anyio
import pytest
from aiohttp import web

import rollyard as ry
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.page.actions import LocalActions
from rollyard.runs.rollout.modes import choose
from rollyard.runs.rollout.open_policy import learn_model
from rollyard.runs.rollout.options import RolloutOptions
from tests.policy.conftest import make_model
from tests.runs.conftest import CHECK

pytestmark = pytest.mark.anyio


class Unopened:
    """A backend that no rollout of these tests may come to."""

    def __getattr__(self, name):
        raise AssertionError(f"the backend was asked for {name}")


@pytest.fixture
async def serve():
    runners = []

    async def start(root):
        async def handle(request):
            if request.path != "/v1/models":
                return web.json_response({"error": "Forbidden"}, status=403)
            return web.json_response({"data": [{"id": "m", "owned_by": "vllm", "root": str(root)}]})

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runners.append(web.AppRunner(app, shutdown_timeout=0.1))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runners[-1].addresses[0][1]}/v1"

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_a_served_template_without_a_place_for_tools_is_told_before_anything_opens(serve, tmp_path):
    url = await serve(make_model(tmp_path / "m", "stripping"))
    for policy in (f"tokens:{url}", ry.policy.tokens(url)):
        with pytest.raises(Unsupported, match="has no place for tools") as refused:
            await ry.run_rollout("x", agent="shell-agent", policy=policy, sandbox=Unopened())
        assert "#tools=omit" in str(refused.value)
    async with aclosing(ry.policy.parse(f"tokens:{url}#tools=omit")) as policy:
        await learn_model(policy, ry.agents.get("shell-agent"))
        assert policy.takes_tools
        choose(RolloutOptions(), policy=policy, agent=ry.agents.get("shell-agent"))


async def test_a_served_model_whose_files_are_not_here_is_told_before_anything_opens(serve, tmp_path):
    url = await serve(tmp_path / "on-another-machine")
    with pytest.raises(ConfigError, match="on-another-machine', which is not here"):
        await ry.run_rollout("x", agent="shell-agent", policy=f"tokens:{url}", sandbox=Unopened())


async def test_the_page_tells_it_before_a_rollout_begins(serve, tmp_path):
    url = await serve(make_model(tmp_path / "m", "stripping"))
    async with ry.Store.open(tmp_path / "runs.db") as store, LocalActions(store, None) as actions:
        with pytest.raises(Unsupported, match="has no place for tools"):
            await actions.start({"agent": "shell-agent", "instruction": "x", "policy": f"tokens:{url}"})
        assert actions.running == ()


async def test_the_command_line_tells_it_once_and_ends_with_2(serve, tmp_path):
    url = await serve(make_model(tmp_path / "m", "stripping"))
    words = ["run", "--instruction", "x", "--agent", "shell-agent", "--policy", f"tokens:{url}"]
    command = [sys.executable, "-m", "rollyard", *words, "--store", str(tmp_path / "one.db")]
    done = await anyio.run_process(command, check=False)
    said = done.stderr.decode()
    assert done.returncode == 2, said
    assert said.count("has no place for tools") == 1 and "#tools=omit" in said and "Traceback" not in said


@pytest.mark.slow
async def test_a_server_that_is_away_fails_the_rollout_and_not_the_caller(backend):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        done = await ry.run_rollout("x", agent="shell-agent", policy=f"tokens:{url}", sandbox=backend, verify=CHECK)
    assert (done.reward, done.failure.boundary, done.failure.retry) == (None, "policy", True)
