"""The names that verifier code counts on: scores, text and number comparison, database classes, `import fleet` and its parts."""

from __future__ import annotations

import json
import re
import string
import sys
import typing
from types import ModuleType
from typing import Any

from .query import QueryBuilder
from .snapshots import DatabaseSnapshot, IgnoreConfig, SnapshotDiff

TASK_SUCCESSFUL_SCORE = 1
TASK_FAILED_SCORE = 0
CHOSEN = "_rollyard_verifier"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def _normalize(value: Any) -> str:
    text = json.dumps(value, sort_keys=True) if isinstance(value, (dict, list)) else str(value)
    return "".join(text.lower().translate(_NO_PUNCTUATION).split())


def normalized_contains(target: Any, blob: Any) -> bool:
    """Whether `blob` holds `target`, case, white space and punctuation aside."""
    return _normalize(target) in _normalize(blob)


def normalized_string_comparison(target: Any, blob: Any) -> bool:
    return _normalize(target) == _normalize(blob)


def extract_numbers(text: Any) -> list[float]:
    return [float(found) for found in _NUMBER.findall(str(text).replace(",", ""))]


def contains_number(text: Any, target_number: Any) -> bool:
    try:
        wanted = float(str(target_number).replace(",", ""))
    except ValueError:
        return False
    return wanted in extract_numbers(text)


def verifier(*args: Any, **_: Any) -> Any:
    """`@verifier` and `@verifier(key=...)`: marks the function that is the verifier, and leaves it as it is."""
    if len(args) == 1 and callable(args[0]):
        setattr(args[0], CHOSEN, True)
        return args[0]
    return verifier


def namespace(environment: type) -> dict[str, Any]:
    """What verifier code finds defined, whether or not it imports it."""
    made: dict[str, Any] = {
        name: getattr(typing, name) for name in ("Any", "Dict", "List", "Optional", "Tuple", "Union")
    }
    made.update(
        json=json,
        re=re,
        string=string,
        TASK_SUCCESSFUL_SCORE=TASK_SUCCESSFUL_SCORE,
        TASK_FAILED_SCORE=TASK_FAILED_SCORE,
        normalized_contains=normalized_contains,
        normalized_string_comparison=normalized_string_comparison,
        extract_numbers=extract_numbers,
        contains_number=contains_number,
        verifier=verifier,
        DatabaseSnapshot=DatabaseSnapshot,
        IgnoreConfig=IgnoreConfig,
        SnapshotDiff=SnapshotDiff,
        QueryBuilder=QueryBuilder,
        Environment=environment,
        SyncEnv=environment,
        AsyncEnv=environment,
    )
    return made


def install(names: dict[str, Any]) -> None:
    """`fleet` and the modules of it that verifiers import from, all with the same names."""
    for module in (
        "fleet",
        "fleet.verifiers",
        "fleet.verifiers.db",
        "fleet.verifiers.code",
        "fleet.verifiers.decorator",
    ):
        made = ModuleType(module)
        made.__path__ = []
        made.__dict__.update(names, verifier_sync=verifier)
        sys.modules[module] = made
        parent, _, name = module.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, made)
