"""Values of a compose file as this project reads them: texts, commands, times, sizes, healthchecks, volumes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, cast

from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.sandbox import Volume
from rollyard.core.task import Healthcheck

_REFERENCE = re.compile(r"\$[A-Za-z_{]")
_WHOLE_REFERENCE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-.*)?\}", re.DOTALL)
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([bkmg]?)b?", re.IGNORECASE)
SEE = "docs/tasks.md lists the keys"


def refuse_unknown(said: Mapping[str, Any], known: Mapping[str, str] | tuple[str, ...], where: str) -> None:
    for key in said:
        if key not in known:
            raise Unsupported(f"{where}: {key!r} is not supported", hint=SEE)


def read_text(said: Any, where: str) -> str:
    """A value in which Compose would put variables of the machine; `$$` is one dollar."""
    if not isinstance(said, str | int | float) or isinstance(said, bool):
        raise ConfigError(f"{where}: a text, got {said!r}")
    text = str(said)
    if _REFERENCE.search(text.replace("$$", "")):
        raise Unsupported(
            f"{where}: {text!r} names a variable of the machine; only a value of environment may", hint=SEE
        )
    return text.replace("$$", "$")


def read_value(said: str, where: str) -> str:
    return said if _WHOLE_REFERENCE.fullmatch(said) else read_text(said, where)


def read_words(said: Any, where: str) -> tuple[str, ...] | None:
    if said is None:
        return None
    if isinstance(said, list):
        return tuple(read_text(word, where) for word in cast("list[Any]", said))
    try:
        return tuple(shlex.split(read_text(said, where)))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def read_healthcheck(said: Any, where: str) -> Healthcheck | None:
    if said is None:
        return None
    if not isinstance(said, dict):
        raise ConfigError(f"{where}: not a mapping")
    table = cast("dict[str, Any]", said)
    refuse_unknown(
        table, ("test", "interval", "timeout", "retries", "start_period", "start_interval", "disable"), where
    )
    command = _test(table.get("test"), f"{where}.test")
    if table.get("disable") or command is None:
        return None
    return Healthcheck(
        command=command,
        interval_s=_seconds(table.get("interval", "30s"), f"{where}.interval"),
        timeout_s=_seconds(table.get("timeout", "30s"), f"{where}.timeout"),
        start_period_s=_seconds(table.get("start_period", "0s"), f"{where}.start_period"),
        start_interval_s=_seconds(table.get("start_interval", "5s"), f"{where}.start_interval"),
        retries=int(table.get("retries", 3)),
    )


def _test(said: Any, where: str) -> str | None:
    if isinstance(said, str):
        return read_text(said, where)
    words = [read_text(word, where) for word in cast("list[Any]", said)] if isinstance(said, list) else []
    if words[:1] == ["CMD"] and len(words) > 1:
        return shlex.join(words[1:])
    if words[:1] == ["CMD-SHELL"] and len(words) == 2:
        return words[1]
    if words == ["NONE"]:
        return None
    raise ConfigError(f"{where}: a text, or a list that begins with CMD, CMD-SHELL or NONE; got {said!r}")


def read_volume(said: Any, where: str, known: set[str]) -> Volume:
    parts = read_text(said, where).split(":") if isinstance(said, str) else []
    if len(parts) not in (2, 3) or (len(parts) == 3 and parts[2] not in ("ro", "rw")):
        raise Unsupported(f"{where}: {said!r} is not 'name:/path' or 'name:/path:ro'", hint=SEE)
    if parts[0] not in known:
        what = "a folder of the machine" if parts[0][:1] in "./~" else "no volume that the file names under volumes"
        raise Unsupported(f"{where}: {parts[0]!r} is {what}", hint=SEE)
    return Volume(name=parts[0], path=parts[1], writable=parts[2:] != ["ro"])


def _seconds(said: Any, where: str) -> float:
    match = _DURATION.fullmatch(str(said).replace(" ", ""))
    if match is None or not any(match.groups()):
        raise ConfigError(f"{where}: a time such as '5s', '500ms' or '1m30s', got {said!r}")
    return sum(float(part or 0) * scale for part, scale in zip(match.groups(), (3600, 60, 1, 0.001), strict=True))


def read_megabytes(said: Any, where: str) -> int:
    match = _SIZE.fullmatch(str(said).strip())
    if match is None:
        raise ConfigError(f"{where}: a size such as '512m', got {said!r}")
    return max(1, int(float(match[1]) * {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30}[match[2].lower()]) >> 20)
