"""The client, async and blocking: the data plane and its switch, odd answers, what it imports (P8, P9)."""

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollyard as ry
from rollyard import sync
from rollyard.core.errors import ConfigError, EnvError, Error, PlaneRateLimited
from rollyard.core.plane import EnvSpec
from rollyard.plane.api.app import plane_app
from rollyard.plane.engines.choose import engine
from rollyard.plane.parts import assemble
from rollyard.plane.service.access import NewKey
from rollyard.plane.storage.sql import SqlPlane
from rollyard.store import Store
from rollyard.testing.serve import serve_app
from tests.plane.conftest import ADMIN, OWNER
from tests.plane.images import PLAIN_START, plain_image

pytestmark = pytest.mark.anyio
PROJECT = Path(__file__).with_name("plain_project.py")


@pytest.fixture
async def world(tmp_path):
    async with Store.open(tmp_path / "p.db") as store, engine("local") as local:
        parts = await assemble(SqlPlane(store.database), {"local": local}, runs=store)
        spec = EnvSpec(image=await plain_image(PROJECT), start=tuple(PLAIN_START), env={"UNITS": "C"})
        await parts.hub.create("weather", "1", spec, by=ADMIN, owner=OWNER.owner)
        _, key = await parts.access.issue(NewKey(role="owner", owner=OWNER.owner))
        async with serve_app(plane_app(parts)) as url:
            yield url, key, parts


async def test_tools_functions_reward_and_health_of_an_environment_that_is_ready_when_it_is_entered(world):
    url, key, parts = world
    async with ry.plane.connect(url, key) as plane:
        async with plane.open(env="weather@1", ttl_s=300) as one:
            assert [tool.name for tool in await one.list_tools()] == ["get_weather"]
            assert '"units": "C"' in await one.call_tool("get_weather", {"city": "Oslo"})
            with pytest.raises(EnvError, match="no such city"):
                await one.call_tool("get_weather", {"city": "nowhere"})
            assert await one.list_functions() == ["double"]
            assert await one.call_function("double", {"number": 21}) == 42
            assert (await one.call_reward({"answer": "20"}))["score"] == 1.0
            assert (await one.check_health())["cities"] == 1
            with pytest.raises((EnvError, Error)):
                await one.call_function("triple", {"number": 1})
            assert (await plane.instances.logs(one.id, stream="stderr")) is not None
            assert (await plane.trace(one.id))["env"]["id"] == "weather@1"
        assert (await plane.usage())["used"] == 0
        assert (await plane.ready())["ready"] is True


async def test_without_the_data_plane_only_the_control_api_is_touched_and_presign_works(world):
    url, key, parts = world
    async with ry.plane.connect(url, key, data_plane=False) as plane:
        async with plane.open(env="weather@1") as one:  # no probe: this client may not ask
            for call in (
                one.list_tools,
                lambda: one.call_tool("get_weather"),
                one.list_functions,
                lambda: one.call_function("double"),
                one.call_reward,
                one.check_health,
            ):
                with pytest.raises(ConfigError, match="data_plane=False"):
                    await call()
            assert not [
                route for _, _, route, _ in parts.counters.requests if route.endswith(("/data", "/mcp", "{signed}"))
            ]
            assert (await one.wait(8081, "/health")).startswith(url)
    async with ry.plane.connect(url, key) as plane, plane.open(env="weather@1", skip_health=True) as one:
        await one.wait(8081, "/health")
        assert await one.list_functions() == ["double"]


def test_the_blocking_client_does_the_same(tmp_path):
    """In a process of its own, since this loop must not be the server's."""
    script = Path(__file__).with_name("blocking_client.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.split() == ["e@1", "b'hi\\n'", "1", "deleted", "PlaneNotFound"], done.stderr


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["items", "next", "error", "message", "code", "url", "id", "image", "outcomes", "exists", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
ODD = st.tuples(
    st.sampled_from([200, 200, 201, 204, 302, 400, 404, 409, 418, 429, 500, 503]),
    st.binary(max_size=20) | JSON.map(msgspec.json.encode),
)


@asynccontextmanager
async def answering(odd):
    async def handler(request):
        status, body = odd[0]
        return web.Response(status=status, body=b"" if status == 204 else body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def calls(plane):
    one = plane.at("inst_x")
    return [
        lambda: plane.engines(),
        lambda: plane.usage(),
        lambda: plane.ready(),
        lambda: plane.trace("x"),
        lambda: plane.create_key("owner", "ann"),
        lambda: plane.envs.create("e", "1"),
        lambda: plane.envs.exists("e", "1"),
        lambda: plane.envs.upload(b"data"),
        lambda: plane.envs.download("0" * 64),
        lambda: _all(plane.envs.list()),
        lambda: plane.instances.create(image="host"),
        lambda: plane.instances.exec("x", "true"),
        lambda: plane.instances.presign("x", 1),
        lambda: plane.instances.fork("x"),
        lambda: plane.instances.snapshot("x"),
        lambda: plane.instances.delete_many(ids=["x"]),
        lambda: plane.instances.changes(),
        lambda: _all(plane.instances.list()),
        one.list_functions,
        lambda: one.call_function("f", {}),
        one.call_reward,
        one.check_health,
    ]


async def _all(pages):
    return [one async for one in pages]


def test_whatever_a_server_answers_is_a_value_or_a_typed_error():
    """P9: lists, nulls, wrong types, half JSON, other people's pages."""
    odd = [(200, b"")]

    async def everything(examples):
        async with answering(odd) as url, ry.plane.connect(url, "k", timeout_s=20) as plane:
            for odd[0] in examples:
                for call in calls(plane):
                    try:
                        async with asyncio.timeout(20):
                            await call()
                    except Error:
                        pass

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(ODD, min_size=5, max_size=5))
    def run(examples):
        asyncio.run(everything(examples))

    run()


async def test_an_errors_code_says_more_than_its_status():
    odd = [(429, msgspec.json.encode({"error": {"code": "rate_limited", "message": "slow down"}}))]
    async with answering(odd) as url, ry.plane.connect(url, "k") as plane:
        with pytest.raises(PlaneRateLimited, match="slow down"):
            await plane.engines()


def test_the_client_imports_no_provider_no_mcp_and_no_server():
    code = (
        "import sys, rollyard as ry; ry.plane.connect('http://127.0.0.1:1', 'k').at('x'); "
        "print([m for m in ('openai', 'mcp', 'starlette', 'uvicorn', 'sqlalchemy', 'redis') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_default_install_asks_for_no_openai():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert not [name for name in project["dependencies"] if name.startswith(("openai", "anthropic", "litellm"))]


def test_sync_wraps_pages_of_results():
    async def pages():
        yield 1
        yield 2

    assert list(sync.wrap(pages())) == [1, 2]
