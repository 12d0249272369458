"""The package mirrors that this machine's pip and npm are set up for, as variables for the commands of a build.

A build that may reach the mirror's host gets its address, so that `RUN pip install` goes where the user's own would. A URL with a
password in it stays here.
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from rollyard.core.protocols import Sandbox

Allows = Callable[[str, int], bool]  # whether a build may reach this host and port
_PIP = {"index-url": "PIP_INDEX_URL", "extra-index-url": "PIP_EXTRA_INDEX_URL", "cert": "PIP_CERT"}
_NPM = {"registry": "npm_config_registry", "cafile": "npm_config_cafile"}
# Of certificates, for images that have one at the same place
FILES = ("PIP_CERT", "npm_config_cafile", "NODE_EXTRA_CA_CERTS")


async def find_usable(mirrors: Mapping[str, str], sandbox: Sandbox) -> dict[str, str]:
    """Without the variables that name a file which this image does not have."""
    return {name: value for name, value in mirrors.items() if not value.startswith("/") or await sandbox.exists(value)}


def find_mirrors(allows: Allows, environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> dict[str, str]:
    """Variables for pip and npm, where their mirrors are allowed. `root` is where this machine's files are."""
    home = Path(environ.get("HOME") or "/root")
    found = {**_read_pip(root, home, environ), **_read_npm(root, home, environ)}
    files = {name: found.pop(name) for name in FILES if name in found}
    usable = {name: " ".join(url for url in value.split() if _may_tell(url, allows)) for name, value in found.items()}
    return {name: value for name, value in (usable | files).items() if value}


def _read_pip(root: Path, home: Path, environ: Mapping[str, str]) -> dict[str, str]:
    places = [root / "etc/pip.conf", home / ".pip/pip.conf", home / ".config/pip/pip.conf"]
    if own := environ.get("PIP_CONFIG_FILE"):
        places.append(Path(own))
    found: dict[str, str] = {}
    for path in places:
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue  # pip says itself what is wrong with it
        for option, variable in _PIP.items():
            if value := parser.get("global", option, fallback=""):
                found[variable] = value
    return found | {name: environ[name] for name in _PIP.values() if environ.get(name)}


def _read_npm(root: Path, home: Path, environ: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in _lines(root / "etc/npmrc", home / ".npmrc"):
        if match := re.fullmatch(r"\s*(registry|cafile)\s*=\s*[\"']?(\S+?)[\"']?\s*", line):
            found[_NPM[match[1]]] = match[2]
    for name, value in environ.items():
        if value and (name == "NODE_EXTRA_CA_CERTS" or name.lower() in _NPM.values()):
            found[name if name in FILES else name.lower()] = value
    return found


def _lines(*paths: Path) -> Iterator[str]:
    for path in paths:
        try:
            yield from path.read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            continue


def _may_tell(url: str, allows: Allows) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return False
    return port is not None and parts.username is None and allows(parts.hostname or "", port)
