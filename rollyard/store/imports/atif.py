"""ATIF documents and Harbor's job folders read: a trajectory is a rollout, and each step that asked a model is a call of it.

A job is a folder of trials; a trial has `result.json` and, where its agent writes one, `agent/trajectory.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.call import Usage
from rollyard.core.errors import ConfigError
from rollyard.core.message import Message, Part, Role, Thinking
from rollyard.core.rollout import Verdict
from rollyard.store.imports.foreign import UNKNOWN, ForeignCall, ForeignRollout, parts_of, tool_call, tool_result

_VERSION = "ATIF-v1."
_ROLES: dict[str, Role] = {"agent": "assistant", "system": "system", "user": "user"}


def read_atif(path: Path) -> Iterator[ForeignRollout]:
    """A document, or one a line. What our own export adds (task, attempt, reward) is read again."""
    for document in _documents(path):
        extra: Mapping[str, Any] = document.get("extra") or {}
        reward = extra.get("reward")
        yield _rollout(
            document,
            task_id=str(extra.get("task_id") or document.get("trajectory_id") or path.stem),
            verdict=None if reward is None else Verdict(reward=float(reward)),
            attempt=int(extra.get("attempt") or 0),
        )


def read_harbor_job(folder: Path) -> Iterator[ForeignRollout]:
    """The trials of a job, or of a folder of jobs. The n-th trial of a task by an agent is its n-th attempt."""
    seen: dict[tuple[str, str], int] = {}
    for file in sorted(folder.rglob("result.json")):
        result = _decode(file)
        if "trial_name" not in result:  # the job's own
            continue
        info: Mapping[str, Any] = result.get("agent_info") or {}
        key = (str(result["task_name"]), str(info.get("name")))
        seen[key] = seen.get(key, -1) + 1
        yield _trial(file.parent, result, info, seen[key])


def _trial(folder: Path, result: Mapping[str, Any], info: Mapping[str, Any], attempt: int) -> ForeignRollout:
    written = folder / "agent" / "trajectory.json"
    document = _decode(written) if written.exists() else {"steps": [], "agent": {}}
    log = folder / "verifier" / "test-stdout.txt"
    rewards: Mapping[str, float] = (result.get("verifier_result") or {}).get("rewards") or {}
    verdict = None
    if rewards:
        reward = rewards.get("reward", next(iter(rewards.values())))
        text = log.read_text(errors="replace") if log.exists() else ""
        verdict = Verdict(reward=float(reward), parts=dict(rewards), log=text)
    began, ended = _seconds(result.get("started_at")), _seconds(result.get("finished_at"))
    failed: Mapping[str, Any] = result.get("exception_info") or {}
    ours: Mapping[str, Any] = (result.get("agent_result") or {}).get("metadata") or {}
    attempt = ours["attempt"] if isinstance(ours.get("attempt"), int) else attempt
    found = _rollout(document, task_id=str(result["task_name"]), verdict=verdict, attempt=attempt)
    model = ours.get("policy") or (info.get("model_info") or {}).get("name")
    return msgspec.structs.replace(
        found,
        agent=str(info.get("name") or found.agent),
        agent_version=info.get("version") or found.agent_version,
        model=str(model or found.model),
        error=f"{failed.get('exception_type')}: {failed.get('exception_message')}" if failed else None,
        started_at=began,
        wall_s=max(0.0, ended - began),
        source=str(result["trial_name"]),
    )


def _rollout(document: Mapping[str, Any], *, task_id: str, verdict: Verdict | None, attempt: int) -> ForeignRollout:
    agent: Mapping[str, Any] = document.get("agent") or {}
    model = str(agent.get("model_name") or UNKNOWN)
    history: list[Message] = []
    calls: list[ForeignCall] = []
    for step in document.get("steps") or ():
        message = _message(step)
        if step["source"] == "agent" and step.get("llm_call_count") != 0 and not step.get("is_copied_context"):
            calls.append(_call(step, tuple(history), message, model))
        if message.parts:
            history.append(message)
        for result in (step.get("observation") or {}).get("results") or ():
            history.append(tool_result(str(result.get("source_call_id") or ""), result.get("content")))
    first = next((one.text for one in history if one.role == "user"), "")
    return ForeignRollout(
        task_id=task_id,
        instruction=first or task_id,
        attempt=attempt,
        agent=str(agent.get("name") or UNKNOWN),
        agent_version=agent.get("version"),
        model=model,
        calls=tuple(calls),
        verdict=verdict,
        started_at=calls[0].at if calls else 0.0,
        source=str(document.get("session_id") or ""),
    )


def _message(step: Mapping[str, Any]) -> Message:
    parts: list[Part] = []
    if step.get("reasoning_content"):
        parts.append(Thinking(str(step["reasoning_content"])))
    parts += parts_of(step.get("message"))
    for one in step.get("tool_calls") or ():
        arguments = (one.get("extra") or {}).get("raw_arguments", one.get("arguments") or {})
        parts.append(tool_call(str(one["tool_call_id"]), str(one["function_name"]), arguments))
    return Message(_ROLES[step["source"]], tuple(parts))


def _call(step: Mapping[str, Any], prompt: tuple[Message, ...], answer: Message, model: str) -> ForeignCall:
    metrics: Mapping[str, Any] = step.get("metrics") or {}
    counts = ("prompt_tokens", "completion_tokens", "cached_tokens")
    return ForeignCall(
        prompt=prompt,
        answer=answer,
        model=str(step.get("model_name") or model),
        usage=Usage(**{name: metrics.get(name) for name in counts}),
        prompt_ids=metrics.get("prompt_token_ids"),
        completion_ids=metrics.get("completion_token_ids"),
        logprobs=metrics.get("logprobs"),
        at=_seconds(step.get("timestamp")),
    )


def _documents(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_bytes()
        found = (
            [msgspec.json.decode(line) for line in text.splitlines() if line.strip()]
            if path.suffix == ".jsonl"
            else None
        )
        for document in found if found is not None else [msgspec.json.decode(text)]:
            if not isinstance(document, dict) or not str(document.get("schema_version", "")).startswith(_VERSION):
                raise ConfigError(f"{path} is no ATIF document", hint=f"its schema_version begins with {_VERSION}")
            yield document
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def _decode(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a JSON object: {error}") from error


def _seconds(text: str | None) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0
