"""The paths of a sandbox that has no mount namespace: where on the host each of them is, and how the sandbox calls it.

`/app` of a program is `ROOT/app` on the host; system trees are shown where they are (`tracer`). This is a view and no wall: what
keeps programs from other files is Landlock.
"""

from __future__ import annotations

import os
import posixpath
from typing import Any

_REMEMBERED = 8192


class PathView:
    """`root` is the host's directory for `/`; `shown` are places of the sandbox that are elsewhere on the host; `closed` says
    that programs connect to loopback alone."""

    def __init__(self, root: str, shown: dict[str, str], *, closed: bool = True) -> None:
        self.closed = closed
        self._root = os.fsencode(root)
        pairs = {os.fsencode(inside): os.fsencode(outside) for inside, outside in shown.items()}
        own = {outside: outside for outside in (*pairs.values(), self._root)}  # a path of the host's means itself
        self._places = sorted({**own, **pairs}.items(), key=lambda pair: -len(pair[0]))
        names = [(outside, inside) for inside, outside in pairs.items() if inside != outside]
        self._names = sorted([*names, (self._root, b"")], key=lambda pair: -len(pair[0]))
        self._known: dict[bytes, bytes] = {}

    def outside(self, path: bytes) -> bytes:
        """Where on the host an absolute path of the sandbox is."""
        found = self._known.get(path)
        if found is None:
            if len(self._known) > _REMEMBERED:
                self._known.clear()
            found = self._known[path] = self._find(path)
        return found

    def _find(self, path: bytes) -> bytes:
        if not path.startswith(b"/"):
            return path
        plain = path
        if b"//" in path or b"/." in path:
            plain = posixpath.normpath(path).replace(b"//", b"/")
            plain += b"/" if path.endswith((b"/", b"/.", b"/..")) and plain != b"/" else b""
        for inside, outside in self._places:
            if plain == inside or plain.startswith(inside + b"/"):
                return outside + plain[len(inside) :]
        return self._root + plain

    def inside(self, path: bytes) -> bytes:
        """What the sandbox calls a path of the host's."""
        for outside, inside in self._names:
            if path == outside or path.startswith(outside + b"/"):
                return inside + path[len(outside) :] or b"/"
        return path


def make(plan: dict[str, Any] | None) -> PathView | None:
    return None if plan is None else PathView(plan["root"], plan["shown"], closed=plan["closed"])
