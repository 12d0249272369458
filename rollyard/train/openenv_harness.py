"""OpenEnv's `HarnessAdapter` over our sessions: black-box the agent runs to its end, white-box each of its model calls is sampled
by the trainer's `model_step`. `build_harness_rollout_func` takes it as it is.

The agent runs its own tools in its own sandbox, so that a bound on tool calls is none that this side could keep: it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rollyard import sync
from rollyard.core.errors import ConfigError
from rollyard.train.openenv_session import OpenEnvSession, openenv_module


class RolloutHarness:
    def __init__(self) -> None:
        openenv_module("rollout").HarnessAdapter.register(RolloutHarness)

    def run_black_box(self, session: OpenEnvSession, limits: Any | None = None) -> Any:
        """Waits for the agent. What it may spend is the factory's `max_calls` and `limits`."""
        kinds = openenv_module("rollout")
        if limits is not None and limits != kinds.HarnessRunLimits():
            raise ConfigError(
                "a black-box run cannot keep HarnessRunLimits", hint="SessionFactory(max_calls=..., limits=...)"
            )
        session.start_agent()
        exit_code = session.wait_for_completion()
        result = kinds.HarnessRolloutResult(messages=session.initial_messages(), done=exit_code == 0)
        for turn, entry in enumerate(session.fetch_proxy_trace()):
            choice = entry["response"]["choices"][0]["message"]
            result.messages = [*entry["request"]["messages"], choice]
            result.events.append(_answer_event(kinds, turn, choice))
            result.prompt_ids += entry["prompt_token_ids"] or []
            result.completion_ids += entry["completion_token_ids"] or []
            result.logprobs += entry["per_token_logps"] or []
        return _conclude(kinds, result, exit_code=exit_code)

    def run_white_box(self, model_step: Any, session: OpenEnvSession, limits: Any | None = None) -> Any:
        """Answers the agent's calls with `model_step(messages, tools, sampling)` until it ends, or until `max_turns` are
        spent: then the agent is ended and the result says `truncated`."""
        kinds = openenv_module("rollout")
        bounds = limits or kinds.HarnessRunLimits()
        if bounds.max_tool_calls_per_turn is not None or bounds.max_total_tool_calls is not None:
            raise ConfigError("the agent runs its own tools: HarnessRunLimits cannot bound them", hint="max_turns")
        if session.trainer is None:
            raise ConfigError("run_white_box needs a session whose calls are held", hint="mode='interception_gate'")
        session.start_agent()
        result = kinds.HarnessRolloutResult(messages=session.initial_messages())
        turn = 0
        while (request := sync.wait(session.trainer.next_request())) is not None:
            if turn == bounds.max_turns:
                result.metrics["truncated"] = True
                session.end_agent()
                break
            tools = [_tool(spec) for spec in request["tools"]]
            step = model_step(request["messages"], tools, dict(bounds.sampling))
            message = step.response.to_message_dict()
            sync.wait(session.deliver(request, _completion(message, step)))
            result.prompt_ids.extend(step.prompt_ids)
            result.completion_ids.extend(step.completion_ids)
            result.logprobs.extend(step.logprobs)
            result.messages = [*request["messages"], message]
            result.events.append(_answer_event(kinds, turn, message))
            turn += 1
        if result.metrics.get("truncated"):
            return _conclude(kinds, result)
        exit_code = session.wait_for_completion()
        result.done = exit_code == 0
        return _conclude(kinds, result, exit_code=exit_code)


def _conclude(kinds: Any, result: Any, **metrics: Any) -> Any:
    """With the tools that the agent ran, as its last messages show them."""
    answers = {m.get("tool_call_id"): m.get("content") for m in result.messages if m.get("role") == "tool"}
    for message in result.messages:
        for call in message.get("tool_calls") or ():
            if call["id"] in answers:
                said = kinds.ToolResult(data=answers[call["id"]])
                made = kinds.ToolTraceEntry(call["function"]["name"], _arguments(call), said)
                result.tool_trace.append(made)
    result.metrics |= {"turns": len(result.events), "tool_calls": len(result.tool_trace), **metrics}
    return result


def _answer_event(kinds: Any, turn: int, message: Mapping[str, Any]) -> Any:
    calls = [
        {"id": call["id"], "name": call["function"]["name"], "arguments": _arguments(call)}
        for call in message.get("tool_calls") or ()
    ]
    payload = {"turn": turn, "content": message.get("content"), "tool_calls": calls}
    return kinds.RolloutEvent(type="model_response", payload=payload)


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """What the model wrote; it need not be JSON."""
    text = call["function"]["arguments"]
    try:
        found = json.loads(text)
    except ValueError:
        return {"text": text}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {"text": text}


def _tool(spec: Mapping[str, Any]) -> Any:
    function = spec["function"]
    kind = openenv_module("rollout").Tool
    return kind(
        name=function["name"],
        description=function.get("description") or "",
        input_schema=function.get("parameters") or {},
    )


def _completion(message: Mapping[str, Any], step: Any) -> dict[str, Any]:
    """A chat completion with the trainer's ids and logprobs where a model server would have put them."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": dict(message),
        "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
    }
    sampled: Sequence[int] = step.completion_ids
    if sampled:
        choice["token_ids"] = list(sampled)
    if step.logprobs:
        choice["logprobs"] = {"content": [{"token": "", "logprob": float(p)} for p in step.logprobs]}
    body: dict[str, Any] = {"object": "chat.completion", "choices": [choice]}
    if step.prompt_ids:
        body["prompt_token_ids"] = list(step.prompt_ids)
    return body
