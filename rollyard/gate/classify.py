"""What a call is for: `agent`, `subagent`, `auxiliary` or `compaction`. Calls are labelled here and never dropped.

Agents that say so in headers are believed (opencode, Claude Code, Codex). For the others the shape decides: a rollout's main
thread is the first call that offers tools; a call with other instructions and other tools is a sub-agent; a call without
tools beside one that has them is a side job, a compaction when its last words ask for a summary. An agent that never offers
tools has no side jobs but those whose instructions say so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from rollyard.core.call import Call, CallKind

# headers that say which thread a call belongs to; everything else a client sends stays out of the record
KEPT_HEADERS: Mapping[bytes, str] = {
    name.encode(): name
    for name in (
        "user-agent",
        "x-session-id",
        "x-parent-session-id",
        "x-session-affinity",
        "x-claude-code-session-id",
        "x-claude-code-agent-id",
        "session-id",
        "session_id",
        "thread-id",
        "x-codex-window-id",
        "x-codex-parent-thread-id",
        "x-codex-turn-metadata",
        "x-openai-subagent",
        "agent-session-id",
        "anthropic-version",
        "anthropic-beta",
        "x-stainless-retry-count",
    )
}

_TITLE = re.compile(r"\b(title|session name|name (?:for|of) (?:this|the) (?:session|conversation|chat))\b", re.I)
_SUMMARY = re.compile(r"\b(summar(?:y|ise|ize|ising|izing)|compact(?:ion|ed)?|hand-?off|checkpoint)\b", re.I)
_END = 2000  # characters at either end of a text that are searched
_NO_TOOLS = re.compile(r"\b(?:do not|don't|never|without)\b[^.\n]{0,40}\btools?\b", re.I)


class Label(msgspec.Struct, frozen=True):
    """What a call is for, and the thread of the agent that it belongs to."""

    kind: CallKind
    thread: str | None = None
    parent_thread: str | None = None


class Shape(msgspec.Struct):
    """What a rollout's main thread looks like: the instructions and tools of its first call with tools."""

    system: bytes | None = None
    tools: bytes | None = None


def label(call: Call, headers: Mapping[str, str], shape: Shape) -> Label:
    """`shape` is filled in by the first call that offers tools."""
    thread, parent, said = _read_headers(headers)
    if said is not None:
        return Label(said, thread, parent)
    return Label(_guess_kind(call, shape, known_thread=thread is not None), thread, parent)


def _read_headers(headers: Mapping[str, str]) -> tuple[str | None, str | None, CallKind | None]:
    if not headers:
        return None, None, None
    if (session := headers.get("x-session-id")) is not None:
        parent = headers.get("x-parent-session-id")
        return session, parent, None if parent is None else "subagent"
    if (session := headers.get("x-claude-code-session-id")) is not None:
        agent = headers.get("x-claude-code-agent-id")
        return (session, None, None) if agent is None else (agent, session, "subagent")
    if (thread := headers.get("thread-id")) is not None:
        parent = headers.get("x-codex-parent-thread-id")
        if '"request_kind":"compaction"' in headers.get("x-codex-turn-metadata", "").replace(" ", ""):
            return thread, parent, "compaction"
        return thread, parent, "subagent" if parent is not None or "x-openai-subagent" in headers else None
    return headers.get("agent-session-id") or headers.get("session_id"), None, None


def _guess_kind(call: Call, shape: Shape, *, known_thread: bool) -> CallKind:
    if call.tools:
        system = next((m.digest for m in call.messages if m.role == "system"), b"")
        if shape.tools is None:
            shape.system, shape.tools = system, call.tools_digest
        if _asks_summary(call) and _NO_TOOLS.search(_last_user(call)):
            return "compaction"
        other = shape.tools != call.tools_digest and shape.system != system
        return "subagent" if other and not known_thread else "agent"
    if shape.tools is not None:
        return "compaction" if len(call.messages) > 1 and _asks_summary(call) else "auxiliary"
    return "auxiliary" if call.sampling.max_tokens == 1 or _asks_title(call) else "agent"


def _last_user(call: Call) -> str:
    for message in reversed(call.messages):
        if message.role == "user":
            return message.text
    return ""


def _asks_summary(call: Call) -> bool:
    """The words are looked for near both ends: the text between may be the whole conversation."""
    text = _last_user(call)
    return bool(_SUMMARY.search(text, 0, _END) or (len(text) > _END and _SUMMARY.search(text[-_END:])))


def _asks_title(call: Call) -> bool:
    """Looked for in the first two system messages and then the user's, three in all."""
    words = [m.text[:600] for m in call.messages if m.role == "system"][:2]
    words += [m.text[:200] for m in call.messages if m.role == "user"]
    text = " ".join(words[:3]).lower()
    return ("title" in text or "name" in text) and _TITLE.search(text) is not None  # one of them is in every match
