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
    return row_execution(main_row(scored_rows(rollout)), prompt=rollout.task.instruction, label=label)


def executions(rollout: Rollout, *, label: Any = None) -> list[dict[str, Any]]:
    prompt = rollout.task.instruction
    return [row_execution(row, prompt=prompt, label=label) for row in scored_rows(rollout)]


def row_execution(row: Sample, *, prompt: str, label: Any) -> dict[str, Any]:
    trained = [span for span in row.spans if span.sampled and any(row.mask[span.start : span.end])]
    return {
        "prompt": prompt,
        "label": label,
        "reward": row.reward,
        "scores": row.reward,
        "observation_tokens": list(row.ids),
        "action_ranges": [(span.start, span.end) for span in trained],
        "rollout_log_probs": list(row.logprobs),
        "truncated": row.truncated,
        "extra_logs": {"turns": float(len(trained)), "rows": float(row.count)},
    }
