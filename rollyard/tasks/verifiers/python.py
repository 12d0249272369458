"""A Python function as a verifier: `async def check(sandbox, rollout) -> Verdict`.

The function may also be plain, and may give a number, a boolean, a mapping of named numbers, or None (no reward). A task names
it by reference (`package.module:name` or `file.py:name`), so that tasks stay data. An exception inside it is a verifier that
failed to run: reward None, never 0.
"""

from __future__ import annotations

import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast, overload

import msgspec

from rollyard.core import registry
from rollyard.core.errors import ConfigError, EnvError, SandboxError
from rollyard.core.protocols import Policy, Sandbox
from rollyard.core.python_files import import_file
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Grade, VerifierSpec
from rollyard.tasks.verifiers.options import read_options
from rollyard.tasks.verifiers.rewards import from_parts

Check = Callable[[Sandbox, Rollout], Any]
Checks = Check | Mapping[str, Check | tuple[float, Check]]  # one, or several by name, with their weights


class PythonVerifier:
    """What `@ry.verifier` makes: callable as any verifier, and able to say how a task refers to it."""

    def __init__(self, check: Check, *, grade: Grade | None = None) -> None:
        self.check = check
        self.grade: Grade | None = grade
        self.__name__ = getattr(check, "__name__", type(check).__name__)
        self.__doc__ = check.__doc__

    async def __call__(self, sandbox: Sandbox, rollout: Rollout) -> Verdict:
        try:
            found = self.check(sandbox, rollout)
            if inspect.isawaitable(found):
                found = await found
            return as_verdict(found)
        except (SandboxError, EnvError):
            raise  # the sandbox or the environment broke, not the check: the caller charges the right boundary
        except Exception as error:  # noqa: BLE001 - user code; no reward, and its error is recorded as the evidence
            return Verdict(
                status="failed",
                error=f"{self.__name__}: {type(error).__name__}: {error}",
                log=traceback.format_exc(),
            )

    def spec(self, **fields: Any) -> VerifierSpec:
        fields.setdefault("grade", self.grade or "sealed")
        return VerifierSpec(kind="python", options={"ref": reference(self.check)}, **fields)


@overload
def verifier(check: Check, /) -> PythonVerifier: ...
@overload
def verifier(*, grade: Grade) -> Callable[[Check], PythonVerifier]: ...
def verifier(check: Check | None = None, /, *, grade: Grade | None = None) -> Any:
    """`@ry.verifier`, or `@ry.verifier(grade="shared")`."""
    if check is not None:
        return PythonVerifier(check)

    def decorate(function: Check) -> PythonVerifier:
        return PythonVerifier(function, grade=grade)

    return decorate


def as_verifier(check: Check | None) -> PythonVerifier | None:
    """A caller's own function (or object) in the shape of every verifier, whether it is async or not."""
    if check is None or isinstance(check, PythonVerifier):
        return check
    if not callable(check):
        raise ConfigError(
            f"verifier: a function of the sandbox and the rollout, not {check!r}",
            hint="def check(sandbox, rollout): return 1.0; shell commands go into verify=",
        )
    return PythonVerifier(check, grade=getattr(check, "grade", None))


def as_verdict(found: Any) -> Verdict:
    if isinstance(found, Verdict):
        return found
    if found is None:
        return Verdict(status="none")
    if isinstance(found, (bool, int, float)):
        value = float(found)
        if not math.isfinite(value):
            return Verdict(status="failed", error=f"the verifier gave {value}, which is no reward")
        return Verdict(reward=value, parts={"reward": value})
    if isinstance(found, Mapping):
        return from_parts(cast("Mapping[str, Any]", found))
    return Verdict(status="failed", error=f"the verifier gave a {type(found).__name__}, not a Verdict or a number")


def reference(check: Any) -> str:
    """How a task names a function. One made inside another function has no name to be found by."""
    name: str = getattr(check, "__qualname__", type(check).__qualname__)
    if "<" in name:
        raise ConfigError(f"verifier {name!r} cannot be named in a task", hint="define it at the top of a module")
    module = sys.modules.get(check.__module__)
    file = getattr(module, "__file__", None)
    if file is not None and (check.__module__ == "__main__" or check.__module__.startswith("rollyard_file_")):
        return f"{Path(file).resolve()}:{name}"
    return f"{check.__module__}:{name}"


def spec_of(check: Callable[..., Any]) -> VerifierSpec:
    return check.spec() if isinstance(check, PythonVerifier) else PythonVerifier(check).spec()


def make(spec: VerifierSpec, policy: Policy | None) -> PythonVerifier:
    """`options`: `ref`."""
    ref = read_reference(spec)
    if ref.rpartition(":")[0].endswith(".py"):
        file, _, name = ref.rpartition(":")
        value = getattr(import_file(Path(file)), name, None)
    else:
        value = registry.load("rollyard.verifiers", ref)
    if value is None or not callable(value):
        raise ConfigError(f"verifier {ref!r} is not a function")
    return value if isinstance(value, PythonVerifier) else PythonVerifier(value)


def read_reference(spec: VerifierSpec) -> str:
    return read_options(spec, _Options).ref


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ref: str
