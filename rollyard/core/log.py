"""The package's one way to log: the standard library's `logging`, with fields. Unconfigured, a warning is one line on stderr with
its fields; a server's own process turns lines into JSON (`plane/logs.py`)."""

from __future__ import annotations

import json
import logging
from typing import Any


class Log:
    """`log.warning("sandbox.not_deleted", sandbox=id)`, or with the `%s` of the standard library."""

    def __init__(self, name: str, /, **fields: Any) -> None:
        self._name, self._fields = name, fields
        self._logger = logging.getLogger(name)

    def bind(self, **fields: Any) -> Log:
        return Log(self._name, **self._fields | fields)

    def wants(self, level: int) -> bool:
        return self._logger.isEnabledFor(level)

    def debug(self, event: str, /, *args: Any, exc_info: BaseException | None = None, **fields: Any) -> None:
        self._write(logging.DEBUG, event, args, fields, exc_info)

    def info(self, event: str, /, *args: Any, exc_info: BaseException | None = None, **fields: Any) -> None:
        self._write(logging.INFO, event, args, fields, exc_info)

    def warning(self, event: str, /, *args: Any, exc_info: BaseException | None = None, **fields: Any) -> None:
        self._write(logging.WARNING, event, args, fields, exc_info)

    def error(self, event: str, /, *args: Any, exc_info: BaseException | None = None, **fields: Any) -> None:
        self._write(logging.ERROR, event, args, fields, exc_info)

    def exception(self, event: str, /, *args: Any, **fields: Any) -> None:
        """An error's line, with the exception that is being handled."""
        self._write(logging.ERROR, event, args, fields, True)

    def _write(
        self,
        level: int,
        event: str,
        args: tuple[Any, ...],
        fields: dict[str, Any],
        error: BaseException | bool | None = None,
    ) -> None:
        if not self._logger.isEnabledFor(level):
            return
        said = event % args if args else event
        every = self._fields | fields
        line = " ".join([said, *(f"{name}={_show(value)}" for name, value in every.items())])
        extra = {"event": said, "fields": every}
        self._logger.log(level, line, exc_info=error, extra=extra, stacklevel=3)


def _show(value: Any) -> str:
    text = str(value)
    return text if text and not any(letter.isspace() or letter in '"=' for letter in text) else json.dumps(text)
