"""Metrics, logs and spans tell the same story, and never what an episode says."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from websockets.asyncio.client import connect as websocket

from rollyard.core.errors import EnvError, EnvUnavailable
from rollyard.envs import connect
from rollyard.envs.telemetry import LINES, SPANS, Telemetry
from tests.envs.conftest import served, told

pytestmark = pytest.mark.anyio
SPANS_CODE = """
import asyncio, json, runpy
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
kept = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)
from rollyard.envs import connect
from rollyard.envs.telemetry import Telemetry
served = runpy.run_path("tests/envs/conftest.py")["served"]
async def main():
    async with served() as url, connect(url) as env:
        await env.reset(episode_id="ep-1")
        await env.step({"add": 1})
        try:
            await env.step({"boom": True})
        except Exception:  # that it failed is in its span, which is looked at below
            pass
asyncio.run(main())
with Telemetry(name="blocking").span("env.step", session="s") as span:
    span.mark_found(code="OK")
told = [[s.name, dict(s.attributes)] for s in kept.get_finished_spans()]
for _, attributes in told:
    attributes.pop("env.session")
print(json.dumps(told))
"""


def value(text, name):
    [line] = [line for line in text.splitlines() if line.startswith(name + " ")]
    return float(line.rpartition(" ")[2])


async def test_metrics_count_sessions_moves_and_refusals():
    async with served(capacity=1, key="boss") as url:
        async with aiohttp.ClientSession(url, headers={"authorization": "Bearer boss"}) as http:
            async with connect(url, key="boss") as env:
                await env.reset()
                await env.step({"add": 1})
                with pytest.raises(EnvError):
                    await env.step({"boom": True})
                with pytest.raises(EnvUnavailable):
                    async with connect(url, key="boss", queue_s=0.0):
                        pass
                answer = await http.get("/metrics")
                assert answer.content_type == "text/plain"
                text = await answer.text()
                assert value(text, 'rollyard_env_moves_total{code="OK",move="step"}') == 1
                assert value(text, 'rollyard_env_moves_total{code="EXECUTION_ERROR",move="step"}') == 1
                assert value(text, "rollyard_env_sessions") == 1
                assert value(text, "rollyard_env_attached") == 1
                assert value(text, "rollyard_env_capacity") == 1
                assert value(text, 'rollyard_env_session_changes_total{change="refused"}') == 1
                assert value(text, "rollyard_env_move_seconds_count") == 3
                assert value(text, 'rollyard_env_move_seconds_bucket{le="+Inf"}') == 3
            text = await (await http.get("/metrics")).text()
            assert value(text, "rollyard_env_sessions") == 0
            assert value(text, 'rollyard_env_session_changes_total{change="closed"}') == 1


async def test_words_of_a_client_make_no_new_series():
    async with served() as url, aiohttp.ClientSession(url) as http:
        async with websocket(url.replace("http", "ws") + "/ws", subprotocols=["rollyard.v1"]) as socket:
            await told(socket, {"id": "open", "do": "open", "with": {}})
            for n in range(5):
                answer = await told(socket, {"id": f"{n}", "do": f"dance{n}", "with": {}})
                assert "not offered" in answer["error"]["message"]
        assert "dance" not in await (await http.get("/metrics")).text()


async def test_lines_name_what_happened_and_nothing_that_was_said(caplog):
    caplog.set_level(logging.DEBUG, "rollyard.envs")
    async with served() as url, connect(url) as env:
        await env.reset(seed=41)
        await env.step({"add": 987654})
    lines = [record.getMessage() for record in caplog.records if record.name == "rollyard.envs"]
    words = [line.split()[0] for line in lines]
    assert words == [
        *("env.session.opened", "env.session.attached", "env.reset", "env.step"),
        *("env.session.detached", "env.session.closed"),
    ]
    assert set(words) <= LINES | SPANS
    assert all("session=es_" in line and "name=Counter" in line for line in lines)
    assert "code=OK" in lines[3]
    assert not any("987654" in line for line in lines)


async def test_a_spans_names_and_fields_are_those_of_the_lines():
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SPANS_CODE),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    out, _ = await asyncio.wait_for(program.communicate(), 120)
    told = json.loads(out)
    assert [name for name, _ in told] == ["env.reset", "env.step", "env.step", "env.step"]
    assert told[1][1] == {"env.name": "Counter", "env.episode": "ep-1", "env.code": "OK", "env.step": 1}
    assert told[2][1]["env.code"] == "EXECUTION_ERROR"
    assert told[3][1] == {"env.name": "blocking", "env.code": "OK"}


def test_only_words_of_the_vocabulary_can_be_said():
    telemetry = Telemetry(name="x")
    with pytest.raises(ValueError, match="vocabulary"):
        telemetry.say("env.session.lost")
    with pytest.raises(ValueError, match="vocabulary"):
        telemetry.span("env.dance")


def test_a_server_does_not_import_opentelemetry_by_itself():
    code = "import sys, rollyard.envs.server; print('opentelemetry' in sys.modules, 'prometheus_client' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
