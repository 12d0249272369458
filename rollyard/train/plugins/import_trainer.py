"""The trainer's own package, which its plug-in alone imports."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rollyard.core.errors import ConfigError


def import_trainer(module: str) -> Any:
    """A module of the trainer's; where it is not installed, or wants something that is not, the error says which."""
    try:
        return import_module(module)
    except ImportError as missing:
        package = module.partition(".")[0]
        raise ConfigError(
            f"this plug-in runs inside {package}, and {module} cannot be imported: {missing}"
        ) from missing
