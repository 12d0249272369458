"""Several verifiers as one: each judges the same work, and the reward is the weighted mean of theirs.

A task writes `kind = "weighted"` with `options.verifiers`: name -> a kind with its options and a weight. A caller of Python gives
a mapping of names to functions, or to (weight, function). Every part keeps its own metrics: its reward is a part of that name,
its parts and checks are named `NAME.PART`. If one of them cannot judge there is no reward, and the error names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.protocols import Policy, Sandbox, Verifier
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Grade, VerifierSpec
from rollyard.tasks.verifiers.options import read_options
from rollyard.tasks.verifiers.python import PythonVerifier, as_verifier


class WeightedPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str
    weight: float = 1.0
    options: Mapping[str, Any] = {}


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    verifiers: Mapping[str, WeightedPart]


class WeightedVerifier:
    """`parts` are (name, weight, verifier)."""

    def __init__(self, parts: Sequence[tuple[str, float, Verifier]], *, grade: Grade | None = None) -> None:
        if not parts:
            raise ConfigError("several verifiers: at least one is needed")
        for name, weight, _ in parts:
            if not math.isfinite(weight) or weight <= 0:
                raise ConfigError(f"verifier {name!r}: a weight is a positive number, got {weight!r}")
        self._parts, self.grade = parts, grade

    async def __call__(self, sandbox: Sandbox, rollout: Rollout) -> Verdict:
        verdicts = [(name, weight, await verifier(sandbox, rollout)) for name, weight, verifier in self._parts]
        parts: dict[str, float] = {}
        checks: dict[str, bool] = {}
        for name, _, verdict in verdicts:
            parts |= {f"{name}.{part}": value for part, value in verdict.parts.items() if part != "reward"}
            checks |= {f"{name}.{check}": passed for check, passed in verdict.checks.items()}
            if verdict.reward is not None:
                parts[name] = verdict.reward
        found = Verdict(
            parts=parts,
            checks=checks,
            log="\n".join(f"--- {name}\n{verdict.log}" for name, _, verdict in verdicts if verdict.log),
            commands=tuple(command for _, _, verdict in verdicts for command in verdict.commands),
        )
        if lost := [f"{n}: {v.error or f'no reward ({v.status})'}" for n, _, v in verdicts if v.reward is None]:
            return msgspec.structs.replace(found, status="failed", error="; ".join(lost))
        total = math.fsum(weight for _, weight, _ in verdicts)
        reward = math.fsum(weight * (verdict.reward or 0.0) for _, weight, verdict in verdicts) / total
        return msgspec.structs.replace(found, reward=reward, parts={"reward": reward, **parts})


def make(
    spec: VerifierSpec, policy: Policy | None, *, sandboxed: Callable[[VerifierSpec], Verifier] | None = None
) -> WeightedVerifier:
    from rollyard.tasks.verifiers import verifier_for  # it finds this kind too

    return WeightedVerifier(
        [(name, weight, verifier_for(part, policy, sandboxed=sandboxed)) for name, weight, part in parts_of(spec)]
    )


def parts_of(spec: VerifierSpec) -> list[tuple[str, float, VerifierSpec]]:
    """`options`: `verifiers`. The tests, tools and place of the task's verifier are those of all."""
    named = read_options(spec, _Options).verifiers
    return [
        (name, part.weight, msgspec.structs.replace(spec, kind=part.kind, options=part.options))
        for name, part in named.items()
    ]


def _weighted_part(name: str, value: Any) -> tuple[str, float, PythonVerifier]:
    pair: tuple[Any, ...] = value if isinstance(value, tuple) else (1.0, value)
    if len(pair) != 2 or isinstance(pair[0], bool) or not isinstance(pair[0], (int, float)) or not callable(pair[1]):
        raise ConfigError(f"verifier {name!r}: a function, or (weight, function), not {value!r}")
    found = as_verifier(pair[1])
    assert found is not None
    return name, float(pair[0]), found


def as_judge(check: Any) -> PythonVerifier | WeightedVerifier | None:
    """A caller's own verifier: a function, or a mapping of names to functions or to (weight, function)."""
    if not isinstance(check, Mapping):
        return as_verifier(check)
    parts = [_weighted_part(name, value) for name, value in cast("Mapping[str, Any]", check).items()]
    grades: list[Grade] = [part.grade for _, _, part in parts if part.grade is not None]
    if len(set(grades)) > 1:
        raise ConfigError(f"several verifiers judge in one place, and these want {', '.join(sorted(set(grades)))}")
    return WeightedVerifier(parts, grade=grades[0] if grades else None)
