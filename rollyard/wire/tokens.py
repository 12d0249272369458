"""What a model server told us about the tokens it sampled, and whether it can be believed.

Servers say it in many places: vLLM at the top level and per choice, SGLang per choice and in `meta_info`, llama.cpp inside
`logprobs`. A count that does not fit, a number that is none, or a placeholder makes a turn untrainable; it is recorded as
a flaw, never repaired.
"""

from __future__ import annotations

import math
import secrets
import struct
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec

from rollyard.core.call import CaptureLevel, TokenText, Usage, VersionSpan
from rollyard.core.numbers import whole_number
from rollyard.wire.body import is_given
from rollyard.wire.codec import Memo

_numbers = msgspec.json.Decoder(list[int])

_SENTINEL = -9999.0
_ROUNDING = 1e-4  # engines that compute in half precision may end a hair above zero


class TopLogprob(msgspec.Struct, gc=False):
    token: str = ""
    logprob: float | None = None


class TokenLogprob(TokenText, frozen=True, gc=False, rename={"text": "token", "top": "-"}):
    """A token as chat completions tell it. Where the server names no alternatives, it is what a reply keeps."""

    text: str = ""
    id: int | None = None
    top_logprobs: tuple[TopLogprob, ...] | None = None


class ReportedTokens(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The token side of a reply, after the checks."""

    prompt_ids: array[int] | None = None
    completion_ids: array[int] | None = None
    logprobs: array[float] | None = None
    tokens: tuple[TokenText, ...] = ()
    capture: CaptureLevel = "text"
    flaws: tuple[str, ...] = ()


def _ids_within(entries: Sequence[TokenLogprob]) -> array[int] | None:
    """Ids that hide in logprob entries: llama.cpp's `id`, or vLLM's `token_id:N` in place of text."""
    found: list[int] = []
    for entry in entries:
        if entry.id is not None:
            found.append(entry.id)
        elif entry.text.startswith("token_id:") and entry.text[9:].isdecimal():
            found.append(int(entry.text[9:]))
        else:
            return None
    return as_ids(found)


def as_ids(values: Sequence[int] | None) -> array[int] | None:
    """None also where a value is no 32-bit number. Packing first is twice as fast as `array` is on its own."""
    if values is None:
        return None
    try:
        return array("i", struct.pack(f"{len(values)}i", *values))
    except struct.error:
        return None


_PROMPT = b"prompt ids "  # begins the keys of prompts in a memo
_KEY = 256  # bytes of a prompt that tell it from the others of a rollout
SHORT = 1024  # bytes of a prompt, or of a reply, below which nothing is remembered: parsing it costs less
_MEMBER = b'"prompt_token_ids":'
_MARKED = b'["' + secrets.token_hex(16).encode() + b'"'  # the beginning of a list that no server can write
_BLANK = b" \n\r\t"


class _Prompt(msgspec.Struct, frozen=True, gc=False):
    text: memoryview  # the JSON of `ids` without its closing bracket
    ids: array[int]

    def begins(self, data: bytes, at: int = 0) -> bool:
        """Whether a list at this place begins with these ids."""
        end = at + len(self.text)
        return data.startswith(self.text, at) and data[end : end + 1] in (b",", b"]", b" ")


class CutReply(NamedTuple):
    """A reply in which a mark stands for the prompt ids that the turn before had, so that only what was added is parsed. Where
    the mark comes out as the beginning of the prompt ids, those ids stood there; where it does not, this says nothing."""

    short: bytes
    whole: bytes
    at: int  # where the ids begin
    known: _Prompt
    key: bytes

    def prompt_ids(self, raw: msgspec.Raw, memo: Memo) -> array[int] | None:
        """The ids of the whole prompt; None where the mark is not in `raw`, or they are no ids."""
        data = bytes(raw)
        if not data.startswith(_MARKED):
            return None
        rest = data[len(_MARKED) : -1].rstrip(_BLANK)
        added = as_ids(_numbers.decode(b"[" + rest.lstrip(b"," + _BLANK) + b"]"))
        if added is None:
            return None
        found = self.known.ids + added
        text = memoryview(self.whole)[self.at : self.at + len(self.known.text) + len(rest)]
        memo[self.key] = _Prompt(text, found)
        return found


def cut_prompt(body: bytes, memo: Memo) -> CutReply | None:
    """None where nothing of its prompt is known."""
    if len(body) < SHORT:
        return None
    at = body.find(_MEMBER) + len(_MEMBER)
    if body[at : at + 1] == b" ":
        at += 1
    key = _PROMPT + body[at : at + _KEY]
    known: _Prompt | None = memo.get(key)
    if known is None or not known.begins(body, at):
        return None
    return CutReply(b"".join((body[:at], _MARKED, body[at + len(known.text) :])), body, at, known, key)


def prompt_ids(raw: msgspec.Raw, memo: Memo | None) -> array[int] | None:
    """A server's prompt ids. They begin with those of the turn before, so with a memo only what was added is parsed."""
    if not is_given(raw):
        return None
    data = bytes(raw)
    if memo is None or len(data) < SHORT:
        return as_ids(_numbers.decode(data))
    key = _PROMPT + data[:_KEY]
    known: _Prompt | None = memo.get(key)
    if known is not None and known.begins(data):
        rest = _numbers.decode(b"[" + data[len(known.text) :].lstrip(b"," + _BLANK))
        added = as_ids(rest)
        found = None if added is None else known.ids + added
    else:
        found = as_ids(_numbers.decode(data))
    if found:
        memo[key] = _Prompt(memoryview(data.rstrip(b"]" + _BLANK)), found)
    return found


def read_tokens(
    *,
    prompt: array[int] | None,
    completion: Sequence[int] | None,
    entries: Sequence[TokenLogprob] | None,
    usage: Usage,
) -> ReportedTokens:
    completion_ids = as_ids(completion)
    values: list[float | None] | None = None
    tokens: tuple[TokenText, ...] = ()
    if entries is not None:
        values = [entry.logprob for entry in entries]
        if any([entry.top_logprobs for entry in entries]):
            tokens = tuple([_token(entry) for entry in entries])
        else:
            tokens = tuple(entries)
    flaws: list[str] = []
    if completion is not None and completion_ids is None:
        flaws.append("ids_out_of_range")
    if completion is None and entries:
        completion_ids = _ids_within(entries)
        if usage.completion_tokens not in (None, len(entries)):
            flaws.append(f"token_count: {len(entries)} logprobs, usage says {usage.completion_tokens}")
            completion_ids = None  # tokens were merged, or those of tool calls left out: not the whole turn
            values = None
    elif completion_ids is not None and usage.completion_tokens not in (None, len(completion_ids)):
        flaws.append(f"token_count: {len(completion_ids)} ids, usage says {usage.completion_tokens}")
    logprobs = _check_logprobs(values, completion_ids, flaws)
    return ReportedTokens(
        prompt_ids=prompt,
        completion_ids=completion_ids,
        logprobs=logprobs,
        tokens=tokens,
        capture="tokens" if completion_ids is not None else "logprobs" if logprobs is not None else "text",
        flaws=tuple(flaws),
    )


def _check_logprobs(
    values: Sequence[float | None] | None, completion_ids: array[int] | None, flaws: list[str]
) -> array[float] | None:
    if values is None:
        return None
    if completion_ids is not None and len(values) != len(completion_ids):
        flaws.append(f"length_mismatch: {len(completion_ids)} ids, {len(values)} logprobs")
        return None
    known = cast("Sequence[float]", values)
    try:
        packed, total = struct.pack(f"{len(known)}d", *known), sum(known)
    except (struct.error, OverflowError):  # some are not known, or no numbers of this kind
        packed, total = b"", math.nan
    if not math.isfinite(total):
        flaws.append("non_finite_logprob")
        return None
    positive = bool(known) and max(known) > _ROUNDING
    if positive:
        flaws.append("positive_logprob")
    if (positive or total <= _SENTINEL / 2) and min(known) <= _SENTINEL:  # else none of them can be that low
        flaws.append("sentinel_logprob")
    return array("d", packed)


def _token(entry: TokenLogprob) -> TokenText:
    top = entry.top_logprobs or ()
    return TokenText(entry.text, entry.logprob, tuple([(t.token, t.logprob) for t in top if t.logprob is not None]))


def from_meta_info(meta: dict[str, Any]) -> tuple[list[int], list[TokenLogprob]] | None:
    """SGLang's `output_token_logprobs: [[logprob, id, text], ...]`."""
    rows = meta.get("output_token_logprobs")
    if not isinstance(rows, list):
        return None
    found: list[int] = []
    entries: list[TokenLogprob] = []
    for row in rows:
        if not (isinstance(row, list) and len(row) >= 2 and isinstance(row[1], int)):
            return None
        value = row[0] if isinstance(row[0], int | float) else None
        text = row[2] if len(row) > 2 and isinstance(row[2], str) else ""
        found.append(row[1])
        entries.append(TokenLogprob(text, value, id=row[1]))
    return found, entries


def version_spans(meta: dict[str, Any]) -> tuple[VersionSpan, ...]:
    """SGLang's `weight_versions: [[version, start, end], ...]`, where the versions are numbers."""
    rows = meta.get("weight_versions")
    if not isinstance(rows, list):
        return ()
    spans: list[VersionSpan] = []
    for row in rows:
        numbers = [whole_number(value) for value in row] if isinstance(row, list) else []
        if len(numbers) != 3 or None in numbers:
            return ()
        spans.append(VersionSpan(*cast("list[int]", numbers)))
    return tuple(spans)


def version_of(meta: dict[str, Any]) -> int | None:
    return whole_number(meta.get("weight_version"))
