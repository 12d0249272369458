"""Why a request does not simply continue an earlier call: compared once a fork is certain, never on the straight path."""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.core.message import Message
from rollyard.core.node import BreakReason, Node

QUOTE = 120  # characters of a summary that must come back for a restart to count as a compaction


def compare_echo(pairs: Sequence[tuple[Node, Message]], skipped: Sequence[int]) -> BreakReason:
    """The messages were recognised, but the tokens are others: what did the agent do to the answers it sent back?
    `pairs` are the recorded nodes beside the request's messages."""
    stripped = False
    for node, echo in pairs:
        if not node.sampled:
            continue
        if node.message.thinking and not echo.thinking:
            stripped = True
        elif _visible_words(node.message) != _visible_words(echo):
            return "assistant_rewritten"
    if stripped:
        return "thinking_stripped"
    return "history_edited" if skipped else "bridge_unproven"


def compare_history(
    before: Sequence[Message], now: Sequence[Message], same_tools: bool
) -> tuple[BreakReason, int | None]:
    """`before` is the likeliest predecessor's whole path, answer included. Gives the reason and the index of the first
    message that differs."""
    size = min(len(before), len(now))
    differs = opening = 0
    while differs < size and before[differs].digest == now[differs].digest:
        differs += 1
    while opening < len(before) and before[opening].role == "system":
        opening += 1
    opening = 0 if opening == len(before) else opening
    if differs <= opening and not _have_common(before[1:], now[1:]):
        return "new_root", None  # at most the system prompt is the same
    if differs in (len(before), len(now)) and not same_tools:
        return "tools_changed", differs
    if differs < size and before[differs].role == now[differs].role:
        role = now[differs].role
        if role == "system" and differs == 0:
            return "system_changed", differs
        if role == "assistant":
            return "assistant_rewritten", differs
    return "history_edited", differs


def _have_common(before: Sequence[Message], now: Sequence[Message]) -> bool:
    """Whether a message other than a system prompt is in both."""
    if not before or not now:
        return False
    known = {message.digest for message in before if message.role != "system"}
    return any(message.digest in known for message in now)


def quotes(answer: Message, messages: Sequence[Message]) -> bool:
    """Whether a request that starts over carries an earlier answer inside a user or system message: a summary."""
    text = answer.text.strip()
    if len(text) < QUOTE:
        return False
    middle = (len(text) - QUOTE) // 2
    part = text[middle : middle + QUOTE]
    return any(part in message.text for message in messages if message.role in ("user", "system"))


def _visible_words(message: Message) -> tuple[str, list[tuple[str, str]]]:
    return message.text, [(call.name, call.arguments) for call in message.tool_calls]
