"""Rollouts as OpenTelemetry spans, read back from an exporter in memory."""

import json
import subprocess
import sys

import pytest

from rollyard.tasks.scaffold import new_script, new_task

PROGRAM = """
import asyncio, json
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import rollyard as ry

kept, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)

async def main():
    with trace.get_tracer("mine").start_as_current_span("mine"):
        (done,) = await ry.run("hello", agent="shell-agent", policy="scripted:script.yaml")
    print(json.dumps([done.id, done.reward, [json.loads(span.to_json()) for span in kept.get_finished_spans()]]))

asyncio.run(main())
"""


def test_a_rollout_its_calls_and_its_tools_are_spans_under_the_conventions_names(tmp_path):
    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes  # where they are until they are final

    new_task(tmp_path / "hello")
    new_script(tmp_path / "script.yaml")
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    rollout_id, reward, spans = json.loads(done.stdout.splitlines()[-1])
    (agent,) = [span for span in spans if span["name"] == "invoke_agent shell-agent"]
    calls = [span for span in spans if span["attributes"].get("gen_ai.operation.name") == "chat"]
    tools = [span for span in spans if span["attributes"].get("gen_ai.operation.name") == "execute_tool"]
    (mine,) = [span for span in spans if span["name"] == "mine"]
    assert agent["parent_id"] == mine["context"]["span_id"] and reward == 1
    assert agent["attributes"]["gen_ai.conversation.id"] == rollout_id
    (scored,) = agent["events"]
    assert scored["name"] == "gen_ai.evaluation.result"
    assert scored["attributes"]["gen_ai.evaluation.score.value"] == 1
    assert len(calls) > 1 and tools
    for span in [*calls, *tools]:
        assert span["parent_id"] == agent["context"]["span_id"]
        assert agent["start_time"] <= span["start_time"] <= span["end_time"] <= agent["end_time"]
    assert calls[0]["kind"] == "SpanKind.CLIENT" and calls[-1]["attributes"]["gen_ai.response.finish_reasons"] == [
        "stop"
    ]
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    used = {name for span in [agent, *calls, *tools] for name in span["attributes"]} | set(scored["attributes"])
    assert {name for name in used if name.startswith("gen_ai.")} <= known
