"""Stacks of directories: from references to paths, merged where a stack is too deep to mount, swept when nothing names them.

The kernel takes at most 4096 bytes of mount options, and a stack that is one step too deep fails only then, far from its
cause. So depth is bounded here, when a stack is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

from rollyard.core.errors import ConfigError
from rollyard.core.home import private_dir
from rollyard.images.layers import Layers
from rollyard.images.snapshots import merge
from rollyard.images.trees import publish, remove_tree

MAX_LOWERS = 48
MAX_OPTION_BYTES = 3400  # upper and work directory need the rest of the 4096


class Stacks:
    """The trees of one store root; `used/<name>` is touched when one is opened."""

    def __init__(self, root: Path, layers: Layers) -> None:
        self.root = root
        self.layers = layers

    def path(self, ref: str) -> Path:
        kind, _, name = ref.partition(":")
        if kind == "layer":
            return self.layers.tree(name)
        path = Path(name) if kind == "dir" else self.root / "trees" / name
        if not path.is_dir():
            raise ConfigError(f"a part of this image is gone: {name}", hint="add the image again")
        if kind == "tree":
            self._touch(name)
        return path

    def has(self, digest: str) -> bool:
        """Whether the layer of this digest is unpacked here."""
        return (self.root / "trees" / digest[:24]).is_dir()

    def shallow(self, stack: tuple[str, ...], *, bottom: bool) -> tuple[str, ...]:
        """The stack itself; or, when it is too deep, one whose own part is merged into a single tree. `bottom` says that
        nothing lies below the stack."""
        total = sum(len(str(self.path(ref))) + 1 for ref in stack if ref != "host")
        if len(stack) <= MAX_LOWERS and total <= MAX_OPTION_BYTES:
            return stack
        ours = [ref for ref in stack if ref.startswith(("tree:", "layer:"))]
        rest = stack[len(ours) :]
        bottom = bottom and not rest
        name = "m" + hashlib.sha256(" ".join([*ours, str(bottom)]).encode()).hexdigest()[:23]
        if not (self.root / "trees" / name).is_dir():
            with self.making(lambda: name) as scratch:
                merge([self.path(ref) for ref in ours], scratch, bottom=bottom)
        return (f"tree:{name}", *rest)

    @contextlib.contextmanager
    def making(self, name: Callable[[], str]) -> Generator[Path]:
        """An empty directory to fill; at the end it becomes the tree `name()`, or goes when filling it failed."""
        parent = private_dir(self.root / "trees")
        scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
        scratch.chmod(0o755)
        try:
            yield scratch
            final = name()
            publish(scratch, parent / final)
            self._touch(final)
        finally:
            remove_tree(scratch)

    def remove(self, names: Iterable[str]) -> None:
        """Remove these trees, which no image names and no sandbox uses."""
        for name in names:
            with contextlib.suppress(OSError):  # it stays unnamed, and the next sweep tries again
                remove_tree(self.root / "trees" / name)
                (self.root / "used" / name).unlink(missing_ok=True)

    def sweep(self, named: set[str], unused_s: float) -> list[str]:
        """Remove trees that are not `named` and were not opened for `unused_s`, and what builds left that died. Removed
        layers (`.old-`) lie that long too: a sandbox may be using them."""
        before = time.time() - unused_s
        removed: list[str] = []
        left_over = (
            path
            for kind in ("trees", "layers", "toolchains", "host")
            for path in (self.root / kind).glob(".*-*")
            if path.name.startswith((".new-", ".old-"))
        )
        for part in (self.root / "downloads").glob("*"):  # of layers whose fetch was not continued
            if part.stat().st_mtime < before:
                part.unlink(missing_ok=True)
                removed.append(part.name)
        for tree in [*(self.root / "trees").glob("[!.]*"), *left_over]:
            used = self.root / "used" / tree.name
            last = used.stat().st_mtime if used.exists() else tree.stat().st_ctime
            if tree.name not in named and last < before:
                try:
                    remove_tree(tree)
                except OSError:
                    continue  # stepped over: it stays unnamed, and the next sweep tries again
                used.unlink(missing_ok=True)
                removed.append(tree.name)
        return sorted(removed)

    def _touch(self, name: str) -> None:
        (private_dir(self.root / "used") / name).touch()
