"""Adapters: each makes task folders out of one public form of tasks. One file is one adapter, found by name through the registry
(`rollyard.datasets`).

An adapter is a value: `recognise` says whether files are of its form, `read` gives one `TaskDraft` for each task in them. A draft
writes its folder when it is asked to, so that listing a dataset costs no more than reading its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core import registry
from rollyard.core.errors import ConfigError, UnknownName

GROUP = "rollyard.datasets"


class TaskDraft(msgspec.Struct, frozen=True):
    """A task that is not written yet: `write` fills an empty folder, or raises a ConfigError that says why it cannot."""

    id: str
    write: Callable[[Path], None]


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """`get` tells people where such files come from; `needs` what their image must have; `options` are the names that `read`
    understands."""

    about: str
    get: str
    recognise: Callable[[Path], bool]
    read: Callable[[Path, Mapping[str, Any]], Iterator[TaskDraft]]
    needs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    carries: tuple[str, ...] = ()  # files of `rollyard.inside` that it copies into each task


def load_adapter(name: str) -> Adapter:
    found: Any = registry.load(GROUP, name)
    if not isinstance(found, Adapter):
        raise ConfigError(f"dataset adapter {name!r} is a {type(found).__name__}, not an Adapter")
    return found


def guess_adapter(source: Path) -> str:
    """The one adapter that knows these files."""
    from rollyard.tasks.adapters.drafts import first_row, is_rows  # it imports this module

    known = registry.names(GROUP)
    found = [name for name in known if load_adapter(name).recognise(source)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{source}: could be {' or '.join(found)}", hint="say which with --adapter")
    if not is_rows(source):
        hint = f"say which with --adapter: {', '.join(known)}; `rollyard datasets list` says what each reads"
        raise ConfigError(f"{source}: no adapter knows this form", hint=hint)
    if not (row := first_row(source)):
        raise ConfigError(f"{source}: has no rows")
    hint = "for prompts with an answer: --adapter prompts --option prompt=FIELD --option answer=FIELD"
    raise ConfigError(f"{source}: no adapter knows rows with the fields {', '.join(row)}", hint=hint)


def check_options(name: str, adapter: Adapter, options: Mapping[str, Any]) -> None:
    for option in options:
        if option not in adapter.options:
            raise UnknownName(f"option of adapter {name!r}", option, list(adapter.options))
