"""Which recorded path a request continues, by what its messages say. It finds; a token prefix proves.

Agents do not send back what they were sent: arguments are re-serialised, text is trimmed, reasoning is dropped, parallel
tool calls are split into pairs, commands are edited, system messages appear in the middle. So an answer is recognised by
the ids of its tool calls first, and by the digest of its normalised content otherwise. The walk goes down from the roots
with one dictionary look-up per message, keeping every path that still fits (equal answers to a retried request fit equally
well).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rollyard.core.message import Message, canonical_json
from rollyard.core.node import Node

ROOT = -1
WIDEST = 8  # paths followed at once; more only arise when an agent rewrites its whole history every turn


class WalkStep(NamedTuple):
    """A place on a walk: `node` accounts for the first `consumed` messages of the request. `exact` says that all of them
    say what was recorded; an answer whose parallel calls came back in parts does, and is marked by `split`. So does one that
    stands where it stood, with all of its tool-call ids, in other words: the agent edited it, which `edited` says. `skipped`
    are indexes of system messages that were not there before."""

    node: int
    consumed: int
    previous: WalkStep | None
    exact: bool = True
    skipped: tuple[int, ...] = ()
    split: bool = False
    edited: bool = False


START = WalkStep(ROOT, 0, None)


class _Walked(NamedTuple):
    """Where one known child after another led, for these messages."""

    tools: bytes
    messages: tuple[Message, ...]
    step: WalkStep


_NO_WALK = _Walked(b"", (), START)
_make = tuple.__new__  # a named tuple without the call of its constructor: walks make one per message


class Lineage:
    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._children: dict[tuple[int, bytes], list[int]] = {}
        self._roots: dict[tuple[bytes, bytes], list[int]] = {}
        self._systems: dict[int, list[int]] = {}
        self._by_tool_call: dict[str, list[int]] = {}
        self._answers: set[bytes] = set()
        self._walked = _NO_WALK  # the last straight walk, for as long as there is no second way along it
        self._quotes = False  # whether some answer stands as context too: the same words came back as other tokens

    def insert(self, node: Node, tools: bytes) -> None:
        """Index a node; one that is placed anew under the same id leaves its old place."""
        old = self._nodes.get(node.id)
        if old is not None:
            self._slot(old, tools).remove(node.id)
        self._nodes[node.id] = node
        slot = self._slot(node, tools)
        if slot or old is not None:
            self._walked = _NO_WALK
        slot.append(node.id)
        if node.message.role == "system" and node.parent is not None:
            self._systems.setdefault(node.parent, []).append(node.id)
        if node.sampled and old is None:
            self._answers.add(node.message.digest)
            for tool_call in node.message.tool_calls:
                if tool_call.id:
                    self._by_tool_call.setdefault(tool_call.id, []).append(node.id)
        elif node.message.role == "assistant" and not node.sampled:
            self._quotes = True

    def _slot(self, node: Node, tools: bytes) -> list[int]:
        if node.parent is None:
            return self._roots.setdefault((tools, node.message.digest), [])
        return self._children.setdefault((node.parent, node.message.digest), [])

    def knows(self, answer: Message) -> bool:
        """Whether an assistant message is one that was recorded here."""
        return answer.digest in self._answers or any(call.id in self._by_tool_call for call in answer.tool_calls)

    def walk(self, messages: Sequence[Message], tools: bytes) -> list[WalkStep]:
        """The deepest places reached, newest node last; empty when not even the first message is known. Where the recorded
        answers lead to a dead end, a path that holds one of them as context may lead on."""
        reached = self._walk(messages, tools, quotes=False)
        consumed = reached[-1].consumed if reached else 0
        if self._quotes and any(message.role == "assistant" for message in messages[consumed:]):
            other = self._walk(messages, tools, quotes=True)
            if other and other[-1].consumed > consumed:
                return other
        return reached

    def _walk(self, messages: Sequence[Message], tools: bytes, *, quotes: bool) -> list[WalkStep]:
        start, step = self._walk_straight(messages, tools)
        reached = frontier = [step]
        if not start:
            if not self._may_begin(messages, tools):
                return []
            reached = []
        for index in range(start, len(messages)):
            message = messages[index]
            following: list[WalkStep] = []
            for step in frontier:
                following.extend(self._advance(step, index, message, tools, quotes))
            if following:
                reached = frontier = following if len(following) == 1 else _newest(following)
            elif message.role == "system" and index:
                frontier = [step._replace(exact=False, skipped=(*step.skipped, index)) for step in frontier]
            else:
                break
        return reached

    def _may_begin(self, messages: Sequence[Message], tools: bytes) -> bool:
        """Whether anything that is recorded may begin as a request does: most that do not are new from their first word."""
        first = messages[0] if messages else None
        return first is not None and (first.role == "assistant" or (tools, first.digest) in self._roots)

    def _walk_straight(self, messages: Sequence[Message], tools: bytes) -> tuple[int, WalkStep]:
        """The part of a walk that is nearly all of it: one known child after another, and no choice. It goes on from where the
        last one came to, if that began with the same messages."""
        walked = self._walked
        known = len(walked.messages)
        goes_on = walked.tools == tools and messages[:known] == walked.messages
        index, step = (known, walked.step) if goes_on else (0, START)
        began, node, children = index, step.node, self._children
        for message in messages[index:]:
            found = self._roots.get((tools, message.digest)) if node == ROOT else children.get((node, message.digest))
            if found is None or len(found) != 1:
                break
            node = found[0]
            index += 1
            step = _make(WalkStep, (node, index, step, True, (), False, False))
        if index > began:
            self._walked = _Walked(tools, tuple(messages[:index]), step)
        return index, step

    def _advance(self, step: WalkStep, index: int, message: Message, tools: bytes, quotes: bool) -> Iterator[WalkStep]:
        onward = step._replace(consumed=index + 1, previous=step)
        if step.node == ROOT:
            found = self._roots.get((tools, message.digest))
        else:
            found = self._children.get((step.node, message.digest))
        if found is not None and len(found) == 1:
            yield onward._replace(node=found[0])
            return
        if message.role == "assistant":
            named = self._by_ids(step, message)
            if named is not None:
                answer = self._nodes[named].message
                split, same = is_part(answer, message), named in (found or ())
                yield onward._replace(
                    node=named,
                    exact=step.exact and (split or same or makes_same_calls(answer, message)),
                    split=step.split or split,
                    edited=step.edited or not (is_quoted(answer, message) if split else same),
                )
                if quotes:
                    yield from (onward._replace(node=child) for child in found or () if not self._nodes[child].sampled)
                return
            answer = self._last_answer(step)
            if repeats(answer, message):
                edited = step.edited or not is_quoted(answer, message)
                yield onward._replace(exact=step.exact and is_part(answer, message), split=True, edited=edited)
                return
        if found:
            yield from (onward._replace(node=child) for child in found)
            return
        for system in self._systems.get(step.node, ()):
            for child in self._children.get((system, message.digest), ()):
                yield onward._replace(
                    node=child, previous=step._replace(node=system, previous=step, exact=False), exact=False
                )

    def _by_ids(self, step: WalkStep, message: Message) -> int | None:
        """The recorded answer below this place that made one of these tool calls."""
        parent = None if step.node == ROOT else step.node
        for tool_call in message.tool_calls:
            for node in reversed(self._by_tool_call.get(tool_call.id, ())):
                if self._nodes[node].parent == parent:
                    return node
        return None

    def _last_answer(self, step: WalkStep) -> Message | None:
        node = self._nodes.get(step.node)
        while node is not None and not node.sampled:
            node = self._nodes.get(node.parent) if node.parent is not None else None
        return node.message if node is not None else None


def repeats(answer: Message | None, message: Message) -> bool:
    """Whether an assistant message only repeats tool calls of an answer that is already on the path (split parallels)."""
    if answer is None or message.role != "assistant":
        return False
    wanted = {call.id for call in message.tool_calls if call.id}
    return bool(wanted) and wanted <= {call.id for call in answer.tool_calls}


def is_part(answer: Message | None, message: Message) -> bool:
    """Whether an assistant message is one part of an answer whose parallel calls were split."""
    return repeats(answer, message) and answer is not None and len(message.tool_calls) < len(answer.tool_calls)


def makes_same_calls(answer: Message, message: Message) -> bool:
    """Whether an assistant message makes the tool calls of an answer, by id, tool and order, whatever their arguments."""
    names = [(call.id, call.name) for call in answer.tool_calls]
    return all(id for id, _ in names) and names == [(call.id, call.name) for call in message.tool_calls]


def is_quoted(answer: Message | None, message: Message) -> bool:
    """Whether the words and calls of an assistant message are an answer's, or a part of them."""
    if answer is None:
        return False
    calls = {call.id: canonical_json(call.arguments) for call in answer.tool_calls}
    text = message.text.rstrip()
    return (not text or text == answer.text.rstrip()) and all(
        calls.get(call.id) == canonical_json(call.arguments) for call in message.tool_calls
    )


def _newest(steps: list[WalkStep]) -> list[WalkStep]:
    unique = {step.node: step for step in steps}
    return [unique[node] for node in sorted(unique)[-WIDEST:]]
