"""What a renderer is: the tokens of one model family.

`render` turns a whole conversation into ids. `bridge` extends ids that a model saw and sampled by new messages, without
touching one of them. `parse` turns sampled ids into a message. `stop_ids` are the tokens that end a turn. A renderer that
cannot prove a bridge raises `Unbridgeable`; the caller then renders in full and records why.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from rollyard.core.errors import PolicyError
from rollyard.core.message import Message, ToolSpec

ShowTools = Literal["template", "omit"]  # the tools of a call: where the template shows them, or not at all


class Unbridgeable(PolicyError):
    """The new messages cannot be appended to the sampled ids; `reason` is a word for the record."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Bridged(msgspec.Struct, frozen=True):
    """`ids` come after what was sampled; `inserted` are ranges of them that neither the model nor the agent wrote."""

    ids: array[int]
    inserted: tuple[tuple[int, int], ...] = ()


class SampledTurn(msgspec.Struct, frozen=True):
    """A sampled turn. `strand[:begun]` is what the model saw; `completion` what it sampled; `message` what that became."""

    strand: array[int]
    begun: int
    completion: array[int]
    message: Message


class Renderer(Protocol):
    name: str
    stop_ids: tuple[int, ...]

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> array[int]:
        """The whole conversation, ready for the model's next turn."""
        ...

    def bridge(self, turn: SampledTurn, new: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Bridged:
        """What follows `turn` so that the model can answer `new`."""
        ...

    def parse(self, completion: array[int], tools: Sequence[ToolSpec] = ()) -> Message: ...
    def decode(self, ids: array[int]) -> str: ...


def takes_tools(renderer: Renderer) -> bool:
    """Whether calls that offer tools can be rendered. A renderer that says nothing about it can."""
    return bool(getattr(renderer, "takes_tools", True))
