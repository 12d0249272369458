"""The environment server of one file: what it serves, as a program of a bare Python."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollyard.inside.plain_env import load
from rollyard.tools import RemoteTools

HERE = Path(__file__).parent
PROJECT = HERE.parent / "plane" / "plain_project.py"
DONE = {"task_name": "weather", "status": "done", "score": 1.0}
PLAIN = Path(__import__("rollyard.inside.plain_env", fromlist=["x"]).__file__)


@contextmanager
def served(target):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-S", str(PLAIN), str(target), "--port", str(port)]  # no installed package is in reach
    program = subprocess.Popen(command, stderr=subprocess.PIPE, cwd="/")
    try:
        until = time.monotonic() + 30
        while time.monotonic() < until and program.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        program.kill()
        program.wait(10)


def asked(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=20) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_functions_reward_and_health_are_served():
    with served(PROJECT) as url:
        assert asked(f"{url}/health") == (200, {"success": True, "data": {"status": "success", "cities": 1}})
        assert asked(f"{url}/functions/double", {"number": 21}) == (200, {"success": True, "data": 42})
        assert asked(f"{url}/task/reward", {"answer": "20"}) == (200, {"success": True, "data": DONE})
        status, listed = asked(f"{url}/functions/list")
        assert status == 200 and listed["data"]["total"] == 3
        assert [one["endpoint"] for one in listed["data"]["functions"]] == ["/functions/double"]
        assert asked(f"{url}/functions/get_weather", {"city": "Oslo"})[0] == 404  # an agent's tool is no function
        assert asked(f"{url}/functions/double", {"count": 1})[0] == 400
        status, told = asked(f"{url}/functions/double", {"number": None})
        assert status == 500 and "TypeError" in told["error"]


@pytest.mark.anyio
async def test_tools_are_mcp_and_coroutines_are_run():
    with served(PROJECT) as url:
        async with RemoteTools(f"{url}/mcp") as tools:
            (spec,) = await tools.list()
            assert spec.name == "get_weather" and json.loads(spec.schema)["required"] == ["city"]
            said = await tools.call("get_weather", {"city": "Oslo"})
            assert "20" in str(said)


def test_a_file_that_cannot_be_imported_ends_the_server(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "good.py").write_text("from plain_env import tool\n@tool\ndef a() -> int:\n    return 1\n")
    (tmp_path / "src" / "bad.py").write_text("import nothing_like_this\n")
    done = subprocess.run([sys.executable, str(PLAIN), str(tmp_path)], capture_output=True, timeout=60)
    assert done.returncode != 0 and b"nothing_like_this" in done.stderr
    (tmp_path / "src" / "bad.py").rename(tmp_path / "src" / "_bad.py")
    listed = load(tmp_path).tools.answer({"method": "tools/list"})["result"]["tools"]
    assert [tool["name"] for tool in listed] == ["a"]


def test_two_rewards_and_none_of_anything_are_refused(tmp_path):
    one = "from plain_env import reward\n@reward\ndef {}() -> int:\n    return 1\n"
    (tmp_path / "a.py").write_text(one.format("a") + one.format("b"))
    with pytest.raises(ValueError, match="two functions are the reward"):
        load(tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="nothing in"):
        load(tmp_path)
