"""OpenPipe ART 0.5: a `Trajectory` whose first row is `messages_and_choices` and whose others are `additional_histories`.

ART trains what stands there as a `Choice` with logprobs, and finds the ids in their "token_id:N" names. An answer that trains
in an earlier row is therefore a plain assistant message in a later one. ART keeps a choice that is a dict as it is, and then
trains nothing: choices must be made with OpenAI's class before its `Trajectory` sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rollyard.core.node import Node
from rollyard.core.rollout import Rollout
from rollyard.gate.rollout_json import chat_messages
from rollyard.train.adapters.rows import graph_of, main_row, scored_rows, versions_of
from rollyard.trajectory.samples import Sample
from rollyard.trajectory.trajectory import Trajectory

_FINISH = {"tool_calls": "tool_calls", "length": "length", "refusal": "content_filter"}


Choose = Callable[[dict[str, Any]], Any]


def trajectories(rollouts: Iterable[Rollout], *, choice: Choose) -> list[dict[str, Any]]:
    """`[art.Trajectory(**t) for t in trajectories(rollouts, choice=Choice.model_validate)]`, with `Choice` from
    `openai.types.chat.chat_completion`."""
    return [_trajectory(rollout, choice) for rollout in rollouts if rollout.reward is not None]


def _trajectory(rollout: Rollout, choice: Choose) -> dict[str, Any]:
    graph, rows = graph_of(rollout), scored_rows(rollout)
    main = main_row(rows)
    versions = sorted({version for row in rows for version in versions_of(row)})
    return {
        "messages_and_choices": _history(graph, main, choice),
        "tools": None,
        "additional_histories": [
            {"messages_and_choices": _history(graph, row, choice), "tools": None} for row in rows if row is not main
        ],
        "reward": rollout.reward,
        "initial_policy_version": versions[0] if versions else None,
        "final_policy_version": versions[-1] if versions else None,
        "metrics": {"rows": float(len(rows)), "tokens": float(sum(row.trained for row in rows))},
        "metadata": {"rollout_id": rollout.id, "task_id": rollout.task.id, "group_id": rollout.group_id},
        "logs": [],
    }


def _history(graph: Trajectory, row: Sample, choice: Choose) -> list[Any]:
    nodes = graph.nodes
    found: list[Any] = []
    for span in row.spans:
        node = nodes[span.node]
        if span.sampled and any(row.mask[span.start : span.end]):
            found.append(choice(_choice(graph, node)))
        else:
            found += chat_messages((node.message,))
    return found


def _choice(graph: Trajectory, node: Node) -> dict[str, Any]:
    assert node.call_id is not None and node.ids is not None and node.logprobs is not None
    content = [
        {"token": f"token_id:{id}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for id, logprob in zip(node.ids, node.logprobs, strict=True)
    ]
    return {
        "finish_reason": _FINISH.get(graph.record(node.call_id).finish or "", "stop"),
        "index": 0,
        "logprobs": {"content": content, "refusal": None},
        "message": chat_messages((node.message,))[0],
    }
