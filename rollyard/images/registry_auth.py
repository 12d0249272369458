"""Credentials for registries, as `docker login` keeps them, and the questions that registries ask for them.

Read are `$DOCKER_AUTH_CONFIG` (the JSON itself), else `config.json` in `$DOCKER_CONFIG` or `~/.docker`: `auths`, and the helpers
that `credHelpers` and `credsStore` name (`docker-credential-NAME`). What is found is in no error, no log and no argument list.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple, cast

import anyio.to_thread

from rollyard.core.errors import ConfigError
from rollyard.core.home import user_home
from rollyard.images.reference import DOCKER_HUB

_HELPER_S = 30.0
_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "docker.io", "registry-1.docker.io")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_PAIR = re.compile(r'([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')


class RegistryCredentials:
    """A user and a password, or an identity token to get tokens with. It prints as nothing of them."""

    __slots__ = ("identity_token", "password", "user")

    def __init__(self, user: str, password: str, identity_token: str | None = None) -> None:
        self.user, self.password, self.identity_token = user, password, identity_token

    def __repr__(self) -> str:
        return "RegistryCredentials(...)"

    @property
    def basic(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


class Challenge(NamedTuple):
    """What a registry that answers 401 asks for: `bearer`, a token of the server `realm`; or `basic`."""

    scheme: str
    parameters: dict[str, str]


def parse_challenge(header: str) -> Challenge | None:
    """The first one of a kind that is known."""
    for part in re.split(r",\s*(?=[A-Za-z]+\s+[A-Za-z_]+=)", header):
        scheme, _, rest = part.strip().partition(" ")
        if scheme.lower() in ("bearer", "basic"):
            found = {
                name.lower(): re.sub(r"\\(.)", r"\1", quoted) if quoted else plain
                for name, quoted, plain in _PAIR.findall(rest)
            }
            return Challenge(scheme.lower(), found)
    return None


async def find_credentials(account: str) -> RegistryCredentials | None:
    """The user's account at a registry (HOST[:PORT]); None where there is none."""
    config, where = await anyio.to_thread.run_sync(_read_config)
    keys = _HUB_KEYS if account == DOCKER_HUB else (account, f"https://{account}", f"http://{account}")
    helpers = _table(config, "credHelpers")
    for key in keys:
        if helper := helpers.get(key):
            return await anyio.to_thread.run_sync(_ask_helper, str(helper), key, where)
    if store := config.get("credsStore"):
        return await anyio.to_thread.run_sync(_ask_helper, str(store), keys[0], where)
    auths = _table(config, "auths")
    stored = {name.removesuffix("/"): value for name, value in auths.items()}
    for key in keys:
        entry = stored.get(key.removesuffix("/"))
        if isinstance(entry, dict) and entry:
            return _read_entry(cast("dict[str, Any]", entry), key, where)
    return None


def _read_config() -> tuple[dict[str, Any], str]:
    if text := os.environ.get("DOCKER_AUTH_CONFIG"):
        where = "DOCKER_AUTH_CONFIG"
    else:
        path = Path(os.environ.get("DOCKER_CONFIG") or user_home() / ".docker") / "config.json"
        where = str(path)
        try:
            text = path.read_text()
        except FileNotFoundError:
            return {}, where
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the registry credentials in {where} cannot be read: {type(error).__name__}") from None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} holds no JSON object, as `docker login` writes it") from None
    return cast("dict[str, Any]", found), where


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name) or {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _read_entry(entry: dict[str, Any], key: str, where: str) -> RegistryCredentials | None:
    user, password = str(entry.get("username") or ""), str(entry.get("password") or "")
    if packed := entry.get("auth"):
        try:
            user, colon, password = base64.b64decode(str(packed), validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            colon = ""
        if not colon:
            raise ConfigError(
                f"{where}: auths.{key}.auth is not USER:PASSWORD in base64", hint="log in again"
            ) from None
        password = password.rstrip("\0")
    token = str(entry.get("identitytoken") or "") or None
    return RegistryCredentials(user, password, token) if user or token else None


def _ask_helper(helper: str, key: str, where: str) -> RegistryCredentials | None:
    """`docker-credential-NAME get`: the registry on its input, JSON on its output. The user `<token>` stands for an identity
    token."""
    program = f"docker-credential-{helper}"
    if not _NAME.fullmatch(helper):
        raise ConfigError(f"{where} names a credential helper that is no name")
    try:
        done = subprocess.run([program, "get"], input=key.encode(), capture_output=True, timeout=_HELPER_S, check=False)
    except FileNotFoundError:
        raise ConfigError(f"{where} leaves {key} to {program}, which is not installed", hint="install it") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program}, which {where} names, gave no answer: {type(error).__name__}") from None
    if done.returncode != 0:
        if b"credentials not found" in done.stdout + done.stderr:
            return None
        raise ConfigError(f"{program} has no credentials for {key}: it exited with {done.returncode}")
    try:
        found = json.loads(done.stdout)
        user, secret = str(found["Username"]), str(found["Secret"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{program} printed something else than credentials for {key}") from None
    return RegistryCredentials("", "", secret) if user == "<token>" else RegistryCredentials(user, secret)
