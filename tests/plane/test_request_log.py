"""Every API of the plane in one log, one metric, one history, with one rate and bounded bodies; spans where there is a tracer."""

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.plane.test_operations import process

pytestmark = pytest.mark.anyio
WORLDS = Path(__file__).parents[2] / "examples" / "worlds"
LIMITS = {"fleet": 32 * 2**20}  # verifiers come in bodies there
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ROCK = "/apis/envs/sandbox/v1/start"


class Way(NamedTuple):
    """How an instance is asked for through one API, and the route that its table has for that."""

    url: str
    route: str
    body: dict[str, Any]
    headers: dict[str, str]


def ways_of(env):
    key = {"Authorization": f"Bearer {env['ROLLYARD_KEY']}"}
    return {
        "native": Way(f"{env['ROLLYARD_URL']}/v1/instances", "/v1/instances", {"image": "host"}, key),
        "e2b": Way(
            f"{env['E2B_API_URL']}/sandboxes", "/sandboxes", {"templateID": "base"}, {"X-API-Key": env["E2B_API_KEY"]}
        ),
        "fleet": Way(
            f"{env['FLEET_BASE_URL']}/v1/env/instances",
            "/v1/env/instances",
            {"env_key": "tickets"},
            {"Authorization": f"Bearer {env['FLEET_API_KEY']}"},
        ),
        "rock": Way(f"{env['ROCK_BASE_URL']}{ROCK}", f"/rock/{{key}}{ROCK}", {"image": "host"}, {}),
        "aenv": Way(f"{env['AENV_SYSTEM_URL']}:8080/env-instance", "/env-instance", {"envName": "plain@1"}, key),
    }


@asynccontextmanager
async def planes(folder, *options):
    """The server's process, its admin's session and the ways to it; the environment `plain@1` is there."""
    options = ("--log-requests", "--worlds", str(WORLDS), "--aenv", "auto", *options)
    async with process(folder, *options, engine="local") as (server, http, env):
        async with http.post("/v1/envs", json={"name": "plain", "version": "1", "spec": {"image": "host"}}) as answer:
            assert answer.status == 201
        yield server, http, ways_of(env)


async def test_every_api_is_in_the_log_the_metrics_and_the_history_of_instances(tmp_path):
    async with planes(tmp_path) as (server, http, ways):
        async with aiohttp.ClientSession() as client:
            for way in ways.values():
                headers = {**way.headers, "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
                async with client.post(way.url, json=way.body, headers=headers) as answer:
                    assert answer.status < 300, await answer.text()
                    assert answer.headers["X-Trace-Id"] == TRACE
        async with http.get("/metrics") as answer:
            metrics = await answer.text()
        async with http.get("/v1/instances?limit=50") as answer:
            ids = [one["id"] for one in (await answer.json())["items"]]
        histories = []
        for instance_id in ids:
            async with http.get(f"/v1/instances/{instance_id}/history") as answer:
                histories.append((await answer.json())["history"][0]["reason"])
        async with http.post("/v1/instances/delete", json={"ids": ids}) as answer:
            assert set((await answer.json())["outcomes"].values()) == {"deleted"}
        server.send_signal(signal.SIGTERM)
        await asyncio.wait_for(server.wait(), 60)
    said = (tmp_path / "log").read_text().splitlines()  # the ready line is there too
    lines = [json.loads(line) for line in said if line.startswith("{")]
    asked = [line for line in lines if line["event"] == "request" and line.get("trace") == TRACE]
    for api, way in ways.items():
        (line,) = [one for one in asked if one["api"] == api]
        assert (line["method"], line["route"], line["owner"]) == ("POST", way.route, "admin")
        assert line["instance"] in ids and line["key"].startswith("key_") and line["status"] in (200, 201)
        assert (
            f'requests_total{{api="{api}",method="POST",route="{way.route}",status="{line["status"]}"}} 1.0' in metrics
        )
        assert f"asked for through the {api} API by {line['key']}" in histories


async def test_rates_and_limits_of_bodies_hold_for_every_api(tmp_path):
    async with planes(tmp_path, "--rate", "0.001", "--burst", "1") as (_, http, ways):
        async with http.post("/v1/instances", json={"image": "host"}) as answer:
            made = (await answer.json())["id"]
        async with aiohttp.ClientSession() as client:
            for api, way in ways.items():
                async with client.post(way.url, json=way.body, headers=way.headers) as answer:
                    text = await answer.text()
                    assert "creates more than 0.001 instances a second" in text, (api, text)
                    assert answer.status == 429 or (api == "rock" and json.loads(text)["status"] == "Failed"), api
                # A little too much, so that all of it is sent before the answer comes.
                large = {**way.body, "x": "x" * LIMITS.get(api, 2**20)}
                async with client.post(way.url, json=large, headers=way.headers) as answer:
                    assert answer.status == 413 or (api == "rock" and "larger than" in await answer.text()), api
        async with http.delete(f"/v1/instances/{made}") as answer:
            assert answer.status == 204


async def test_the_rate_of_calls_holds_for_every_api_and_for_no_deletion(tmp_path):
    async with planes(tmp_path, "--call-rate", "0.001", "--call-burst", "1") as (_, http, ways):
        made = {}
        async with aiohttp.ClientSession() as client:
            for api, way in ways.items():  # creations have a rate of their own
                async with client.post(way.url, json=way.body, headers=way.headers) as answer:
                    told = await answer.json()
                    assert answer.status < 300, (api, told)
                    body = told.get("data") or told.get("result") or told
                    made[api] = {**body, "id": body.get("id") or body.get("sandboxID") or body.get("sandbox_id")}
                    made[api]["id"] = made[api]["id"] or body["instance_id"]
            async with http.post(f"/v1/instances/{made['native']['id']}/exec", json={"command": "true"}) as answer:
                assert answer.status == 200
            aenv, root = made["aenv"], {api: way.url.removesuffix(way.route) for api, way in ways.items()}
            async with client.get(f"{root['fleet']}/v1/runner-auth/token", headers=ways["fleet"].headers) as answer:
                fleet = {"X-Runner-Token": (await answer.json())["token"]}
            ask = {"AEnvCore-EnvInstance-ID": aenv["id"], "AEnvCore-MCPProxy-URL": f"http://{aenv['ip']}:8081"}
            for api, url, body, headers in (
                ("native", f"{ways['native'].url}/{made['native']['id']}/exec", {"command": "true"}, None),
                ("e2b", f"{ways['e2b'].url}/{made['e2b']['id']}/connect", {}, None),
                ("fleet", f"{root['fleet']}/i/{made['fleet']['id']}/api/v1/env/reset", {}, fleet),
                ("rock", ways["rock"].url.replace("/start", "/execute"), {"sandbox_id": made["rock"]["id"]}, None),
                ("aenv", f"{root['aenv'].replace(':8080', ':8081')}/functions/f", {}, ask),
            ):
                if api == "rock":
                    body["command"] = "true"
                async with client.post(url, json=body, headers=headers or ways[api].headers) as answer:
                    text = await answer.text()
                    assert "uses its instances more than 0.001 times a second" in text, (api, text)
                    assert answer.status == 429 or api == "rock", api
        ids = [one["id"] for one in made.values()]
        async with http.post("/v1/instances/delete", json={"ids": ids}) as answer:
            assert set((await answer.json())["outcomes"].values()) == {"deleted"}


SPANS = """
import asyncio, json, sys
import httpx
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rollyard.plane.api.app import plane_app
from rollyard.plane.engines.noop import NoopEngine
from rollyard.plane.parts import assemble
from rollyard.plane.storage.open import open_plane

kept, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)

async def main():
    async with open_plane(sys.argv[1]) as opened:
        parts = await assemble(opened.records, {"noop": NoopEngine()})
        await parts.access.admin("k" * 20)
        headers = {"Authorization": "Bearer " + "k" * 20, "traceparent": sys.argv[2]}
        transport = httpx.ASGITransport(plane_app(parts))
        async with httpx.AsyncClient(transport=transport, base_url="http://plane", headers=headers) as client:
            made = (await client.post("/v1/instances", json={"image": "i"})).json()
    (span,) = kept.get_finished_spans()
    print(json.dumps([f"{span.context.trace_id:032x}", span.name, dict(span.attributes), made["id"]]))

asyncio.run(main())
"""


def test_a_request_is_a_span_below_the_callers(tmp_path):
    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    parent = f"00-{TRACE}-00f067aa0ba902b7-01"
    done = subprocess.run(
        [sys.executable, "-c", SPANS, str(tmp_path / "p.db"), parent], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    trace_id, name, attributes, made = json.loads(done.stdout)
    assert (trace_id, name) == (TRACE, "plane.native")
    assert attributes["http.route"] == "/v1/instances" and attributes["http.response.status_code"] == 201
    assert (attributes["plane.owner"], attributes["plane.instance"]) == ("admin", made)
