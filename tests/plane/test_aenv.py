"""AEnvironment's API: the real `aenvironment` package and command line, and what the data port refuses."""

import asyncio
import json
import os
import sys
from functools import partial
from importlib import resources
from pathlib import Path

import aiohttp
import pytest

import rollyard as ry
from rollyard.core.errors import PlaneInvalid
from rollyard.images.store import ImageStore
from rollyard.plane.compat.aenv.envelope import duration, seconds
from rollyard.plane.http.quantities import cores, megabytes
from rollyard.testing.serve import serve_app
from tests.plane.arca_server import KEY, ArcaStandIn
from tests.plane.images import PLAIN_START, image_of, plain_image
from tests.plane.served import serving
from tests.plane.venvs import interpreter, there, told, unless_there

pytestmark = pytest.mark.anyio
HERE = Path(__file__).parent
VERSION = "0.1.7"
PACKAGE = f"aenvironment=={VERSION}"
# What the stand-in environment of the tests without the package is: a server that takes its time to come up.
LATE = """
import http.server, json, sys, time
time.sleep(float(sys.argv[1]))
class Env(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        said = json.dumps({"success": True, "data": {"status": "healthy", "path": self.path, "seen": dict(self.headers)}})
        self.send_response(200); self.send_header("content-length", str(len(said))); self.end_headers()
        self.wfile.write(said.encode())
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", 8081), Env).serve_forever()
"""


def installed():
    """Whether nothing has to be downloaded first."""
    store = ImageStore()
    layers = (store.layer_record(layer) for layer in store.layers.ids())
    return there("aenvironment", VERSION) and any(PACKAGE in record.spec.pip for record in layers)


sdk = unless_there("aenvironment", VERSION)
everything = () if installed() else pytest.mark.slow


@pytest.mark.parametrize("project", [pytest.param("plain", marks=sdk), pytest.param("aenv", marks=everything)])
@pytest.mark.ordinary("aenv")
async def test_the_real_package_drives_an_environment(tmp_path, project):
    """`plain` is served by this project's one file, `aenv` by AEnvironment's own server, as it is."""
    python = await asyncio.to_thread(interpreter, "aenvironment", VERSION)
    if project == "aenv":
        image, inner = await image_of(HERE / "aenv_project", PACKAGE)
        start = [inner, "-m", "aenv.main", "/env", "--host", "127.0.0.1", "--port", "8081"]
    else:
        image, start = await plain_image(HERE / "plain_project.py"), PLAIN_START
    async with serving(tmp_path) as env:
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            await plane.envs.create("weather", "1.0", owner="aenv", image=image, start=start)
            where = {"AENV_SYSTEM_URL": env["AENV_SYSTEM_URL"]}
            seen = await told(python, HERE / "aenv_client.py", "weather@1.0", env=where, timeout=240)
            assert [one async for one in plane.instances.list()] == []
    assert seen["info"]["status"] == "Running"
    assert seen["tools"] == ["weather@1.0/get_weather"]
    assert seen["called"] == [False, {"city": "Oslo", "temperature": 20, "units": "celsius"}]
    assert seen["tool_error"] is True
    assert (seen["function"], seen["functions"]) == (42, 3)
    assert seen["reward"] == {"task_name": "weather", "status": "done", "score": 1.0}
    assert seen["health"]["data"]["status"] == "success"
    assert "404" in seen["no_function"]
    assert seen["url"].startswith(env["ROLLYARD_URL"] + "/at/")
    assert seen["items"] and seen["all"] == ["a"]
    assert seen["one"] == ["weather", "1.0", {"team": "a", "owner": "ann", "engine": "local"}]
    assert "no instance" in seen["missing"] and "nothing@1.0" in seen["unknown"]
    assert "enable_data_plane=False" in seen["bare_tools"] and "/at/" in seen["bare_url"]


async def test_the_same_environment_answers_through_the_planes_gateway(tmp_path):
    image = await plain_image(HERE / "plain_project.py")
    async with serving(tmp_path) as env:
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            await plane.envs.create("weather", "1.0", image=image, start=PLAIN_START)
            made = await plane.instances.create(env="weather@1.0", ttl_s=120)
            await plane.instances.wait(made["id"], 8081, "/health")
            place = f"{env['ROLLYARD_URL']}/v1/instances/{made['id']}"
            async with ry.tools.RemoteTools(f"{place}/mcp", env["ROLLYARD_KEY"]) as tools:
                assert [spec.name for spec in await tools.list()] == ["get_weather"]
                assert json.loads(await tools.call("get_weather", {"city": "Oslo"}))["temperature"] == 20
            bears = {"Authorization": f"Bearer {made['token']}"}
            async with aiohttp.ClientSession(headers=bears) as session:
                async with session.post(f"{place}/data/task/reward", json={"answer": "20"}) as reply:
                    assert (await reply.json())["data"]["score"] == 1.0


ARCA = """
import asyncio, json, urllib.request
from aenv import Environment

async def main():
    mounts = [{"id": "OSS_x", "remote_dir": "/data", "local_dir": "/workspace"}]
    env = Environment("boxed@1", ttl="90s", enable_data_plane=False, mount_points=mounts, owner="ann", max_retries=0)
    async with env:
        url = await env.presign_url(18080, expiration_time_in_minutes=0.5)
        said = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=20).read().decode())
        try:
            await env.list_tools()
        except Exception as error:  # the words are what the test asks for
            refused = str(error)
    print(json.dumps({"said": said, "refused": refused}))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", [pytest.param(VERSION, marks=sdk)])
async def test_an_arca_sandbox_is_used_by_signed_urls_with_the_data_plane_off(tmp_path, version):
    """P5, P6, P8: the client does not know the engine, and nothing but the control port is touched."""
    python = await asyncio.to_thread(interpreter, "aenvironment", version)
    (tmp_path / "client.py").write_text(ARCA)
    arca = ArcaStandIn()
    async with serve_app(arca.app()) as url, aiohttp.ClientSession() as session:
        async with serving(tmp_path, engine=f"local,arca={url}", environ={"ARCA_API_KEY": KEY}) as env:
            control, data = f"{env['AENV_SYSTEM_URL']}:8080", f"{env['AENV_SYSTEM_URL']}:8081"
            project = {"name": "boxed", "version": "1", "deployConfig": {"arcaTemplateId": "tpl-7", "cpu": "2"}}
            async with session.post(f"{control}/env", json=project) as reply:
                assert (await reply.json())["success"]
            where = {"AENV_SYSTEM_URL": env["AENV_SYSTEM_URL"]}
            seen = await told(python, tmp_path / "client.py", env=where)
            assert seen["said"] == "port 18080 of sb-1" and "enable_data_plane=False" in seen["refused"]
            (asked,) = arca.asked
            assert (asked["template_id"], asked["ttl_in_minutes"]) == ("tpl-7", 2)
            assert asked["mount_points"] == [{"id": "OSS_x", "remote_dir": "/data", "local_dir": "/workspace"}]
            assert not arca.sandboxes
            async with session.post(f"{control}/env-instance", json={"envName": "boxed@1"}) as reply:
                made = (await reply.json())["data"]
            bears = {"AEnvCore-EnvInstance-ID": made["id"], "AEnvCore-MCPProxy-URL": f"http://{made['ip']}:8081"}
            for path in ("/health", "/mcp", "/functions/list"):
                async with session.get(data + path, headers=bears) as reply:
                    assert reply.status == 501 and "presign" in (await reply.json())["message"]
            async with session.get(f"{env['ROLLYARD_URL']}/v1/engines", headers=bearer(env["ROLLYARD_KEY"])) as reply:
                can = (await reply.json())["arca"]
                assert (can["list"], can["presign"], can["exec"], can["dial"]) == (False, True, False, False)


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.slow
async def test_the_real_command_line_pushes_shows_and_runs(tmp_path):
    python = await asyncio.to_thread(interpreter, "aenvironment", VERSION)
    async with serving(tmp_path) as env:
        where = {"AENV_SYSTEM_URL": env["AENV_SYSTEM_URL"], "HUB_BACKEND": f"{env['AENV_SYSTEM_URL']}:8080"}
        aenv = partial(command_line, python, tmp_path, where)
        await aenv("init", "oslo")
        project = tmp_path / "oslo"
        config = json.loads((project / "config.json").read_text())
        config["artifacts"] = []
        config["deployConfig"] = {"environmentVariables": {"CITY": "Oslo"}, "start": ["sleep", "1000"]}
        (project / "config.json").write_text(json.dumps(config))
        assert "Push successfully" in await aenv("push", "--work-dir", str(project), cwd=project)
        assert "already exists" in await aenv("push", "--work-dir", str(project), cwd=project)
        version = config["version"]
        shown = json.loads(await aenv("get", "oslo", "-v", version))
        assert (shown["name"], shown["status"]) == ("oslo", 6)
        assert shown["deploy_config"] == config["deployConfig"]
        assert [one["name"] for one in json.loads(await aenv("list", "--format", "json"))] == ["oslo"]
        made = await aenv("instance", "create", f"oslo@{version}", "--skip-health", "--keep-alive", "--owner", "ann")
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            (one,) = [one async for one in plane.instances.list()]
            assert one["id"] in made and one["labels"] == {"owner": "ann"}
            assert (await plane.instances.exec(one["id"], "echo $CITY")).stdout == b"Oslo\n"
            assert one["id"] in await aenv("instance", "list")
            assert one["id"] in await aenv("instance", "list", "--name", "oslo")
            assert one["id"] in await aenv("instance", "get", one["id"])
            await aenv("instance", "delete", one["id"], "--yes")
            assert [one async for one in plane.instances.list()] == []
        await aenv("service", "list")


SKIPPING = """
import asyncio, json, sys
from aenv import Environment

async def main():
    try:
        async with Environment(sys.argv[1], skip_for_healthy=True, max_retries=0, timeout=60) as env:
            said = await env.call_tool(f"{sys.argv[1]}/get_weather", {"city": "Oslo"})
        seen = {"said": json.loads(said.content[0]["text"])["city"]}
    except Exception as error:  # the words are what the test asks for
        seen = {"refused": str(error)}
    print(json.dumps(seen))

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_project_of_the_real_command_line_runs_from_the_files_it_sends(tmp_path):
    """`aenv init`, `aenv push` and `Environment`, as they are. With files that stay at the client's the create says so."""
    python = await asyncio.to_thread(interpreter, "aenvironment", VERSION)
    (tmp_path / "client.py").write_text(SKIPPING)
    async with serving(tmp_path) as env:
        where = {"AENV_SYSTEM_URL": env["AENV_SYSTEM_URL"]}
        aenv = partial(command_line, python, tmp_path, {**where, "HUB_BACKEND": f"{env['AENV_SYSTEM_URL']}:8080"})
        await aenv("init", "weather")
        project = tmp_path / "weather"
        await aenv("push", "--work-dir", str(project), cwd=project)
        refused = await told(python, tmp_path / "client.py", "weather@1.0.0", env=where)
        assert "has no image" in refused["refused"] and "aenv_hub" in refused["refused"]
        for name in ("plain_env.py", "plain_mcp.py"):
            (project / name).write_bytes(resources.files("rollyard.inside").joinpath(name).read_bytes())
        (project / "project.py").write_bytes((HERE / "plain_project.py").read_bytes())
        words = "FROM host\nWORKDIR /app\nCOPY . .\nENV UNITS=celsius\n"
        words += 'ENTRYPOINT ["/bin/bash", "-c"]\nCMD ["python3 plain_env.py project.py --port 8081"]\n'
        (project / "Dockerfile").write_text(words)
        await aenv("config", "set", "storage_config.type", "aenv_hub")
        assert "Push successfully" in await aenv("push", "--work-dir", str(project), "--force", cwd=project)
        seen = await told(python, HERE / "aenv_client.py", "weather@1.0.0", env=where, timeout=240)
        assert seen["called"] == [False, {"city": "Oslo", "temperature": 20, "units": "celsius"}]
        assert seen["reward"]["score"] == 1.0 and seen["function"] == 42
        assert (await told(python, tmp_path / "client.py", "weather@1.0.0", env=where))["said"] == "Oslo"
        (project / "Dockerfile").write_text("FROM host\nRUN echo it broke && exit 3\n")
        await aenv("push", "--work-dir", str(project), "--force", cwd=project)
        broken = await told(python, tmp_path / "client.py", "weather@1.0.0", env=where)
        assert "could not be built" in broken["refused"] and "it broke" in broken["refused"]


async def command_line(python, home, where, *words, cwd=None):
    running = await asyncio.create_subprocess_exec(
        str(Path(python).with_name("aenv")),
        *words,
        cwd=cwd or home,
        env={**os.environ, **where, "HOME": str(home), "COLUMNS": "250", "PYTHONWARNINGS": "ignore"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(running.communicate(), 120)
    assert running.returncode == 0, (out + err).decode()
    return out.decode()


async def made_with(session, control, plane, start, **fields):
    await plane.envs.create("e", "1", owner="aenv", start=start)
    async with session.post(f"{control}/env-instance", json={"envName": "e@1", **fields}) as reply:
        return (await reply.json())["data"]


async def test_health_is_held_open_until_it_is_true_and_the_target_is_never_the_callers(tmp_path):
    async with serving(tmp_path) as env, aiohttp.ClientSession() as session:
        control, data = f"{env['AENV_SYSTEM_URL']}:8080", f"{env['AENV_SYSTEM_URL']}:8081"
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            made = await made_with(session, control, plane, ["python3", "-c", LATE, "4"])
            assert made["status"] == "Running"
            bears = {
                "AEnvCore-EnvInstance-ID": made["id"],
                "AEnvCore-MCPProxy-URL": f"http://{made['ip']}:8081",
                "Authorization": "Bearer secret",
            }
            silent = aiohttp.ClientTimeout(total=60, sock_read=3)  # the package's own patience
            async with session.get(f"{data}/health", headers=bears, timeout=silent) as reply:
                assert reply.status == 200
                assert (await reply.json())["data"]["status"] == "healthy"
            async with session.get(f"{data}/functions/list?a=b", headers=bears) as reply:
                said = (await reply.json(content_type=None))["data"]
            assert said["path"] == "/functions/list?a=b"
            assert not {"authorization", "aenvcore-mcpproxy-url"} & {name.lower() for name in said["seen"]}
            for wrong in (
                {**bears, "AEnvCore-MCPProxy-URL": "http://127.0.0.1:8081"},
                {**bears, "AEnvCore-MCPProxy-URL": "http://169.254.169.254/latest"},
                {name: value for name, value in bears.items() if name != "AEnvCore-MCPProxy-URL"},
                {**bears, "AEnvCore-EnvInstance-ID": "inst_other"},
            ):
                async with session.get(f"{data}/health", headers=wrong) as reply:
                    assert reply.status == 401
            async with session.get(f"{data}/functions/list") as reply:  # as sent with skip_for_healthy=True
                assert (await reply.json(content_type=None))["data"]["path"] == "/functions/list"
            for page in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
                async with session.get(f"{data}/functions/list", headers=page) as reply:
                    assert reply.status == 400
            async with session.delete(f"{control}/env-instance/{made['id']}") as reply:
                assert (await reply.json())["success"]
            async with session.post(f"{data}/mcp", json={}) as reply:
                assert reply.status == 400 and "names no instance" in (await reply.json())["error"]
            async with session.get(f"{data}/health", headers=bears) as reply:
                assert reply.status == 410
            async with session.get(f"{control}/env-instance/{made['id']}") as reply:
                assert reply.status == 404


async def test_a_program_that_ended_is_told_at_once_and_an_engine_without_ports_is_501(tmp_path):
    async with serving(tmp_path) as env, aiohttp.ClientSession() as session:
        control, data = f"{env['AENV_SYSTEM_URL']}:8080", f"{env['AENV_SYSTEM_URL']}:8081"
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            made = await made_with(session, control, plane, ["sh", "-c", "echo it broke >&2; exit 3"], ttl="1m30s")
            assert made["ttl"] == "1m30s"
            bears = {"AEnvCore-EnvInstance-ID": made["id"], "AEnvCore-MCPProxy-URL": f"http://{made['ip']}:8081"}
            async with session.get(f"{data}/health", headers=bears) as reply:
                said = (await reply.json())["error"]
                assert "code 3" in said and "it broke" in said
            await plane.envs.create("n", "1", owner="aenv", engine="noop")
            async with session.post(f"{control}/env-instance", json={"envName": "n@1"}) as reply:
                made = (await reply.json())["data"]
            bears = {"AEnvCore-EnvInstance-ID": made["id"], "AEnvCore-MCPProxy-URL": f"http://{made['ip']}:8081"}
            for path in ("/health", "/mcp", "/task/reward"):
                async with session.get(data + path, headers=bears) as reply:
                    assert reply.status == 501
            async with session.post(f"{control}/env-instance/{made['id']}/presign-url", json={"port": 1}) as reply:
                assert reply.status == 501
            for body in (
                {"envName": "n"},
                {},
                {"envName": "n@1", "datasource": "x"},
                {"envName": "n@1", "ttl": "soon"},
            ):
                async with session.post(f"{control}/env-instance", json=body) as reply:
                    assert reply.status in (400, 501) and (await reply.json())["success"] is False
            async with session.post(f"{control}/env-service", json={}) as reply:
                assert reply.status == 501


@pytest.mark.adversarial
async def test_a_web_page_is_not_somebody_on_this_machine(tmp_path):
    async with serving(tmp_path) as env, aiohttp.ClientSession() as session:
        control = f"{env['AENV_SYSTEM_URL']}:8080"
        project = {"name": "evil", "version": "1", "deployConfig": {"start": ["sh", "-c", "true"]}}
        for headers in (
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Sec-Fetch-Site": "same-origin"},
            {"Host": "rebound.evil.example:8080"},
            {"Host": "127.0.0.2.evil.example"},
        ):
            async with session.post(f"{control}/env", json=project, headers=headers) as reply:
                assert reply.status == 403, headers
            async with session.get(f"{control}/env-instance/*/list", headers=headers) as reply:
                assert reply.status == 403, headers
        async with session.get(f"{control}/env") as reply:
            assert (await reply.json())["data"] == []
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}, {"Authorization": ""}):
            async with session.get(f"{control}/env", headers=headers) as reply:
                assert reply.status == 401, headers


async def test_keys_decide_whose_instances_are_seen(tmp_path):
    async with serving(tmp_path, "--aenv-keys") as env, aiohttp.ClientSession() as session:
        control = f"{env['AENV_SYSTEM_URL']}:8080"
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            await plane.envs.create("n", "1", engine="noop")
            keys = {who: (await plane.create_key("trainer", who))["key"] for who in ("ann", "bob")}
            agent = (await plane.create_key("agent", "ann"))["key"]

        async with session.post(f"{control}/env-instance", json={"envName": "n@1"}) as reply:
            assert reply.status == 401
        async with session.post(f"{control}/env-instance", json={"envName": "n@1"}, headers=bearer(agent)) as reply:
            assert reply.status == 403
        asked = {"envName": "n@1", "owner": "carol"}
        async with session.post(f"{control}/env-instance", json=asked, headers=bearer(keys["ann"])) as reply:
            made = (await reply.json())["data"]
            assert made["owner"] == "carol"
        for who, status, count in (("ann", 200, 1), ("bob", 404, 0)):
            async with session.get(f"{control}/env-instance/{made['id']}", headers=bearer(keys[who])) as reply:
                assert reply.status == status
            async with session.get(f"{control}/env-instance/*/list", headers=bearer(keys[who])) as reply:
                assert len((await reply.json())["data"]) == count
        async with session.post(f"{control}/env", json={"name": "x"}, headers=bearer(keys["ann"])) as reply:
            assert reply.status == 403


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has spare loopback addresses without set-up")
async def test_two_planes_find_two_addresses(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with serving(tmp_path / "a") as first, serving(tmp_path / "b") as second:
        assert first["AENV_SYSTEM_URL"] != second["AENV_SYSTEM_URL"]
    async with serving(tmp_path, "--aenv", "off") as env:
        assert "AENV_SYSTEM_URL" not in env


@pytest.mark.parametrize(
    "text, value", [("30m", 1800), ("1h30m", 5400), ("90s", 90), ("1.5h", 5400), ("250ms", 0.25), ("", None)]
)
def test_durations_are_read_as_go_writes_them(text, value):
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["bad", "30", "-5m", "5m bad"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(PlaneInvalid):
        seconds(text)


def test_quantities_come_in_all_spellings():
    assert [megabytes(text) for text in ("2Gi", "512Mi", "2G", "", None)] == [2048, 512, 1907, None, None]
    assert [cores(text) for text in ("1", "2C", "500m", 1.5, "")] == [1, 2, 0.5, 1.5, None]
    assert [duration(s) for s in (1800, 90, 5400, 0.2)] == ["30m", "1m30s", "1h30m", "0s"]
