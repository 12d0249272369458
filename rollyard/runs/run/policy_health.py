"""Whether a policy's server answers: asked once before a run, and watched while it goes on.

`check_servers` ends a run that could only fail before anything opens. `PolicyHealth` says when a policy is asked no more: it
failed alike so often in a row that the next attempt would only fail too. An answer of any kind ends a row. A refusal for good
(the key, the model's name) counts each time. A server that is away fails every rollout in flight at the same moment, so there
only a failure of an attempt that began after the last one counts, and the row must last `AWAY_S`: a server that is started
again is waited for, and asked the more rarely the longer it is away.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollyard.core.errors import REFUSED_FOR_GOOD, Error
from rollyard.core.failure_groups import alike
from rollyard.core.protocols import Checkable, Policy
from rollyard.core.rollout import Rollout
from rollyard.runs.rollout.plan import AGENTS_MODEL


async def check_servers(policies: Mapping[str, Policy], model: str | None) -> None:
    """Ask each policy's server once whether it will answer. Raises with its address and its own words."""
    for name, policy in policies.items():
        if not isinstance(policy, Checkable):
            continue
        try:
            await policy.check(model or AGENTS_MODEL)
        except Error as error:
            if len(policies) > 1:
                error.message = f"policy {name!r}: {error.message}"
            raise


AWAY_S = 300.0  # how long a server may be away before its policy is stopped
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # before it is asked again, doubled with every failure


class _Row:
    def __init__(self, message: str, since: float) -> None:
        self.alike, self.since, self.count, self.at = alike(message), since, 0, 0.0


class PolicyHealth:
    """`stopped` maps a policy's name to what its server said last. `most` 0 stops none."""

    def __init__(self, most: int) -> None:
        self.stopped: dict[str, str] = {}
        self._most = most
        self._rows: dict[str, _Row] = {}

    def note(self, policy: str, done: Rollout, *, began: float, now: float) -> bool:
        """True when this rollout's failure was the one too many."""
        failure = done.failure
        if failure is None or failure.boundary != "policy" or done.status == "cancelled":
            self._rows.pop(policy, None)
            return False
        row = self._rows.get(policy)
        if row is None or row.alike != alike(failure.message) or _was_answered(done):
            row = self._rows[policy] = _Row(failure.message, now)
        for_good = failure.status in REFUSED_FOR_GOOD
        if for_good or began >= row.at:
            row.count, row.at = row.count + 1, now
        may_return = not for_good and now - row.since < AWAY_S
        if not self._most or row.count < self._most or may_return or policy in self.stopped:
            return False
        self.stopped[policy] = failure.message
        return True

    def pause_s(self, policy: str) -> float:
        """How long a policy that has just failed is asked for nothing."""
        failures = self._rows[policy].count if policy in self._rows else 1
        return min(_PAUSE_S * 2 ** (failures - 1), _LONGEST_PAUSE_S)


def _was_answered(done: Rollout) -> bool:
    records = done.trajectory.records if done.trajectory is not None else ()
    return any(record.error is None for record in records)
