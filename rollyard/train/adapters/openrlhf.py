"""OpenRLHF 0.11: what `AgentExecutor.execute` returns.

`execute` answers for one prompt with one dict: use `execution(rollout)`, the main row. `executions` gives every row, for
executors that flatten lists.
"""

from __future__ import annotations

from typing import Any

from rollyard.core.rollout import Rollout
from rollyard.train.adapters.rows import main_row, scored_rows
from rollyard.trajectory.samples import Sample


def execution(rollout: Rollout, *, label: Any = None) -> dict[str, Any]:
    return _execution(rollout, main_row(scored_rows(rollout)), label)


def executions(rollout: Rollout, *, label: Any = None) -> list[dict[str, Any]]:
    return [_execution(rollout, row, label) for row in scored_rows(rollout)]


def _execution(rollout: Rollout, row: Sample, label: Any) -> dict[str, Any]:
    trained = [span for span in row.spans if span.sampled and any(row.mask[span.start : span.end])]
    return {
        "prompt": rollout.task.instruction,
        "label": label,
        "reward": row.reward,
        "scores": row.reward,
        "observation_tokens": list(row.ids),
        "action_ranges": [(span.start, span.end) for span in trained],
        "rollout_log_probs": list(row.logprobs),
        "truncated": row.truncated,
        "extra_logs": {"turns": float(len(trained)), "rows": float(row.count)},
    }
