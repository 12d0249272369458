"""The way out of sandboxes over the E2B API: hosts that are named, and whatever cannot be kept refused by name."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import rollyard as ry
from rollyard.testing.serve import serve_app
from tests.plane.served import serving

e2b = pytest.importorskip("e2b", reason="the extra `e2b` is not installed")
pytestmark = pytest.mark.anyio
ASK = """
import urllib.error, urllib.request
try:
    print(urllib.request.urlopen({url!r}, timeout=10).read().decode())
except urllib.error.HTTPError as error:
    print(error.code)
except OSError as error:
    print(type(error).__name__)
"""


async def hello(request):
    return PlainTextResponse("hello")


@pytest.fixture
async def env(tmp_path):
    async with serving(tmp_path, engine="local") as found:
        yield found


def account(env):
    return {"api_key": env["E2B_API_KEY"], "api_url": env["E2B_API_URL"]}


async def create(env, **asked):
    return await e2b.AsyncSandbox.create(timeout=120, sandbox_url=env["E2B_API_URL"], **account(env), **asked)


async def ask(box, url):
    await box.files.write("/tmp/ask.py", ASK.format(url=url))
    return (await box.commands.run("python3 /tmp/ask.py")).stdout.strip()


async def test_only_named_hosts_are_open_and_others_can_be_named_later(env):
    async with serve_app(Starlette(routes=[Route("/", hello)])) as url:
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            named = await create(env, network={"allow_out": ["example.invalid"], "deny_out": ["0.0.0.0/0"]})
            told = (await named.get_info()).network
            assert (told["allow_out"], told["deny_out"]) == (["example.invalid"], ["0.0.0.0/0"])
            assert await ask(named, "http://another.invalid/") == "403"
            rule = url.removeprefix("http://") + "@127.0.0.1"
            made = await plane.instances.create(image="host", network="allowlist", allowed_hosts=[rule])
            box = await e2b.AsyncSandbox.connect(made["id"], sandbox_url=env["E2B_API_URL"], **account(env))
            assert await ask(box, url) == "hello"
            await box.update_network({"deny_out": ["0.0.0.0/0"], "allow_out": ["example.invalid"]})
            assert await ask(box, url) != "hello"
            closed = await create(env, allow_internet_access=False)
            assert not (await closed.get_info()).network
            with pytest.raises(e2b.SandboxException, match="created without allow_out"):
                await closed.update_network({"deny_out": ["0.0.0.0/0"], "allow_out": ["example.invalid"]})
            with pytest.raises(e2b.SandboxException, match="open but for a list"):
                await box.update_network({})
            await asyncio.gather(named.kill(), box.kill(), closed.kill())


@pytest.mark.parametrize(
    "network",
    [
        {"deny_out": ["10.0.0.1"]},
        {"allow_out": ["a.example:22"]},
        {"allow_out": ["a.example@10.0.0.1"]},
        {"allow_out": ["?"]},
    ],
    ids=["deny-one", "port", "address", "no-name"],
)
@pytest.mark.ordinary("port")
async def test_a_network_that_cannot_be_kept_is_refused_by_name(env, network):
    with pytest.raises(e2b.SandboxException, match="is not served here|allows no host"):
        await create(env, network=network)
    assert await e2b.AsyncSandbox.list(**account(env)).next_items() == []
