"""A run in formats that others read: `export(store, run_id, "batch.parquet")`.

| format  | one ...                    | is                                                                      |
|---------|----------------------------|-------------------------------------------------------------------------|
| jsonl   | line per attempt           | task_id, attempt, status, reward, calls, and what else a table needs    |
| turns   | line per model call        | messages, tokens as text, ids, logprobs, finish: what GRPO scripts take |
| samples | line per training row      | ids, loss mask, logprobs, versions, temperatures, spans, reward         |
| parquet | row per training row       | the same columns, packed (extra `parquet`)                              |
| atif    | document per rollout       | ATIF v1.8 with token ids and sub-agent trajectories                     |
| inspect | sample per rollout         | an Inspect log (.eval): messages, model and tool events, scores, usage  |

Rollouts are streamed: memory is bounded by the largest one. A file appears under its name only when it is complete. Branches
that cannot be proved are not written as rows; each is listed with its reasons in `<out>.refused.jsonl`.
"""

from rollyard.store.exports.export import Exported, Format, export

__all__ = ["Exported", "Format", "export"]
