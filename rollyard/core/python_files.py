"""A user's Python, by path: task files and verifier files that are not on the import path."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from rollyard.core.errors import ConfigError


def import_file(path: Path) -> ModuleType:
    """A module by path, once per process: the same file gives the same module, so its functions keep their identity."""
    path = path.resolve()
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) and Path(str(module.__file__)).resolve() == path:
            return module
    name = f"rollyard_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code: any error becomes one that names the file
        del sys.modules[name]
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error
    return module
