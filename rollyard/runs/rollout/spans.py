"""A rollout as OpenTelemetry spans, under the names of the GenAI conventions: the agent, its model calls, its tools.

    invoke_agent NAME            the rollout; its reward is an event `gen_ai.evaluation.result`
        chat MODEL               a call, from its request to its answer
        execute_tool NAME        a tool, from the answer that asked for it to the request that brought its result

They are told when the rollout is over, with the times at which things happened, to the tracer provider that the program has set
up; without one nothing is made. What was said is never told: it is in the store.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rollyard.core.call import CallRecord
from rollyard.core.rollout import Rollout
from rollyard.core.tracer import find_tracer
from rollyard.trajectory.trajectory import Trajectory

_PROVIDERS = {"messages": "anthropic", "gemini": "gcp.gemini"}
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty", "presence_penalty")


def trace_rollout(rollout: Rollout) -> None:
    """Below the span that the caller is in, if any."""
    tracer = find_tracer("rollyard.runs")
    if tracer is None:
        return
    trace = sys.modules["opentelemetry.trace"]
    attributes = _drop_unknown(_rollout_attributes(rollout))
    agent = tracer.start_span(
        f"invoke_agent {rollout.agent}", start_time=_ns(rollout.started_at), attributes=attributes
    )
    ended = rollout.started_at + rollout.wall_s
    if rollout.reward is not None:
        score = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": rollout.reward}
        agent.add_event("gen_ai.evaluation.result", score, timestamp=_ns(ended))
    if rollout.failure is not None:
        agent.set_attribute("error.type", rollout.failure.cause)
        agent.set_status(trace.StatusCode.ERROR, rollout.failure.message)
    below = trace.set_span_in_context(agent)
    if rollout.trajectory is not None:
        for record in rollout.trajectory.records:
            _trace_call(trace, tracer, below, record, rollout.id)
        _trace_tools(tracer, below, rollout.trajectory, ended)
    agent.end(end_time=_ns(ended))


def _rollout_attributes(rollout: Rollout) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": rollout.agent,
        "gen_ai.agent.version": rollout.agent_version,
        "gen_ai.conversation.id": rollout.id,
        "gen_ai.usage.input_tokens": rollout.usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": rollout.usage.get("completion_tokens"),
        "rollyard.run.id": rollout.run_id,
        "rollyard.task.id": rollout.task.id,
        "rollyard.attempt": rollout.attempt,
        "rollyard.status": rollout.status,
        "rollyard.policy": rollout.labels.get("policy"),
        "rollyard.sandbox": rollout.sandbox or None,
    }


def _trace_call(trace: Any, tracer: Any, below: Any, record: CallRecord, rollout_id: str) -> None:
    sampling, usage = record.effective or record.requested, record.usage
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": _PROVIDERS.get(record.dialect, "openai"),
        "gen_ai.conversation.id": rollout_id,
        "gen_ai.request.model": record.model_requested or None,
        "gen_ai.response.model": record.model_served,
        "gen_ai.response.id": record.id,
        "gen_ai.response.finish_reasons": [record.finish] if record.finish is not None else None,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        **{f"gen_ai.request.{name}": getattr(sampling, name) for name in _SAMPLING},
        "rollyard.call.kind": record.kind,
    }
    began = record.received_at or record.started_at or 0.0
    span = tracer.start_span(
        f"chat {record.model_requested}",
        context=below,
        kind=trace.SpanKind.CLIENT,
        start_time=_ns(began),
        attributes=_drop_unknown(attributes),
    )
    if record.error is not None:
        span.set_attribute("error.type", str(record.status or "_OTHER"))
        span.set_status(trace.StatusCode.ERROR, record.error)
    span.end(end_time=_ns(max(began, record.finished_at or began)))


def _trace_tools(tracer: Any, below: Any, trajectory: Trajectory, ended: float) -> None:
    """A tool whose result never came ends with the rollout."""
    back: dict[str, float] = {}
    for node in trajectory.nodes:
        for result in node.message.tool_results:
            back.setdefault(result.call_id, trajectory.record(node.call_id).received_at if node.call_id else ended)
    for record in trajectory.records:
        answer = trajectory.answer(record.id)
        for call in answer.message.tool_calls if answer is not None else ():
            began = record.finished_at or record.received_at
            attributes = {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": call.name,
                "gen_ai.tool.call.id": call.id,
                "gen_ai.tool.type": "function",
            }
            span = tracer.start_span(
                f"execute_tool {call.name}", context=below, start_time=_ns(began), attributes=attributes
            )
            span.end(end_time=_ns(max(began, back.get(call.id, ended))))


def _drop_unknown(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
