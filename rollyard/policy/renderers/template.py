"""A renderer for any model whose chat template keeps its prefix: `tokenizers` for the ids, the template for the text.

The bridge is a difference of two texts. A short stand-in conversation (a user, an answer with the same tool calls) is
rendered once as it is and once with the new messages; what the second has after the first is what follows the answer in
every conversation. Only that is tokenised, right after the turn's close token, where no merge can reach back. A template
that rewrites what came before gives no such difference, and the bridge is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from rollyard.core.call import ids as to_ids
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.message import Message, Part, Text, Thinking, ToolSpec
from rollyard.policy.parsers.protocol import ReplyParser
from rollyard.policy.renderers.chat_template import ChatTemplate, TemplateRefused
from rollyard.policy.renderers.protocol import Bridged, SampledTurn, Unbridgeable

MARK = "⁂here⁂"
THOUGHT = "⁂thought⁂"
STAND_IN = Message("user", (Text("hello"),))
History = Literal["keep", "template"]


class Vocabulary(msgspec.Struct, frozen=True):
    """A tokenizer and the tokens that end a turn."""

    tokenizer: Any  # tokenizers.Tokenizer
    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> array[int]:
        return to_ids(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


class TemplateRenderer:
    """`history="keep"` leaves reasoning of earlier turns where it was sampled; `"template"` lets the template strip it
    when a user speaks again, which starts a new branch. `tools="omit"` serves a template that knows no tools."""

    def __init__(
        self,
        name: str,
        vocabulary: Vocabulary,
        template: ChatTemplate,
        parser: ReplyParser,
        *,
        history: History = "keep",
        tools: Literal["template", "omit"] = "template",
    ) -> None:
        self.name = name
        self.stop_ids = vocabulary.stop_ids
        self.parser = parser
        self._vocabulary = vocabulary
        self._template = template
        self._history: History = history
        self._tools = tools
        if not self.stop_ids:
            raise ConfigError(f"{name}: no token is known to end a turn", hint="pass stop=[...] token texts")
        self._stops = [vocabulary.decode([token]) for token in self.stop_ids]
        self._close = self._closing()

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> array[int]:
        return self.encode(self._template.render(messages, self._offer(tools), generation=True))

    def bridge(self, turn: SampledTurn, new: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Bridged:
        try:
            suffix = self._suffix(turn, new, self._offer(tools))
        except TemplateRefused as refusal:
            raise Unbridgeable("template_refused", refusal.message) from refusal
        closed = len(turn.completion) > 0 and turn.completion[-1] in self.stop_ids
        opening = to_ids() if closed else self._close_turn(turn)
        inserted = ((0, len(opening)),) if opening else ()
        return Bridged(opening + self.encode(suffix), inserted)

    def parse(self, completion: array[int], tools: Sequence[ToolSpec] = ()) -> Message:
        end = len(completion)
        while end and completion[end - 1] in self.stop_ids:
            end -= 1
        return self.parser.parse(self._vocabulary.decode(completion[:end]), tools)

    def completion_of(self, message: Message) -> array[int]:
        """The ids with which this model would say `message` in its canonical spelling."""
        return self.encode(self.parser.format(message) + self._close)

    def encode(self, text: str) -> array[int]:
        return self._vocabulary.encode(text)

    def decode(self, ids: array[int]) -> str:
        return self._vocabulary.decode(ids)

    def _offer(self, tools: Sequence[ToolSpec]) -> Sequence[ToolSpec]:
        if not tools or self._tools == "omit":
            return ()
        if not self._template.takes_tools:
            raise Unsupported(
                f"the chat template of {self.name} has no place for tools",
                hint='tools="omit" leaves them out (on the command line #tools=omit behind the policy)',
            )
        return tools

    @property
    def takes_tools(self) -> bool:
        """Whether a call may offer tools: the template shows them, or they are left out on purpose."""
        return self._tools == "omit" or self._template.takes_tools

    def _closing(self) -> str:
        """The text of the token with which the template ends an answer."""
        said = self._template.render((STAND_IN, Message("assistant", (Text(MARK),))), generation=False)
        tail = said[said.rfind(MARK) + len(MARK) :] if MARK in said else ""
        found = [(tail.rfind(stop), stop) for stop in self._stops if stop in tail]
        if not found:
            raise Unsupported(
                f"the chat template of {self.name} does not end an answer with one of {self._stops}",
                hint="name the closing token with stop=[...]",
            )
        return max(found)[1]

    def _suffix(self, turn: SampledTurn, new: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """What the template writes between the close of an answer and the model's next word."""
        stands = self._stand_in(turn)
        before = self._template.render((STAND_IN, stands), tools, generation=False)
        after = self._template.render((STAND_IN, stands, *new), tools, generation=True)
        if THOUGHT in before and THOUGHT not in after:
            raise Unbridgeable("thinking_stripped", "the template strips reasoning when these messages follow it")
        if MARK in before and after.count(MARK) == 1:
            before, after = before[before.rfind(MARK) :], after[after.rfind(MARK) :]
        if not after.startswith(before):
            raise Unbridgeable(
                "template_rewrites", "the template writes the answer differently once messages follow it"
            )
        at = before.rfind(self._close)
        if at < 0:
            raise Unbridgeable("no_close", "the template does not close the answer")
        return before[at + len(self._close) :] + after[len(before) :]

    def _stand_in(self, turn: SampledTurn) -> Message:
        """An answer of the same shape: the same tool calls, short text, reasoning only where it decides."""
        parts: list[Part] = [Text(MARK)]
        if self._history == "template" and turn.message.thinking:
            parts.insert(0, Thinking(THOUGHT))
        return Message("assistant", (*parts, *turn.message.tool_calls))

    def _close_turn(self, turn: SampledTurn) -> array[int]:
        """A turn that was cut is closed: its reasoning first, where it was cut inside it."""
        opened, closed = self.parser.think
        text = self._vocabulary.decode(turn.completion)
        cut_thinking = bool(opened) and opened in text and closed not in text
        cut_thinking = cut_thinking or (bool(turn.message.thinking) and not turn.message.text and closed not in text)
        return self.encode((closed if cut_thinking else "") + self._close)
