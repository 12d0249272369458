"""What a move comes to: a value of plain JSON, or a refusal with a code that both wires carry. No NaN gets past here."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from rollyard.core.errors import EnvError
from rollyard.envs.env import StepResult
from rollyard.envs.journal import KeptAnswer

_encode = msgspec.json.Encoder().encode


class EnvRefused(EnvError):
    """An answer of no; `code` is the word that both wires carry."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class EnvResult(msgspec.Struct, frozen=True):
    """A value and the same as JSON, or an error."""

    value: Any = None
    raw: bytes = b"null"
    error: EnvRefused | None = None

    @staticmethod
    def of(value: Any) -> EnvResult:
        """`value` is of plain types; one that JSON cannot carry raises."""
        raw = _encode(value)
        if b"null" in raw:  # what the encoder writes for None, and for a number that JSON cannot carry
            finite(value)
        return EnvResult(value=value, raw=raw)

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    @property
    def code(self) -> str:
        return "OK" if self.error is None else self.error.code

    @property
    def kept(self) -> KeptAnswer:
        if self.error is not None:
            return KeptAnswer(code=self.error.code, message=self.error.message)
        return KeptAnswer(value=self.value)

    @staticmethod
    def replay(kept: KeptAnswer) -> EnvResult:
        return EnvResult.of(kept.value) if kept.code is None else EnvResult(error=EnvRefused(kept.code, kept.message))


def as_plain(result: StepResult) -> dict[str, Any]:
    """As JSON values. A reward that is no number is an error here, never a null on the wire."""
    if result.reward is not None and not math.isfinite(result.reward):
        raise EnvRefused(
            "EXECUTION_ERROR",
            f"the environment's reward is {result.reward}, which is not a number that can be a reward",
        )
    return msgspec.to_builtins(result, str_keys=True)


def finite(value: Any) -> None:
    """Raises unless every number in a value of plain types is one."""
    kind = type(value)
    if kind is dict:
        for inner in value.values():
            finite(inner)
    elif kind is list or kind is tuple:
        for inner in value:
            finite(inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise EnvRefused("EXECUTION_ERROR", f"the environment's answer has a number that JSON cannot carry: {value}")
