"""Inspect logs (`.eval`) read back: each sample and epoch is a rollout, each model event a call of it.

New logs are zips whose members are compressed with zstandard, which Python's own zipfile reads from 3.14 on.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.call import Usage
from rollyard.core.errors import ConfigError, MissingExtra
from rollyard.core.message import Message, Part
from rollyard.core.rollout import Verdict
from rollyard.store.imports.foreign import UNKNOWN, ForeignCall, ForeignRollout, parts_of, tool_call, tool_result

_ZSTANDARD = 93
_HEADER = 30  # bytes of a member's own header before its name
_WORDS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}  # Inspect's letters: correct, incorrect, partial, no answer


def read_inspect_log(path: Path) -> Iterator[ForeignRollout]:
    try:
        with zipfile.ZipFile(path) as log:
            names = log.namelist()
            header = _read(log, path, "header.json" if "header.json" in names else "_journal/start.json")
            for name in sorted(name for name in names if name.startswith("samples/")):
                yield _rollout(_read(log, path, name), header["eval"])
    except (zipfile.BadZipFile, KeyError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is no Inspect log: {error}") from error


def _read(log: zipfile.ZipFile, path: Path, name: str) -> Any:
    info = log.getinfo(name)
    if info.compress_type != _ZSTANDARD:
        return msgspec.json.decode(log.read(info))
    try:
        import zstandard  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtra("zstandard", "inspect", why=f"reading {path.name}") from error
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(_HEADER)
        file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), 1)
        packed = file.read(info.compress_size)
    return msgspec.json.decode(zstandard.ZstdDecompressor().decompressobj().decompress(packed))


def _rollout(sample: Mapping[str, Any], spec: Mapping[str, Any]) -> ForeignRollout:
    prompt = sample["input"]
    instruction = prompt if isinstance(prompt, str) else "\n".join(_message(one).text for one in prompt)
    metadata: Mapping[str, Any] = sample.get("metadata") or {}
    return ForeignRollout(
        task_id=str(metadata.get("task_id") or sample["id"]),
        instruction=instruction,
        attempt=int(sample.get("epoch", 1)) - 1,
        agent=str(metadata.get("agent") or spec.get("solver") or "inspect"),
        model=str(spec.get("model") or UNKNOWN),
        calls=tuple(_calls(sample)),
        verdict=_verdict(sample.get("scores") or {}),
        error=(sample.get("error") or {}).get("message"),
        started_at=_seconds(sample.get("started_at")),
        wall_s=float(sample.get("total_time") or 0),
        source=f"{spec.get('eval_id', '')}/{sample['id']}/{sample.get('epoch', 1)}",
    )


def _calls(sample: Mapping[str, Any]) -> Iterator[ForeignCall]:
    """One for each model event; where a log has none, one for each answer of its conversation."""
    pool: Sequence[Any] = (sample.get("events_data") or {}).get("messages") or ()
    attached: Mapping[str, str] = sample.get("attachments") or {}
    events = [event for event in sample.get("events") or () if event.get("event") == "model"]
    for event in events:
        choices = (event.get("output") or {}).get("choices") or ()
        if not choices:
            continue
        refs = event.get("input_refs") or ()
        fields = [message for start, end in refs for message in pool[start:end]] or event.get("input") or ()
        yield ForeignCall(
            prompt=tuple(_message(one, attached) for one in fields),
            answer=_message(choices[0]["message"], attached),
            model=str(event.get("model") or UNKNOWN),
            usage=_usage(event["output"].get("usage") or {}),
            at=_seconds(event.get("completed") or event.get("timestamp")),
        )
    if not events:
        messages = [_message(one, attached) for one in sample.get("messages") or ()]
        for number, message in enumerate(messages):
            if message.role == "assistant":
                yield ForeignCall(prompt=tuple(messages[:number]), answer=message)


def _message(fields: Mapping[str, Any], attached: Mapping[str, str] = {}) -> Message:
    content = _resolve(fields.get("content"), attached)
    if fields["role"] == "tool":
        return tool_result(str(fields.get("tool_call_id") or ""), content, failed=fields.get("error") is not None)
    calls = [
        tool_call(one["id"], one["function"], one.get("arguments") or {}) for one in fields.get("tool_calls") or ()
    ]
    parts: tuple[Part, ...] = (*parts_of(content), *calls)
    return Message(fields["role"], parts)


def _resolve(value: Any, attached: Mapping[str, str]) -> Any:
    """Long texts are kept aside and named `attachment://DIGEST`."""
    if isinstance(value, str):
        return attached.get(value.removeprefix("attachment://"), value) if value.startswith("attachment://") else value
    if isinstance(value, list):
        return [_resolve(one, attached) for one in value]
    if isinstance(value, dict):
        return {name: _resolve(one, attached) for name, one in value.items()}
    return value


def _verdict(scores: Mapping[str, Mapping[str, Any]]) -> Verdict | None:
    """Every score by its scorer's name; the first one is the reward. A sample without scores was never judged."""
    numbers = {name: number for name, one in scores.items() if (number := _number(one.get("value"))) is not None}
    if not numbers:
        return None
    first = next(iter(numbers))
    return Verdict(reward=numbers[first], parts=numbers, log=str(scores[first].get("explanation") or ""))


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return _WORDS.get(value)
    return float(value) if isinstance(value, int | float) else None


def _usage(usage: Mapping[str, Any]) -> Usage:
    return Usage(
        prompt_tokens=usage.get("input_tokens"),
        completion_tokens=usage.get("output_tokens"),
        cached_tokens=usage.get("input_tokens_cache_read"),
        reasoning_tokens=usage.get("reasoning_tokens"),
    )


def _seconds(text: str | None) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0
