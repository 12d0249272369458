"""Verifiers: each turns what an agent left into a `Verdict`. One file is one kind, found by name through the registry.

A kind is a function `make(spec, policy) -> Verifier`; `policy` is who answers a model judge, None where there is none. A
registered `@ry.verifier` function is a kind of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from rollyard.core import registry
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.core.protocols import Policy, Verifier
from rollyard.core.task import VerifierSpec
from rollyard.tasks.verifiers import weighted
from rollyard.tasks.verifiers.python import PythonVerifier

Make = Callable[[VerifierSpec, Policy | None], Verifier]
MakeSandboxed = Callable[[VerifierSpec], Verifier]


def verifier_for(
    spec: VerifierSpec, policy: Policy | None = None, *, sandboxed: MakeSandboxed | None = None
) -> Verifier:
    """The verifier a task names. Bad options are an error here, before anything runs. With `sandboxed` nothing that the task
    names is imported: that makes its verifiers of the kind `python`, and the others are installed ones."""
    if sandboxed is not None:
        if spec.kind == "python":
            return sandboxed(spec)
        if spec.kind == "weighted":
            return weighted.make(spec, policy, sandboxed=sandboxed)
        if spec.kind not in (installed := registry.names("rollyard.verifiers")):
            raise UnknownName("verifier", spec.kind, installed)
    found: Any = registry.load("rollyard.verifiers", spec.kind)
    if isinstance(found, PythonVerifier):
        return found
    if not callable(found):
        raise ConfigError(f"verifier {spec.kind!r} is a {type(found).__name__}, not a function")
    return cast("Make", found)(spec, policy)
