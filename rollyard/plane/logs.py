"""What a server writes about itself: one JSON object a line on stderr. stdout has the ready line and nothing else.

What looks like a key, a token or a signed URL is taken out of every value, whoever put it there.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

_SECRET = re.compile(
    r"(ryk|ryi|sign|face|page)-[A-Za-z0-9_.-]{16,}"
    r"|e2b_[0-9a-f]{32,}"
    r"|(?<=/at/)[^/\s\"']+"
    r"|(?<=/bundles/)[^/\s\"']+"
    r"|(?<=Bearer )[^\s\"']+"
)


def redacted(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {name: _clean(value) for name, value in event.items()}


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _SECRET.sub("***", value)
    if isinstance(value, dict):
        return {name: _clean(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(one) for one in value]
    return value


def configure(level: str = "info") -> None:
    """For a server's own process: nothing in the package calls this for a user's."""
    steps: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        redacted,
        structlog.processors.JSONRenderer(default=str),
    ]
    structlog.configure(
        processors=steps,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=steps[:3], processors=_for_foreign(steps)))
    logging.basicConfig(level=logging.WARNING, handlers=[lines], force=True)


def _for_foreign(steps: list[Any]) -> list[Any]:
    return [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *steps[3:]]
