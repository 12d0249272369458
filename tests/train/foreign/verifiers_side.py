"""Runs in an environment with verifiers: its graph gives the branches it sees in our traces."""

import json
import sys
from pathlib import Path

from verifiers.v1 import WireTrace

traces = [WireTrace.model_validate(trace) for trace in json.loads(Path(sys.argv[1], "verifiers.json").read_text())]
print(
    json.dumps(
        [
            {
                "reward": trace.reward,
                "branches": [
                    {"ids": b.token_ids, "mask": b.sampled_mask, "logprobs": b.logprobs, "trainable": b.trainable}
                    for b in trace.branches
                ],
            }
            for trace in traces
        ]
    )
)
