"""`serve plane` as operators see it: logs without secrets, a stop that drains, manifests that parse."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml

from rollyard.plane.server.logs import redact
from tests.plane.venvs import venv_or_skip

pytestmark = pytest.mark.anyio
DEPLOY = Path(__file__).parents[2] / "deploy"
MAIN = "from rollyard.cli.main import main; main()"


@asynccontextmanager
async def process(folder, *options, engine="noop"):
    """A server, its URL and key; its log is in `folder/log`."""
    where = ["--store", str(folder / "p.db"), "--admin-key-file", str(folder / "key"), "--port", "0", "--aenv", "off"]
    with (folder / "log").open("wb") as log:
        server = await asyncio.create_subprocess_exec(
            sys.executable, "-c", MAIN, "serve", "plane", *where, "--engine", engine, "--print-env", *options,
            stdout=asyncio.subprocess.PIPE, stderr=log, env={**os.environ},
        )  # fmt: skip
    try:
        env = {}
        async with asyncio.timeout(60):
            while "ROLLYARD_KEY" not in env:  # the last one
                name, _, value = (await server.stdout.readline()).decode().strip().partition("=")
                assert name, (folder / "log").read_text()
                env[name] = value
        async with aiohttp.ClientSession(
            env["ROLLYARD_URL"], headers={"Authorization": f"Bearer {env['ROLLYARD_KEY']}"}
        ) as http:
            yield server, http, env
    finally:
        if server.returncode is None:
            server.send_signal(signal.SIGKILL)
        await server.wait()


@pytest.mark.adversarial
async def test_no_key_token_or_signed_url_is_ever_logged(tmp_path):
    async with process(tmp_path, "--log-requests", "--log-level", "debug", engine="local") as (server, http, env):
        async with http.post("/v1/instances", json={"image": "host"}) as answer:
            made = await answer.json()
        async with http.post(f"/v1/instances/{made['id']}/presign", json={"port": 80}) as answer:
            url = (await answer.json())["url"]
        async with aiohttp.ClientSession() as nobody:
            for path in (url, url + "x?y=z", env["ROLLYARD_URL"] + "/at/forged.80.1.sig/"):
                async with nobody.get(path):
                    pass
            token = {"Authorization": f"Bearer {made['token']}"}
            async with nobody.get(f"{env['ROLLYARD_URL']}/v1/instances/{made['id']}/data/", headers=token):
                pass
            async with nobody.get(
                f"{env['ROLLYARD_URL']}/v1/keys", headers={"Authorization": "Bearer ryk-" + "w" * 30}
            ):
                pass
        async with http.post("/v1/keys", json={"role": "agent", "owner": "ann"}) as answer:
            key = (await answer.json())["key"]
        async with http.delete(f"/v1/instances/{made['id']}"):
            pass
        server.send_signal(signal.SIGTERM)
        await asyncio.wait_for(server.wait(), 60)
    text = (tmp_path / "log").read_text()
    signed = url.rstrip("/").rsplit("/", 1)[1]
    for secret in (env["ROLLYARD_KEY"], made["token"], key, signed, signed.rsplit(".", 1)[1], "ryk-" + "w" * 30):
        assert secret not in text
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]  # beside the ready line
    asked = [line for line in lines if line["event"] == "request"]
    assert {"method", "route", "status", "ms", "timestamp", "level"} <= set(asked[0])
    assert {line["route"] for line in asked} >= {"/v1/instances", "/v1/instances/{id}/presign"}


def test_what_looks_like_a_secret_is_taken_out_of_every_value():
    event = {
        "event": "x",
        "a": "key ryk-abcdefghijklmnopqrstuvwx!",
        "b": {"url": "http://h/at/inst_1.80.5.sig/x", "c": ["Bearer abc", "http://h/bundles/a.b.c"]},
    }
    assert redact(event) == {
        "event": "x",
        "a": "key ***!",
        "b": {"url": "http://h/at/***/x", "c": ["Bearer ***", "http://h/bundles/***"]},
    }


async def test_a_stop_first_says_not_ready_ends_streams_and_finishes_what_is_under_way(tmp_path):
    async with process(tmp_path, "--drain-s", "1.5") as (server, http, _):
        async with http.get("/ready") as answer:
            assert answer.status == 200
        stream = await http.get("/v1/watch")
        assert (await stream.content.readuntil(b"\n\n")).startswith(b"event: current")
        server.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            while True:
                async with http.get("/ready") as answer:
                    if answer.status == 503:
                        break
                await asyncio.sleep(0.01)
        async with http.post("/v1/instances", json={"image": "host"}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "draining")
        async with http.get("/v1/usage") as answer:
            assert answer.status == 200
        await asyncio.wait_for(stream.content.read(), 30)
        assert await asyncio.wait_for(server.wait(), 60) in (0, -signal.SIGTERM)


def test_kubernetes_manifests_and_the_compose_file_parse_and_hang_together():
    found = [
        one for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())
    ]
    kinds = {one["kind"]: one for one in found}
    assert {"Deployment", "Service", "Secret", "PodDisruptionBudget", "NetworkPolicy"} <= set(kinds)
    assert all(one["apiVersion"] and one["metadata"]["name"] for one in found)
    template = kinds["Deployment"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    for selecting in (
        kinds["Deployment"]["spec"]["selector"]["matchLabels"],
        kinds["Service"]["spec"]["selector"],
        kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selecting.items() <= labels.items()
    container = template["spec"]["containers"][0]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    drain = float(container["args"][container["args"].index("--drain-s") + 1])
    assert template["spec"]["terminationGracePeriodSeconds"] > drain + 30
    services = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())["services"]
    assert set(services["plane"]["depends_on"]) <= set(services)
    assert services["plane"]["network_mode"] == "service:tls"
    command = services["plane"]["command"]
    assert command[command.index("--host") + 1] == "127.0.0.1"  # so that there is a page, and TLS before everything
    assert "ports" not in services["plane"] and services["tls"]["ports"] == ["8443:8443"]
    assert any(volume.startswith("./nginx.conf:") for volume in services["tls"]["volumes"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    """Our program is not installed where the unit expects it, so another one stands for it."""
    unit = (DEPLOY / "rollyard-plane.service").read_text().replace("/opt/rollyard/bin/rollyard", "/bin/true")
    (tmp_path / "rollyard-plane.service").write_text(unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "rollyard-plane.service")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    own = [line for line in (done.stdout + done.stderr).splitlines() if "rollyard-plane" in line]
    assert (done.returncode, own) == (0, [])


@pytest.mark.parametrize("where", ["kubernetes", "compose", "systemd"])
def test_the_options_that_examples_use_exist(where):
    """Each command line is parsed by the real parser."""
    import shlex

    import typer

    from rollyard.cli.serve import app

    if where != "systemd":
        words = deployed_command(where)
    else:
        unit = (DEPLOY / "rollyard-plane.service").read_text()
        line = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
        words = shlex.split(line.partition("=")[2])[1:]
        assert "KillMode=process" in unit and "TimeoutStopSec=" in unit
    assert words[:2] == ["serve", "plane"]
    command = typer.main.get_command(app).commands["plane"]
    context = command.make_context("plane", [str(word) for word in words[2:]])
    assert context.params["store"]


@pytest.mark.parametrize("where", ["kubernetes", "compose"])
async def test_the_command_of_a_deployment_starts_where_nothing_else_can_be_written(where, tmp_path):
    """With its own key files, on a root file system that is read-only, as the manifest says."""
    words = deployed_command(where)
    given = {
        "--engine": "noop",
        "--host": "127.0.0.1",
        "--port": "0",
        "--admin-key-file": str(tmp_path / "admin-key"),
        "--signing-file": str(tmp_path / "signing-secret"),
    }
    words = [given.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    words = [word.replace("${ROLLYARD_PUBLIC_URL:-", "").rstrip("}") for word in words]
    if "--port" not in words:
        words += ["--port", "0"]
    for name in ("admin-key", "signing-secret"):
        (tmp_path / name).write_text("a-long-enough-secret\n")
        (tmp_path / name).chmod(0o600)
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MAIN, *words, "--aenv", "off",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "HOME": "/proc/nowhere", "XDG_STATE_HOME": "", "ROLLYARD_STORE": str(tmp_path / "p.db")},
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            line = (await server.stdout.readline()).decode()
            said = "" if line else (await server.stderr.read()).decode()
        assert line.startswith("rollyard plane ready"), said
    finally:
        if server.returncode is None:
            server.kill()
        await server.communicate()


def deployed_command(where):
    if where == "compose":
        return yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())["services"]["plane"]["command"]
    found = [one for path in (DEPLOY / "kubernetes").glob("*.yaml") for one in yaml.safe_load_all(path.read_text())]
    (deployment,) = [one for one in found if one["kind"] == "Deployment"]
    return deployment["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.slow
def test_the_schemas_of_kubernetes_find_nothing_wrong_with_the_manifests():
    python = venv_or_skip("kubernetes-validate", ["kubernetes-validate==1.37.0"])
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        command = [str(Path(python).with_name("kubernetes-validate")), "--strict", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
