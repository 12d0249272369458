"""Which members of a request an agent may send. A call that stays in its dialect goes to the model server as the agent wrote
it, so whatever is not read here is passed on: a template of the agent's own, a bias on tokens, a conversation, container or
file that the provider keeps for the key's owner. Members are therefore passed on by name. What is not named is refused
aloud, not dropped; a member that asks for nothing (`null`, `store: false`) is no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from rollyard.core.call import Dialect
from rollyard.core.errors import RefusedMember
from rollyard.wire.body import ABSENT, check_size, is_given, malformed, parse_object, read, split_object

T = TypeVar("T", bound=msgspec.Struct)

_EVIDENCE = ("return_token_ids", "return_prompt_token_ids", "return_tokens_as_token_ids")
_ACCOUNTING = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
# Beyond the members that a codec reads. They say how a call is billed, cached and shown, or how much to think.
PASSED: Mapping[Dialect, tuple[str, ...]] = {
    "chat": (
        *_ACCOUNTING,
        *_EVIDENCE,
        *("function_call", "verbosity", "modalities", "usage", "tool_stream", "vl_high_resolution_images"),
        *("reasoning", "thinking", "enable_thinking", "thinking_budget", "include_reasoning"),
    ),
    "completions": (*_ACCOUNTING, *_EVIDENCE),
    "responses": (*_ACCOUNTING, "client_metadata", "truncation", "stream_options", "max_tool_calls"),
    "messages": (
        *("metadata", "service_tier", "betas", "anthropic_beta", "anthropic_version"),
        *("cache_control", "context_management", "speed", "inference_geo", "diagnostics"),
    ),
    "gemini": ("safetySettings", "safety_settings", "labels", "model", "serviceTier", "sessionId", "session_id"),
}
# Members that would reach what the provider keeps, or change what is sampled, and the values with which they ask for nothing.
_NOTHING: Mapping[str, tuple[bytes, ...]] = {
    "store": (b"false",),
    "background": (b"false",),
    "logit_bias": (b"{}",),
}
_TEMPLATE = "chat_template_kwargs"
_TEMPLATE_SWITCHES = {"enable_thinking", "thinking", "preserve_thinking"}
_STORED_KINDS = {"item_reference", "container_upload", "fileData", "file_data"}


_CHECKED = (*_NOTHING, _TEMPLATE)
_checked = attrgetter(*(f"checked_{name}" for name in _CHECKED))


class BodyReader(Generic[T]):
    """Reads the top level of a dialect's requests as `kind`. One parse for what agents really send; a second one only to
    say what is wrong."""

    def __init__(self, kind: type[T], dialect: Dialect) -> None:
        self._dialect = dialect
        passed = [(f"passed_{n}", msgspec.Raw, _optional_raw(name)) for n, name in enumerate(PASSED[dialect])]
        checked = [(f"checked_{name}", msgspec.Raw, _optional_raw(name)) for name in _CHECKED]
        strict: Any = msgspec.defstruct("StrictBody", [*passed, *checked], bases=(kind,), forbid_unknown_fields=True)
        self._known = frozenset(field.encode_name for field in msgspec.structs.fields(strict))
        self._strict: msgspec.json.Decoder[T] = msgspec.json.Decoder(strict)
        self._loose = msgspec.json.Decoder(kind)

    def read(self, body: bytes) -> T:
        check_size(body)
        try:
            found = self._strict.decode(body)
        except malformed:
            return self._read_loosely(body)
        *emptied, template = _checked(found)
        for (name, empty), raw in zip(_NOTHING.items(), emptied, strict=True):
            if is_given(raw) and bytes(raw) not in empty:
                raise self._refusal([name])
        if is_given(template) and not (parse_object(bytes(template)) or {_TEMPLATE: 1}).keys() <= _TEMPLATE_SWITCHES:
            raise self._refusal([_TEMPLATE])
        return found

    def _read_loosely(self, body: bytes) -> T:
        found = read(self._loose, body)
        unknown = [name for name, raw in split_object(body).items() if name not in self._known and is_given(raw)]
        if unknown:
            raise self._refusal(unknown)
        return found

    def _refusal(self, names: list[str]) -> RefusedMember:
        shown = ", ".join(repr(name[:60]) for name in names[:5])
        return RefusedMember(
            f"{shown} of a {self._dialect} request: not passed on to the model server, because it could change what is "
            "sampled or reach what the provider stores; leave it out, or have the operator set it"
        )


def _optional_raw(name: str) -> Any:
    return msgspec.field(name=name, default=ABSENT)


def refuse_stored(kind: str, block: Mapping[str, Any]) -> None:
    """A content part that names something the provider keeps (a file, an earlier item, a container) instead of holding it."""
    source = block.get("source") or block.get("file")
    inner = source if isinstance(source, dict) else {}
    if kind in _STORED_KINDS or block.get("file_id") or inner.get("file_id"):
        raise RefusedMember(
            f"a part of type {kind[:60]!r} names what the provider stores; send the content itself (base64)"
        )
