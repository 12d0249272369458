"""Policies by name, as the command line writes them: `upstream:URL`, `scripted:FILE`, `tokens:URL`, `replay:ID`, `queue`.

Names come from the entry points of group `rollyard.policies`: a factory that takes what stands after the colon. Its options
may follow a `#`, which no server ever sees: `tokens:http://localhost:8000#renderer=models/qwen&max_tokens_cap=2048`. An option
that the factory does not take is refused by name before anything is made; so is a key, since the text is kept with the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin
from urllib.parse import parse_qsl, urlencode

import msgspec

from rollyard.core import registry
from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError
from rollyard.core.protocols import HasText, Policy

GROUP = "rollyard.policies"


_SCALARS = (str, int, float, bool)


class PolicyText(msgspec.Struct, frozen=True, kw_only=True):
    """`name:argument#option=value&option=value`, read and checked: the policy exists and takes these options."""

    name: str
    argument: str | None
    options: Mapping[str, Any]
    factory: Callable[..., Any]

    @classmethod
    def read(cls, text: str) -> Self:
        named, _, written = text.partition("#")
        name, colon, argument = named.partition(":")
        if not name:
            raise ConfigError(f"not a policy: {text!r}", hint=f"known: {', '.join(registry.names(GROUP))}")
        factory, options = registry.load(GROUP, name), read_options(written)
        found = cls(name=name, argument=argument if colon else None, options=options, factory=factory)
        if "key" in options:
            raise ConfigError(
                f"a key does not belong into the text of the policy {name!r}, which is kept with the run",
                hint="put it into a variable and name that: key_env=NAME",
            )
        found.refuse_unknown(options)
        return msgspec.structs.replace(
            found, options={key: found.convert(key, value) for key, value in options.items()}
        )

    @property
    def takes(self) -> Mapping[str, inspect.Parameter]:
        """Its options by name."""
        parameters = list(inspect.signature(self.factory, eval_str=True).parameters.values())
        if self.argument is not None:
            parameters = parameters[1:]
        return {one.name: one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}

    def refuse_unknown(self, options: Iterable[str]) -> None:
        for option in options:
            if option not in self.takes:
                listing = ", ".join(name for name in self.takes if self.types_of(name) and name != "key") or "none"
                raise ConfigError(f"the policy {self.name!r} takes no option {option!r}; it takes: {listing}")

    def types_of(self, option: str) -> list[Any]:
        """Those whose values can be written as text."""
        return [one for one in members(self.takes[option].annotation) if is_plain(one)]

    def refuse_missing(self, options: Container[str]) -> None:
        for option, parameter in self.takes.items():
            if parameter.default is parameter.empty and option not in options:
                spelling = f"{self.name}:{option.upper()}" if self.argument is None else f"#{option}=..."
                raise ConfigError(f"the policy {self.name!r} needs its {option}", hint=f"write {spelling}")

    def convert(self, option: str, written: str) -> Any:
        """As the factory wants it: text stays text where that is all it takes; a number, a truth or JSON is read."""
        if not (wanted := self.types_of(option)):
            raise ConfigError(f"the option {option!r} of the policy {self.name!r} cannot be written as text")
        value = written if wanted == [str] else read_json(written)
        try:
            return msgspec.convert(value, Union[tuple(wanted)])  # noqa: UP007  # of types that are known when it runs
        except msgspec.ValidationError as error:
            why = str(error)[:1].lower() + str(error)[1:]
            raise ConfigError(
                f"the option {option!r} of the policy {self.name!r} cannot be {written!r}: {why}"
            ) from error


def parse(text: str, **settings: Any) -> Policy:
    """`settings` go to the factory (`model=`, `key_env=` ...) and win over those in the text; None counts as not given."""
    found = PolicyText.read(text)
    given = {**found.options, **{key: value for key, value in settings.items() if value is not None}}
    found.refuse_unknown(given)
    found.refuse_missing(given)
    made: Policy = found.factory(*(() if found.argument is None else (found.argument,)), **given)
    if isinstance(made, HasText):
        made.text = write_text(found, given)
    return made


def write_text(found: PolicyText, given: Mapping[str, Any]) -> str | None:
    """The text that makes this policy again. None where an option cannot stand in one: a key, an object."""
    if "key" in given or not all(found.types_of(option) for option in given):
        return None
    named = found.name if found.argument is None else f"{found.name}:{found.argument}"
    written = {k: v if isinstance(v, str) else msgspec.json.encode(v).decode() for k, v in given.items()}
    return f"{named}#{urlencode(written)}" if written else named


def read_options(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text)))
    except ValueError as error:
        raise ConfigError(f"not options of a policy: {text!r}", hint="write them as key=value&key=value") from error


def members(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, without None."""
    found = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(one for one in found if one is not NoneType)


def is_plain(kind: Any) -> bool:
    """A type whose values can be written as text or JSON."""
    origin = get_origin(kind) or kind
    return origin in (*_SCALARS, Literal, Mapping, dict, list) or (
        isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    )


def read_json(text: str) -> Any:
    """Numbers, booleans and JSON as themselves, everything else as text."""
    try:
        return msgspec.json.decode(text)
    except BAD_JSON:
        return text
