"""What a server writes about itself: one JSON object a line on stderr. stdout has the ready line and nothing else.

What looks like a key, a token or a signed URL is taken out of every value.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

_SECRET = re.compile(
    r"(ryk|ryi|sign|page)-[A-Za-z0-9_.-]{16,}"
    r"|e2b_[0-9a-f]{32,}"
    r"|(?<=/at/)[^/\s\"']+"
    r"|(?<=/bundles/)[^/\s\"']+"
    r"|(?<=Bearer )[^\s\"']+"
)


def redact(value: Any) -> Any:
    if isinstance(value, str):
        return _SECRET.sub("***", value)
    if isinstance(value, dict):
        return {name: redact(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(one) for one in value]
    return value


class JsonLogFormatter(logging.Formatter):
    """Lines of our own with their fields, and everybody else's as they are."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            **getattr(record, "fields", {}),
            "event": getattr(record, "event", None) or record.getMessage(),
            "level": record.levelname.lower(),
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z"),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(redact(said), default=lambda value: redact(str(value)))


def configure(level: str = "info") -> None:
    """For a server's own process: nothing in the package calls this for a user's."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(JsonLogFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[lines], force=True)
    logging.getLogger("rollyard").setLevel(level.upper())
