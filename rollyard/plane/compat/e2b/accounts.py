"""Whose programs and files a client means: the user `user` with `/home/user`, as in every sandbox of the vendor's.

A sandbox that has no such user is given one, once for each server that meets it. Where a backend runs programs as one user only,
every name means that user, and only the home directory is made. A path that is not absolute begins at the user's home.
"""

from __future__ import annotations

import asyncio
import posixpath

from rollyard.core.errors import Error
from rollyard.core.protocols import Sandbox
from rollyard.plane.compat.e2b.errors import E2bRefusal

DEFAULT_USER = "user"
_HOME = "/home/user"
_STEP_S = 30.0
_ADD = """home=/home/user; mkdir -p "$home" || exit 1
[ "$1" = many ] || exit 0
n=1000; while grep -q "^[^:]*:[^:]*:$n:" /etc/passwd /etc/group; do n=$((n+1)); done
grep -q '^user:' /etc/passwd || { echo "user:x:$n:$n::/home/user:/bin/bash" >>/etc/passwd || exit 1; }
grep -q '^user:' /etc/group || echo "user:x:$n:" >>/etc/group
[ "$(stat -c %U "$home")" = user ] || chown user:user "$home"
"""
_LOOK = """IFS=:
while read -r name _ _ _ _ home _; do if [ "$name" = "$1" ]; then printf %s "$home"; exit 0; fi; done </etc/passwd; exit 3"""


class Accounts:
    """The users of one sandbox. `user` and `workdir` are its template's own, where it has them."""

    def __init__(self, sandbox: Sandbox, *, user: str | None = None, workdir: str | None = None) -> None:
        self._sandbox, self._user, self._workdir = sandbox, user, workdir
        self._many = sandbox.capabilities.users
        self._homes: dict[str, str] = {}
        self._added, self._adding = False, asyncio.Lock()

    async def prepare(self) -> None:
        """Once; a sandbox where it cannot be done is used as it is."""
        async with self._adding:
            if self._added:
                return
            words = ["/bin/sh", "-c", _ADD, "rollyard", "many" if self._many else "one"]
            done = await self._sandbox.exec(words, cwd="/", user="root" if self._many else None, timeout=_STEP_S)
            self._many = self._many and done.ok
            self._added = True

    def as_user(self, name: str | None) -> str | None:
        """The user to give to a backend: None is the sandbox's own."""
        wanted = name or self._user or DEFAULT_USER
        if wanted == "root" or not self._many:
            if wanted not in ("root", DEFAULT_USER):
                raise E2bRefusal("unauthenticated", f"invalid username: '{wanted}'")
            return "root" if self._many else None
        return wanted

    async def home(self, name: str | None) -> str:
        wanted = name or self._user or DEFAULT_USER
        if wanted == DEFAULT_USER or not self._many:
            return _HOME
        if wanted not in self._homes:
            words = ["/bin/sh", "-c", _LOOK, "rollyard", wanted]
            try:
                done = await self._sandbox.exec(words, cwd="/", timeout=_STEP_S)
            except Error as error:
                raise E2bRefusal("internal", f"the users of the sandbox cannot be read: {error.message}") from error
            if done.exit_code == 3:
                raise E2bRefusal("unauthenticated", f"invalid username: '{wanted}'")
            self._homes[wanted] = done.stdout.decode().strip() or "/"
        return self._homes[wanted]

    async def workdir(self, name: str | None) -> str:
        """Where a program starts by default: the template's directory, else the user's home."""
        return self._workdir or await self.home(name)

    async def path(self, text: str, name: str | None) -> str:
        if not text:
            raise E2bRefusal("invalid_argument", "path is required")
        if text == "~" or text.startswith("~/"):
            text = text[2:]
        return posixpath.normpath(posixpath.join(await self.home(name), text))
