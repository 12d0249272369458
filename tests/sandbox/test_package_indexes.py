"""pip and npm against indexes that refuse, lack the package or cut a download: what cannot heal is asked once and named."""

import os
import shutil
import socket
import sys

import pytest
from aiohttp import web

from rollyard.core.errors import CommandFailed
from rollyard.images.host_programs import INDEX_TIMEOUTS, build_env, run_npm, run_pip

pytestmark = pytest.mark.anyio
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
PAGE = '<a href="/files/greeter-1.0-py3-none-any.whl">greeter-1.0-py3-none-any.whl</a>'


@pytest.fixture
async def index():
    """`url, asked`: a server that has one package, whose file is always cut, and the paths it was asked for."""
    asked = []

    async def answer(request):
        asked.append(request.path)
        if request.path == "/simple/greeter/":
            return web.Response(text=PAGE, content_type="text/html")
        if request.path.startswith("/files/"):
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b"half")
            request.transport.close()
            return response
        return web.json_response({"error": "not here"}, status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    await runner.cleanup()


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def env(tmp_path, monkeypatch):
    """No settings of this machine, and caches of its own."""
    for name in [name for name in os.environ if name.upper().startswith(("PIP_", "NPM_CONFIG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NPM_CONFIG_USERCONFIG", os.devnull)
    return build_env(tmp_path)


async def download(name, url, env, place):
    argv = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--index-url",
        f"{url}/simple",
        "-d",
        place,
        name,
    ]
    await run_pip([str(word) for word in argv], env=env, cwd=place, timeout=120, what=f"pip download {name}")


async def install(name, url, env, place):
    argv = ["npm", "install", "--json", "--loglevel=error", f"--registry={url}", "--", name]
    await run_npm(argv, env=env, cwd=place, timeout=120, what=f"npm install {name}")


async def test_pip_asks_once_for_what_the_index_does_not_have(index, env, tmp_path):
    url, asked = index
    with pytest.raises(CommandFailed, match=r"No matching distribution found for absent \(check the names"):
        await download("absent", url, env, tmp_path)
    assert asked == ["/simple/absent/"]


@pytest.mark.slow
async def test_pip_fetches_again_what_came_broken(index, env, tmp_path):
    url, asked = index
    with pytest.raises(CommandFailed, match="greeter"):
        await download("greeter", url, env, tmp_path)
    assert asked.count("/simple/greeter/") == 3


async def test_pip_names_the_index_that_refuses(env, tmp_path, free_port):
    with pytest.raises(CommandFailed, match=r"Connection refused.*check .* that pip reaches its index"):
        await download("greeter", f"http://127.0.0.1:{free_port}", env, tmp_path)


@needs_npm
async def test_npm_asks_once_for_what_the_registry_does_not_have(index, env, tmp_path):
    url, asked = index
    with pytest.raises(CommandFailed, match=r"npm install absent failed: E404: .*absent.*\(check the names"):
        await install("absent", url, env, tmp_path)
    assert asked == ["/absent"]


@needs_npm
async def test_npm_names_the_registry_that_refuses(env, tmp_path, free_port):
    with pytest.raises(CommandFailed, match=rf"failed: ECONNREFUSED: .*127\.0\.0\.1:{free_port}/greeter"):
        await install("greeter", f"http://127.0.0.1:{free_port}", env, tmp_path)


@pytest.mark.parametrize("name", ["PIP_RETRIES", "NPM_CONFIG_FETCH_RETRIES", "npm_config_fetch_retries"])
def test_the_users_own_patience_stands(env, tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "7")
    ours = build_env(tmp_path)
    assert [value for key, value in ours.items() if key.lower() == name.lower()] == ["7"]
    assert set(map(str.lower, INDEX_TIMEOUTS)) <= set(map(str.lower, ours))
