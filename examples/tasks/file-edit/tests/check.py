"""The two settings have their new values, and every other line is what it was."""

import configparser
import re
import sys
from pathlib import Path

BEFORE = Path("/tests/server.ini").read_text().splitlines()
after = Path("/app/server.ini").read_text()
settings = configparser.ConfigParser(inline_comment_prefixes=("#", ";"))
settings.read_string(after)
right = settings.getint("network", "port") == 8443 and settings.getboolean("security", "tls")


def others(lines):
    return [line.rstrip() for line in lines if not re.match(r"\s*(port|tls)\s*=", line)]


same = others(BEFORE) == others(after.splitlines())
print(f"values right: {right}, other lines unchanged: {same}")
sys.exit(not (right and same))
