"""Public names of a package that are imported on first use. They are written once, as the imports of the package's
`if TYPE_CHECKING:` block: type checkers read them there, and so does this module when the first of them is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of this package."""

    @cache
    def homes() -> dict[str, str]:
        return _type_checking_imports(package)

    def get(name: str) -> Any:
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes()[name]
        value = import_module(f"{package}.{name}") if home == package else getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(homes())


def _type_checking_imports(package: str) -> dict[str, str]:
    import ast

    spec = sys.modules[package].__spec__
    source: str = spec.loader.get_source(package)  # type: ignore[union-attr]
    return {
        alias.name: node.module
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
