#!/bin/sh
cat > /app/durations.py <<'END'
import re

_FORM = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def seconds(text):
    match = _FORM.fullmatch(text)
    if not text or match is None:
        raise ValueError(text)
    return sum(int(n or 0) * unit for n, unit in zip(match.groups(), (86400, 3600, 60, 1)))
END
